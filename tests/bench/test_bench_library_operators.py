"""bench=operators: each implementation held against the definition and timed, what is not here named."""

import pytest
import torch
from benches import CPU, bench_options
from torch import Tensor

from attnbench.bench.library_operators import LibraryOperatorsBench
from attnbench.bench.operators import library
from attnbench.bench.operators.library import OPERATORS
from attnbench.mixers.retnet import RetNet
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.registry import build

TARGET = "attnbench.bench.library_operators.LibraryOperatorsBench"
METRICS = {"forward_milliseconds", "backward_milliseconds", "total_milliseconds", "max_error", "peak_memory_mib"}


def measured(**options) -> list[Measurement]:
    bench = LibraryOperatorsBench(**bench_options("operators", **options))
    return [row for cell in bench.cells() for row in bench.measure(cell, CPU)]


def of(rows: list[Measurement], name: str) -> list[Measurement]:
    return [row for row in rows if row.settings["implementation"] == name and row.metric != "speedup"]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_our_form_and_names_what_is_not_here(name):
    rows = measured(operators=[name], implementations=["torch", "fla", "mamba_ssm", "flash_qla"])
    here, absent = of(rows, "torch"), [row for row in rows if row.settings["implementation"] != "torch"]
    assert {row.metric for row in here} == (METRICS if "torch" in OPERATORS[name].functions else set())
    assert all(row.status == "ok" for row in here)
    assert {row.settings["implementation"] for row in absent} == set(OPERATORS[name].functions) - {
        *("torch", "triton", "without_gates")
    }
    for row in absent:
        assert row.status == "unsupported"
        assert "needs CUDA" in row.reason or "cannot be imported" in row.reason


def test_a_backend_that_no_mixer_has_is_refused_and_one_that_it_gets_is_taken(monkeypatch):
    options = {"operators": ["retention"], "implementations": ["triton"]}
    monkeypatch.setattr(RetNet, "backends", ("torch", "fla"))
    assert {row.reason for row in measured(**options)} == {"attn.backend=triton: RetNet has auto, torch, fla"}
    monkeypatch.setattr(RetNet, "backends", ("torch", "triton"))
    monkeypatch.setattr(RetNet, "choose_backend", lambda options, **_: options["backend"])
    monkeypatch.setattr(library, "_packed_scalar_decay", sum_of_decayed)
    assert {row.status for row in measured(**options)} == {"ok"}


def sum_of_decayed(mixed: Tensor, log_decay: Tensor, write: Tensor | None, shape: library.Shape) -> Tensor:
    query, key, value = mixed.unflatten(-1, (-1, shape.head_width)).chunk(3, dim=2)
    assert write is None
    return library.scalar_decay(query, key, value, log_decay, None, "torch")[0]


@pytest.mark.parametrize("part", ["output", "gradient of value"])
def test_what_is_wrong_is_not_timed(part, monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (1.001 if part == "output" else 1.0)

        @staticmethod
        def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
            return gradient * 1.001

    right = library.scalar_decay

    def wrong(query, key, value, *rest):
        if value.dtype == torch.float64:
            return right(query, key, value, *rest)
        return right(query, key, Wrong.apply(value), *rest)

    monkeypatch.setattr(library, "scalar_decay", wrong)
    rows = measured(operators=["simple_gla"], implementations=["torch"])
    assert {row.status for row in rows} == {"failed"}
    assert all(f"{part} is off by 0.001, and float32 explains 0.0001" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operators": ["gla", "conv"]}, r"bench\.operators=\['gla', 'conv'\]: must be one of retention"),
        ({"shapes": [[1, 2, 3]]}, r"bench.shapes: \[1, 2, 3\] must be \[batch_size, sequence_length, num_heads, head"),
        ({"grouped_shapes": [[1, 8, 3, 4, 16]]}, "3 heads must divide 4"),
        ({"shapes": [[1, 0, 2, 16]]}, "shapes"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        build(TARGET, bench_options("operators", **change), LibraryOperatorsBench, group="bench")
