"""Whether the fast path trains like the reference path: their losses on the same batches from the same weights.

outputs/peers/agreement/
"""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.results.files import replace_file
from attnbench.results.rows import Measurement
from benchmarks.peers.implementations import Job
from benchmarks.peers.rows import write_rows
from benchmarks.peers.turns import Compose, Say
from benchmarks.peers.worker import Worker, WorkerError

PATHS: dict[str, tuple[str, ...]] = {
    "reference": ("train.compile=false", "attn.backend=torch"),
    "fast": (),
    "reference in float32": ("train.compile=false", "attn.backend=torch", "train.precision=float32"),
}
"""What each path adds to the settings. The last shows what bfloat16 does to the reference by itself."""

REFERENCES = {"flash": "softmax"}
"""The mixer whose definition is the reference, where it is another one's: the same function and parameters."""

INTERVAL_STEPS = 10
"""Of the steps whose losses become rows; the largest difference is over all of them."""


def run_agreement(
    mixers: Sequence[str],
    compose: Compose,
    overrides: Sequence[str],
    folder: Path,
    *,
    num_steps: int,
    limit_seconds: float,
    command: str,
    say: Say,
) -> None:
    """Trains each mixer on every path for so many steps."""
    shutil.rmtree(folder, ignore_errors=True)
    for mixer in mixers:
        reference: list[float] | None = None
        for path, more in PATHS.items():
            attn = mixer if path == "fast" else REFERENCES.get(mixer, mixer)
            options = {} if path == "fast" else {"plain": True}
            job = Job.of(compose([f"attn={attn}", "data.vocabulary_size=1015", *overrides, *more]), "ours", options)
            settings = {"attn": mixer, "num_steps": num_steps}
            try:
                built, losses = _train(job, num_steps, folder / "output.log", limit_seconds)
            except WorkerError as error:
                say(f"{mixer}, {path}: {error.status}: {error.reason}")
                lost = _measurement("train_loss", None, settings, error)
                write_rows(folder, "agreement", path, job, {}, [lost])
                continue
            if path == "reference":
                reference = losses
            rows = _rows(losses, reference, settings)
            say(f"{mixer}, {path}: {_shown(rows[-1])}")
            write_rows(folder, "agreement", path, job, built, rows)
    replace_file(folder / "case.json", json.dumps({"name": "agreement", "command": command}, indent=1) + "\n")


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Nats between the two at the step where they are furthest apart."""
    return max(abs(one - other) for one, other in zip(losses, reference, strict=True))


def _train(job: Job, num_steps: int, log: Path, limit_seconds: float) -> tuple[dict[str, Any], list[float]]:
    with Worker(log, limit_seconds=limit_seconds) as worker:
        built = worker.ask("build", job=job.to_dict())
        return built, [built["loss"], *worker.ask("losses", num_steps=num_steps - 1)["losses"]]


def _rows(losses: list[float], reference: list[float] | None, settings: dict[str, Any]) -> list[Measurement]:
    """Losses at every tenth step, their differences from the reference's, and the largest of all steps."""
    steps = [step for step in range(len(losses)) if step % INTERVAL_STEPS == 0 or step == len(losses) - 1]
    rows = [_measurement("train_loss", losses[step], {**settings, "step": step}) for step in steps]
    if reference is not None and losses is not reference:
        differences = [loss - other for loss, other in zip(losses, reference, strict=True)]
        rows += [_measurement("loss_difference", differences[step], {**settings, "step": step}) for step in steps]
        rows.append(_measurement("largest_loss_difference", largest_difference(losses, reference), settings))
    return rows


def _measurement(
    metric: str, value: float | None, settings: dict[str, Any], error: WorkerError | None = None
) -> Measurement:
    if error is not None:
        return Measurement(
            metric=metric, value=None, unit="nats", settings=settings, status=error.status, reason=error.reason
        )
    if value is None or not math.isfinite(value):
        reason = f"the loss was {value}"
        return Measurement(metric=metric, value=None, unit="nats", settings=settings, status="diverged", reason=reason)
    return Measurement(metric=metric, value=value, unit="nats", settings=settings, num_samples=1)


def _shown(row: Measurement) -> str:
    return f"{row.metric.replace('_', ' ')} " + (row.status if row.value is None else f"{row.value:.4f}")
