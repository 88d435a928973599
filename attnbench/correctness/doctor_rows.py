from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnbench.correctness.checks import Check
from attnbench.mixers.definition import limits
from attnbench.results.job import measured_by
from attnbench.results.row_tables import write_csv
from attnbench.results.rows import Identity, Measurement, ResultRow

PARTS = tuple(limits(1.0))
"""Errors of a backend, by column of the page."""


def write_rows(checks: Sequence[Check], stamp: dict[str, Any], path: Path) -> None:
    rows = [_row(check, stamp, measurement) for check in checks for measurement in _measurements(check)]
    write_csv(rows, path)


def _measurements(check: Check) -> Iterator[Measurement]:
    lost: dict[str, Any] = {"value": None, "status": "unsupported" if check.refusal else "failed"}
    reason = check.refusal or check.failure
    if check.kind == "first step":
        ran: dict[str, Any] = {"value": check.seconds, "num_samples": 1}
        ran = lost | {"reason": reason} if reason else ran
        yield Measurement(metric="first_step_seconds", unit="s", **ran)
        return
    if check.kind == "promise":
        kept: dict[str, Any] = lost | {"reason": f"{check.name}: {reason}"} if reason else {"value": 1}
        yield Measurement(metric="promise_kept", unit="", settings={"promise": check.name}, **kept)
        return
    settings: dict[str, Any] = {"is_chosen": check.is_chosen}
    if check.kind != "training":
        settings["checked"] = check.name
    elif check.case.name:
        settings["shape"] = check.case.name
    if reason:
        for part in PARTS if check.kind == "training" else ("output",):
            yield Measurement(metric=f"{part}_error", unit="", settings=settings, reason=reason, **lost)
    for error in check.errors:
        number: dict[str, Any] = {"value": error.value}
        if not error.value < float("inf"):
            number = {"value": None, "status": "failed", "reason": f"an error of {error.value}"}
        yield Measurement(metric=error.metric, unit="", settings=settings | error.settings, **number)


def _row(check: Check, stamp: dict[str, Any], measurement: Measurement) -> ResultRow:
    identity = Identity(
        experiment="doctor",
        run="doctor",
        mixer=check.mixer.target.rpartition(".")[2],
        variant=check.mixer.name,
        backend=check.backend,
        model="small" if check.kind == "first step" else "one layer",
        parameters=None,
        seq_len=None,
        evaluation="doctor",
        seed=0,
        precision=check.precision,
        corpus=None,
        config_hash="",
        **measured_by(stamp),
    )
    return ResultRow(identity=identity, measurement=measurement)
