"""Rows of copy, for tests that need rows and no run."""

import dataclasses

from small import identity_of

from attnbench.report.inputs import Inputs, Protocol
from attnbench.results.rows import Measurement, ResultRow

IDENTITY = identity_of(mixer="Softmax", evaluation="copy", corpus=None)


def row(
    variant="softmax",
    seed=0,
    metric="symbol_accuracy",
    value: float | None = 0.5,
    *,
    settings=None,
    of=None,
    **identity,
):
    """Make a row; without a value it ran out of memory. `of`: further fields of the measurement."""
    missing = {"status": "out_of_memory", "reason": "needs 90 GiB"} if value is None else {}
    measurement = Measurement(
        metric=metric,
        value=value,
        settings=settings or {"length": 50, "beyond_training": False},
        **{"unit": "1", **missing, **(of or {})},
    )
    names = {"variant": variant, "seed": seed, "run": f"{variant}-seed{seed}", **identity}
    return ResultRow(identity=dataclasses.replace(IDENTITY, **names), measurement=measurement)


def rows_of(variant, *values, **others):
    return [row(variant, seed, value=value, **others) for seed, value in enumerate(values)]


def inputs_of(rows, variants, **protocol):
    given = {"plan": "made", "command": "", "rank": [], "reference": None, "files": None, **protocol}
    known = Protocol(variants=list(variants), **given)
    return Inputs(rows=list(rows), control=[], protocol=known, environments={}, folders={})
