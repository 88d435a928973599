"""The device and its compilers."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from attnbench.kernels.layers.linear_cross_entropy import linear_cross_entropy
from attnbench.machine.device import COMPILER, start_afresh
x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8)
linear_cross_entropy(x, weight, torch.arange(4), None, True)[0].backward()
start_afresh(torch.device("cpu"))
assert COMPILER not in sys.modules, "loaded without anything to compile"
torch.compile(lambda x: x)
assert COMPILER in sys.modules
"""


@pytest.mark.slow
def test_a_process_that_compiles_nothing_does_not_load_the_compiler():
    """That takes seconds, of every worker that trains a second model."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
