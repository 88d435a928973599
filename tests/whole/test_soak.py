"""A short form of `make soak`: a few stops of each kind of command."""

import subprocess
import sys

import pytest
from small import python_path


@pytest.mark.slow
def test_killed_at_any_moment_every_run_ends_as_if_never_stopped(root):
    # In a new process, which has one thread and may fork.
    done = subprocess.run(
        [sys.executable, "tools/soak.py", "--stops", "training=8,probe=4,stack=4,compare=3", "--seed", "7"],
        cwd=root,
        env={**python_path(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all to the bit as never stopped") == 4
