import io
import logging
import re
import sys
import time
from unittest.mock import Mock

import pytest

from attnbench.training import log as progress
from attnbench.training.hooks import Estimate
from attnbench.training.log import ProgressBar, watched


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
    assert "2k tok/s 00:10 left" in text
    assert text.endswith("100% 100/100 loss 2 2k tok/s\n")
    assert not re.search(r"[\r\x1b]", text)


@pytest.mark.parametrize(("num_steps", "num_lines"), [(3, 0), (4, 0), (5, 1)])
def test_a_training_that_has_ended_is_not_estimated(num_steps, num_lines, clock, caplog):
    caplog.set_level(logging.INFO, logger="attnbench")
    estimate = Estimate(num_steps=num_steps, start_step=0)
    for step in range(1, num_steps + 1):
        estimate(Mock(step=step), Mock())
    assert len(caplog.records) == num_lines


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
