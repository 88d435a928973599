"""bench=operators with our kernels, interpreted on a CPU or, marked gpu, on a card."""

import pytest
import torch
from kernel_checks import DEVICE

from attnbench.bench.base import Conditions, with_speedups
from attnbench.bench.library_operators import LibraryOperatorsBench
from attnbench.bench.operators.roofline import Ceilings

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


@pytest.mark.parametrize("name", ["gated_delta_rule", "fox"])
def test_our_kernels_stand_beside_our_form_and_ratios_are_of_what_both_have(name):
    bench = LibraryOperatorsBench(
        operators=[name],
        shapes=[[1, 33, 2, 16]],
        grouped_shapes=[[1, 20, 1, 2, 16]],
        implementations=["triton", "torch", "without_gates"],
        warmup=1,
        repeats=3,
        max_seconds=0.1,
    )
    conditions = Conditions(
        device=torch.device(DEVICE), precision="float32", ceilings=Ceilings(1.0, 10.0), mixers=lambda names: []
    )
    cells = [with_speedups(bench.measure(cell, conditions), bench.ratios) for cell in bench.cells()]
    rows = [row for cell in cells for row in cell]
    assert {row.reason for row in rows} == {""}
    metrics = {"forward_milliseconds", "backward_milliseconds", "total_milliseconds", "peak_memory_mib", "speedup"}
    assert {row.metric for row in rows if row.settings["implementation"] == "triton"} == {*metrics, "max_error"}
    ratios = {(row.settings["numerator"], row.settings["denominator"]) for row in rows if row.metric == "speedup"}
    assert ratios == {("torch", "triton"), *([("triton", "without_gates")] if name == "fox" else [])}
    # What computes another function is held against nothing.
    alone = {row.metric for row in rows if row.settings["implementation"] == "without_gates"}
    assert alone == (metrics if name == "fox" else set())
