"""One process a folder: who comes second is refused or waits, and nothing is trained twice or written between."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from probe_settings import probe_words
from small import TINY_RUN, python_path

from attnbench.results.folder import holding
from attnbench.settings.errors import UserError
from attnbench.training.log import read_metrics

HOLD = """
import sys
from pathlib import Path

from attnbench.machine.locks import folder_lock

with folder_lock(Path(sys.argv[1]), waits=False):
    print("has it", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(root, tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, env=python_path(root), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate(timeout=60)


def test_a_folder_in_use_is_refused_by_its_owner_s_name(holder, tmp_path):
    expected = rf"{tmp_path}: in use by pid {holder.pid} on .+ since 20"
    with pytest.raises(UserError, match=expected) as caught, holding(tmp_path, waits=False):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_died_blocks_nobody(how, holder, tmp_path):
    holder.send_signal(how)
    holder.wait(60)
    assert str(holder.pid) in (tmp_path / ".lock").read_text()
    with holding(tmp_path, waits=False):
        assert f"pid {os.getpid()} " in (tmp_path / ".lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_has_it_as_soon_as_it_is_free(holder, tmp_path, caplog):
    caplog.set_level("INFO", "attnbench")
    ender = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {holder.pid}"])
    with holding(tmp_path, waits=True):
        assert f"waiting for {tmp_path}, in use by pid {holder.pid}" in caplog.text
    ender.wait(60)


def test_what_the_dead_were_about_to_rename_is_swept_up(tmp_path):
    (tmp_path / ".config.yaml.123.new").write_text("half")
    own = {".notes.new", ".x.1.new", ".stacks.json.2.new"}
    (tmp_path / ".notes.new").write_text("the user's own")
    (tmp_path / ".x.1.new").write_text("the user's own")
    (tmp_path / ".stacks.json.2.new").mkdir()
    with holding(tmp_path, waits=False):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", *own}


def started(root: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "scripts/train.py", "device=cpu", "logger=none", *words]
    environment = {**python_path(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=root, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def steps_logged(folder: Path) -> list[int]:
    return [row["step"] for path in folder.rglob("metrics.jsonl") for row in read_metrics(path) if "loss" in row]


@pytest.mark.slow
def test_of_two_identical_trainings_the_second_says_so_and_fails(root, tmp_path):
    text = tmp_path / "small.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "cat", "sees", "a", "tree"], k=1000)))
    words = [*TINY_RUN, f"data.path={text}", f"outputs_dir={tmp_path}", "train.num_steps=4000", "eval=perplexity"]
    first, second = started(root, *words), started(root, *words)
    deadline = time.monotonic() + 120
    while first.poll() is None and second.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    loser, winner = (second, first) if first.poll() is None else (first, second)
    _, said = loser.communicate(timeout=60)
    assert loser.returncode == 1, said
    assert f"in use by pid {winner.pid} on " in said
    assert "Traceback" not in said
    # On a busy machine the loser is gone before the winner has logged a step.
    while winner.poll() is None and not steps_logged(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    winner.send_signal(signal.SIGTERM)
    _, said = winner.communicate(timeout=60)
    assert winner.returncode == 143, said
    logged = steps_logged(tmp_path)
    assert logged
    assert logged == sorted(set(logged))


@pytest.mark.slow
def test_two_commands_that_share_cells_train_each_once(root, tmp_path):
    text = tmp_path / "small.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "cat", "sees", "a", "tree"], k=1000)))
    own = [
        word for word in probe_words(tmp_path, ["copy"], copy_learning_rates=[1e-2, 3e-2]) if word != "experiment=demo"
    ]
    # Of two seeds: two trainings, but the rates are searched by the same cells.
    both = [started(root, *own, *TINY_RUN, f"data.path={text}", f"seed={seed}") for seed in (0, 1)]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    logs = [*tmp_path.rglob("cells/*/train.log")]
    assert len(logs) >= 4
    for log in logs:
        steps = steps_logged(log.parent)
        assert steps
        assert steps == sorted(set(steps))
    # Each training wrote its checkpoint once: what was found done is not opened again.
    assert not [*tmp_path.rglob("failed.txt")]
