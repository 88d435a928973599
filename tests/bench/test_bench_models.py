"""bench=models: a mixer whose kernel raises is a row, and the others have their turn."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from benches import CPU, bench_options
from small import MIXERS, mixer_settings

from attnbench.bench import models
from attnbench.bench.base import Conditions
from attnbench.bench.models import ModelsBench
from attnbench.bench.operators import gate, language_models
from attnbench.mixers.definition import Deviation
from attnbench.results.rows import Measurement


def measured(conditions: Conditions = CPU, **options) -> list[Measurement]:
    bench = ModelsBench(**bench_options("models", **options))
    return [row for cell in bench.cells() for row in bench.measure(cell, conditions)]


def of(rows: list[Measurement], name: str) -> list[Measurement]:
    return [row for row in rows if row.settings["implementation"] == name]


@pytest.mark.parametrize("where", ["mixer_error", "build_model"])
def test_a_kernel_that_raises_leaves_the_others_their_turn(where, monkeypatch):
    module = models if where == "mixer_error" else language_models
    original = getattr(module, where)

    def raises(mixer, *given, **more):
        name = (mixer[0] if isinstance(mixer, list) else mixer).name
        if name == "softmax":
            raise ValueError("float16: float32 and bfloat16 are what it has\nand more")
        return original(mixer, *given, **more)

    monkeypatch.setattr(module, where, raises)
    rows = measured()
    assert {(row.status, row.reason) for row in of(rows, "softmax")} == {
        ("failed", "ValueError: float16: float32 and bfloat16 are what it has")
    }
    assert {row.status for row in of(rows, "linear")} == {"ok"}


@pytest.mark.parametrize(("precision", "allowed"), [("float32", 1e-4), ("tf32", 0.01), ("float16", 0.01)])
def test_a_mixer_is_held_against_its_definition_at_the_width_and_precision_that_are_timed(
    precision, allowed, monkeypatch
):
    widths, errors = set(), {}

    def deviation(mixer, length, precision, shape):
        widths.add(shape.head_width)
        return Deviation(output=errors["at"], input_gradient=0.0, position=0.0, parameter_gradient=0.0, parameter="")

    monkeypatch.setattr(gate, "deviation", deviation)
    # Heads of 128 channels are given no more than those of 64.
    for errors["at"], wrong in ((0.9 * allowed, False), (1.1 * allowed, True)):
        with pytest.raises(gate.GateError) if wrong else nullcontext():
            gate.mixer_error(mixer_settings("softmax"), 128, torch.device("cpu"), precision)
    assert widths == {128}
    errors["at"] = 0.0
    measured(mixers=["softmax"])
    assert widths == {128, 16}


def test_a_backend_that_cannot_run_here_is_a_row_that_says_so():
    def with_triton(names):
        return [replace(mixer, options=mixer.options | {"backend": "triton"}) for mixer in CPU.mixers(names)]

    rows = measured(replace(CPU, mixers=with_triton), mixers=["flash"])
    assert {(row.status, row.settings["backend"]) for row in rows} == {("unsupported", "")}


@pytest.mark.gpu
def test_every_kernel_of_a_whole_model_can_be_replayed():
    """The clock replays the calls: one that reads from the device while it is recorded would be a failed row."""
    device = torch.device("cuda", 0)
    for precision in ("float32", "bfloat16"):
        conditions = replace(CPU, device=device, precision=precision)
        rows = measured(conditions, mixers=MIXERS, sizes=[["small", 128, 384, 2, 2]], length=80)
        assert {row.settings["implementation"] for row in rows} == set(MIXERS)
        assert not [(row.settings, row.reason) for row in rows if row.status != "ok"]
