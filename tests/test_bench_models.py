"""bench=models: a mixer whose kernel raises is a row, and the others have their turn."""

from dataclasses import replace

import pytest
import torch
import yaml
from small import mixer_settings

from attnbench.bench import models
from attnbench.bench.base import Subject
from attnbench.bench.models import ModelsBench
from attnbench.bench.roofline import Ceilings
from attnbench.config import CONF
from attnbench.results import Measurement

SUBJECT = Subject(
    device=torch.device("cpu"),
    precision="float32",
    ceilings=Ceilings(1.0, 10.0),
    mixers=lambda names: [mixer_settings(name) for name in names],
)
OPTIONS = yaml.safe_load((CONF / "bench" / "models.yaml").read_text()) | ModelsBench.smoke
del OPTIONS["_target_"]


def measured(subject: Subject = SUBJECT, **options) -> list[Measurement]:
    bench = ModelsBench(**OPTIONS | options)
    return [row for cell in bench.cells() for row in bench.measure(cell, subject)]


def of(rows: list[Measurement], name: str) -> list[Measurement]:
    return [row for row in rows if row.settings["implementation"] == name]


@pytest.mark.parametrize("where", ["mixer_error", "build_model"])
def test_a_kernel_that_raises_leaves_the_others_their_turn(where, monkeypatch):
    original = getattr(models, where)

    def raises(mixer, *given, **more):
        name = (mixer[0] if isinstance(mixer, list) else mixer).name
        if name == "softmax":
            raise ValueError("float16: float32 and bfloat16 are what it has\nand more")
        return original(mixer, *given, **more)

    monkeypatch.setattr(models, where, raises)
    rows = measured()
    assert {(row.status, row.reason) for row in of(rows, "softmax")} == {
        ("failed", "ValueError: float16: float32 and bfloat16 are what it has")
    }
    assert {row.status for row in of(rows, "linear")} == {"ok"}


def test_a_backend_that_cannot_run_here_is_a_row_that_says_so():
    def with_triton(names):
        return [replace(own, options=own.options | {"backend": "triton"}) for own in SUBJECT.mixers(names)]

    rows = measured(replace(SUBJECT, mixers=with_triton), mixers=["flash"])
    assert {(row.status, row.settings["backend"]) for row in rows} == {("unsupported", "")}
