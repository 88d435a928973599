"""Kernels fit into the shared memory of cards that have less of it than the one that they were tuned on."""

import subprocess
import sys

import pytest

SMALL_CARD = 89
"""Compute capability of a card with 99 KiB a program, the least of those that take bfloat16 products."""


@pytest.mark.slow
def test_the_kernels_that_ask_for_most_fit_into_99_kib(root):
    command = [sys.executable, "tests/shared_memory.py", str(SMALL_CARD)]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    needed = dict(line.rsplit(": ", 1) for line in output.splitlines())
    kernels = {line.split(",")[0] for line in needed}
    assert {"_forward_kernel", "_forward", "walk_backward_kernel", "scan_forward_kernel"} <= kernels
    assert not {line: kib for line, kib in needed.items() if float(kib) > 99}
