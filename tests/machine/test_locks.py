"""One process of attnbench at a time on a GPU, unless all share it."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small import python_path

from attnbench.machine import locks

HOLD = """
import logging, sys
from pathlib import Path

import torch

from attnbench.machine import locks

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
locks.lock_path = lambda device: Path("gpu.lock")
with locks.device_lock(torch.device("cuda", 0), shared=sys.argv[1] == "shared"):
    print("has it", flush=True)
    sys.stdin.readline()
"""


class Holder:
    def __init__(self, root: Path, folder: Path, how: str) -> None:
        command = [sys.executable, "-c", HOLD, how]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=folder, env=python_path(root), text=True, **pipes)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.communicate("\n", timeout=60)


@pytest.mark.slow
def test_two_trainings_take_turns_and_what_waits_says_so(root, tmp_path):
    first = Holder(root, tmp_path, "alone")
    assert first.says() == "has it"
    second = Holder(root, tmp_path, "alone")
    assert second.says() == "waiting for cuda:0, which another process of attnbench uses (gpu.lock)"
    first.process.kill()
    assert second.says() == "has it"
    first.process.wait(60)
    second.go()


def test_those_that_share_run_side_by_side_and_keep_others_out(tmp_path, monkeypatch, caplog):
    # Every descriptor holds for itself: threads keep each other out as processes do.
    monkeypatch.setattr(locks, "lock_path", lambda device: tmp_path / "gpu.lock")
    caplog.set_level("INFO", "attnbench")
    device, has_it = torch.device("cuda", 0), threading.Event()

    def alone():
        with locks.device_lock(device, shared=False):
            has_it.set()

    waiting = threading.Thread(target=alone)
    with locks.device_lock(device, shared=True):
        with locks.device_lock(device, shared=True):
            waiting.start()
            assert not has_it.wait(0.2)
        assert not has_it.wait(0.2)
        assert "waiting for cuda:0" in caplog.text
    assert has_it.wait(60)
    waiting.join(60)
