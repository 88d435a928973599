"""Kernels compile for cards other than the one here, into the shared memory that these have."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "problems", "kib"),
    [
        # The least of cards that take products in bfloat16.
        pytest.param(89, "", 99, id="a small card"),
        pytest.param(90, "tf32", 227, id="Hopper, which has instructions of its own for products in TF32"),
    ],
)
def test_the_kernels_that_ask_for_most_fit_into_shared_memory(capability, problems, kib, root):
    command = [sys.executable, "tests/compiled_for.py", str(capability), problems]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    needed = {line: float(line.rpartition(": ")[2]) for line in output.splitlines()}
    kernels = {line.partition(",")[0] for line in needed}
    assert {"_forward_kernel", "_query_gradient_kernel", "_key_value_gradient_kernel"} <= kernels
    assert problems or {"_forward", "walk_backward_kernel", "scan_forward_kernel"} <= kernels
    assert not {line for line, most in needed.items() if most > kib}
