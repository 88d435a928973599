"""Kernels compile for cards other than the one here, into the shared memory that these have."""

import subprocess
import sys

import pytest

ATTENTION = {"flash_forward_kernel", "flash_query_gradient_kernel", "flash_key_value_gradient_kernel"}
DELTA_RULE = {"walk_forward_kernel", "walk_backward_kernel", "scan_forward_kernel", "wide_gradient_kernel"}
DECAY = {"walk_forward_kernel", "walk_backward_kernel", "gradient_kernel", "carry_kernel"}
CHANNEL_DECAY = {"chunk_kernel", "walk_forward_kernel", "walk_backward_kernel", "gradient_kernel"}
OTHERS = {"linear_query_gradient_kernel", "_sum_rows", "turned_heads_kernel", "turned_heads_gradient_kernel"}
EVERYTHING = ATTENTION | DELTA_RULE | DECAY | CHANNEL_DECAY | OTHERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "problems", "kernels", "kib"),
    [
        pytest.param(89, "", EVERYTHING, 99, id="the least that takes bfloat16"),
        pytest.param(90, "tf32", ATTENTION | CHANNEL_DECAY, 227, id="Hopper, whose TF32 is of its own"),
        pytest.param(100, "flash that forgets", ATTENTION | {"cumulative_sum_kernel"}, 227, id="Blackwell, with gates"),
        pytest.param(100, "decay a channel", CHANNEL_DECAY, 227, id="the same, with a decay a key channel"),
        pytest.param(100, "256 x 512", DELTA_RULE, 227, id="Blackwell, which has a memory of its own for sums"),
        pytest.param(90, "scalar decay", DECAY, 227, id="Hopper, all kernels of scalar decay"),
        pytest.param(100, "scalar decay", DECAY, 227, id="Blackwell, the same"),
    ],
)
def test_the_kernels_that_ask_for_most_fit_into_shared_memory(capability, problems, kernels, kib, root):
    command = [sys.executable, "tests/support/compiled_for.py", str(capability), problems]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    needed = {line: float(line.rpartition(": ")[2]) for line in output.splitlines()}
    assert kernels <= {line.partition(",")[0] for line in needed}
    assert not {line for line, most in needed.items() if most > kib}
