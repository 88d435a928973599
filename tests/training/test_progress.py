import io
import json
import logging
import os
import re
import sys
import time
from unittest.mock import Mock

import pytest
import torch

from attnbench.machine.device import warn_of_load
from attnbench.machine.pauses import BEAT_SECONDS, Pauses
from attnbench.training import log as progress
from attnbench.training.hooks import Estimate, duration
from attnbench.training.log import ProgressBar, watched
from attnbench.training.speed import speed_row


@pytest.fixture
def clock(monkeypatch):
    """The clock, standing still; append to move it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    return now


def test_tokens_per_second_leaves_out_the_first_step_and_what_is_long_ago(clock, capsys):
    bar = ProgressBar(1000, 50, 0, "softmax")
    clock.append(clock[-1] + 60)
    bar.update(1)
    assert bar.tokens_per_second is None
    for step in range(2, 6):
        clock.append(clock[-1] + 0.5)
        bar.update(step)
    assert bar.tokens_per_second == 100
    for step in range(6, 80):
        clock.append(clock[-1] + 1)
        bar.update(step)
    assert bar.tokens_per_second == 50
    assert capsys.readouterr().err


def test_without_a_terminal_a_plain_line_at_every_tenth(clock, capsys):
    bar = ProgressBar(100, 1000, 40, "softmax")
    for step in range(41, 101):
        clock.append(clock[-1] + 0.5)
        bar.update(step, loss=2.0 if step == 50 else None)
    bar.close()
    text = capsys.readouterr().err
    assert [int(share) for share in re.findall(r"(\d+)%", text)] == [50, 60, 70, 80, 90, 100]
    assert all(len(line) <= 80 and "loss 2 " in line for line in text.splitlines())
    assert "2.00k tok/s 00:10 left" in text
    assert text.endswith("100% 100/100 loss 2 2.00k tok/s\n")
    assert not re.search(r"[\r\x1b]", text)


def test_who_trains_the_demo_is_not_told_of_it(clock, caplog, capsys):
    caplog.set_level(logging.INFO, logger="attnbench")
    for experiment, num_lines in (("demo", 0), ("default", 1)):
        caplog.clear()
        bar = ProgressBar(10**6, 1000, 0, "softmax")
        estimate = Estimate(bar, 0, experiment)
        for step in range(1, 31):
            clock.append(clock[-1] + 5.0)
            bar.update(step)
            estimate(Mock(step=step), Mock())
        assert len(caplog.records) == num_lines


@pytest.mark.parametrize(("seconds", "num_lines"), [(100.0, 1), (1.0, 0)])
def test_a_long_training_is_told_once_with_the_time_that_the_bar_shows(seconds, num_lines, clock, caplog, capsys):
    caplog.set_level(logging.INFO, logger="attnbench")
    bar, shown = ProgressBar(100, 1000, 0, "softmax"), []
    estimate = Estimate(bar, 0, "default")
    for step in range(1, 101):
        clock.append(clock[-1] + seconds)
        bar.update(step)
        estimate(Mock(step=step), Mock())
        shown.append(duration(bar.seconds_left or 0.0))
    assert len(caplog.messages) == num_lines
    assert all(re.search(r"about ([\d:]+) of", message)[1] in shown for message in caplog.messages)


def test_without_a_terminal_a_line_after_half_a_minute(clock, capsys):
    bar = ProgressBar(100_000, 1000, 0, "softmax")
    for step in range(1, 4):
        clock.append(clock[-1] + 20)
        bar.update(step)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_part_of_something_longer_says_nothing_unless_it_is_long(clock, capsys):
    for seconds, num_lines in ((0.5, 0), (10.0, 3)):
        for _ in watched(range(10), 10, 1000, "validation"):
            clock.append(clock[-1] + seconds)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == num_lines
        assert all(line.startswith("validation ") for line in lines)


def test_a_part_s_bar_is_gone_when_it_is_done(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PASSING_SECONDS", 0.1)
    for _ in watched(range(5), 5, 1000, "validation"):
        time.sleep(0.12)
    assert "validation |" in screen.getvalue()
    assert "4/5" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().endswith("\r")


def test_on_a_terminal_one_line_within_80_columns(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    bar = ProgressBar(100_000, 32_768, 0, "a_variant_with_a_very_long_name-27m-T1024-seed0")
    for step in (99_997, 99_998, 99_999):
        time.sleep(0.12)
        bar.update(step, loss=2.34567)
    bar.close()
    text = screen.getvalue()
    frames = [re.sub(r"\x1b\[[A-Z]", "", frame) for frame in re.split(r"[\r\n]", text)]
    assert any("99999/100000 loss 2.346" in frame and frame.endswith(" left") for frame in frames), frames
    assert max(map(len, frames)) <= 80


def interval_log(path, speeds, *, length=10):
    """A log with an interval of each speed, and a validation behind each."""
    with path.open("w") as file:
        for number, speed in enumerate(speeds, start=1):
            row = {"step": number * length, "tokens": 0, "loss": 1.0, "tokens_per_second": speed, "seconds": 1.0}
            file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"step": number * length, "split": "validation", "perplexity": 2.0}) + "\n")


def test_the_speed_of_a_training_is_that_of_the_last_half_of_its_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # Slow at first, which a resumed sitting repeats; of two unequal intervals the time counts, not their mean.
    interval_log(path, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 400.0, None, 400.0, 100.0, 100.0])
    row = speed_row(path, 120, tokens_per_step=8)
    assert row.num_samples == 50 * 8
    assert row.value == pytest.approx(50 / (3 * 10 / 100 + 2 * 10 / 400))
    interval_log(path, [5.0] * 9)
    short = speed_row(path, 90, tokens_per_step=8)
    assert (short.value, short.status) == (None, "not_reached")
    assert "90 steps" in short.reason
    interval_log(path, [5.0], length=200)
    assert "no interval in the last half" in speed_row(path, 200, 8).reason
    assert "no interval" in speed_row(tmp_path / "gone", 200, 8).reason


def test_a_process_that_was_suspended_has_not_trained_meanwhile(clock):
    with Pauses() as pauses:
        before = pauses.clock()
        clock.append(clock[-1] + 0.5)
        assert pauses.clock() == before + 0.5
        clock.append(clock[-1] + 40)
        assert pauses.clock() <= before + 0.5 + BEAT_SECONDS


def test_a_load_above_the_cores_is_told_once_and_names_the_remedy(monkeypatch, caplog):
    threads = 4
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    warn_of_load.cache_clear()
    for _ in range(2):
        warn_of_load()
    assert len(caplog.records) == 1
    assert "OMP_NUM_THREADS=1" in caplog.text
    threads = 1
    warn_of_load.cache_clear()
    warn_of_load()
    assert len(caplog.records) == 1


def test_a_bar_has_its_name_before_it_and_its_figures_behind_it(clock, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    bar = ProgressBar(10, 1000, 0, "mine{0}")
    for step in range(1, 11):
        clock.append(clock[-1] + 1.0)
        bar.update(step, loss=2.5)
    bar.close()
    last = re.split(r"[\r\n]", screen.getvalue().rstrip())[-1]
    assert re.fullmatch(r"mine\{0\} \|[█#]+\| 10/10 loss 2.5 1.00k tok/s", last)
    assert len(last) < 80
