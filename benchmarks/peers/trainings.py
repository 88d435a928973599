"""Our trainings alone: how long one takes to start, and the losses of the fast path beside those of the reference."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnbench.evals.lib.rows import without_numbers
from attnbench.results.rows import Measurement
from attnbench.settings.schema import CONF
from benchmarks.peers.contestants import CACHES, Contestant, Request, say, start_anew
from benchmarks.peers.steps import Order

MIXERS = sorted(path.stem for path in (CONF / "attn").glob("*.yaml"))

FIRST_STEP = {"start_seconds": "s", "first_step_seconds": "s"}
"""From a configuration with all imports done, which reads the corpus and builds the model; and the step alone."""

PATHS: dict[str, tuple[str, ...]] = {
    "reference": ("train.compile=false", "attn.backend=torch"),
    "fast": (),
    "reference in float32": ("train.compile=false", "attn.backend=torch", "train.precision=float32"),
}
"""Settings of each path of an agreement. The last shows what bfloat16 does to the reference by itself."""

REFERENCES = {"flash": "softmax"}
"""The mixer whose definition is the reference, where it is another one's: the same function and parameters."""

INTERVAL_STEPS = 10
"""Distance of the steps whose losses become rows; the largest difference is over all steps."""


def run_first_steps(request: Request) -> None:
    """Each mixer in a new process with caches that are empty, then in another with those that the first has left."""
    folder = request.outputs / "first-step"
    start_anew(folder, "first-step", request, "The first step")
    for mixer in request.mixers or MIXERS:
        order = Order(kind="ours", overrides=[f"attn={mixer}", "data.vocabulary_size=1015", *request.overrides])
        contestant, measured = Contestant("first_step", mixer, order, folder), []
        with TemporaryDirectory(prefix=CACHES, ignore_cleanup_errors=True) as caches:
            for cache in ("cold", "warm"):
                batch_size = contestant.settings.train.batch_size
                settings = {"cache": cache, "attn": mixer, "batch_size": batch_size}
                with ExitStack() as stack:
                    contestant.build(request, stack, Path(caches))
                built, trouble = contestant.built, contestant.trouble
                if trouble is not None:
                    say(f"{mixer}, {cache}: {trouble}")
                    measured += without_numbers(FIRST_STEP, settings, trouble.status, trouble.reason)
                    continue
                say(f"{mixer}, {cache}: " + ", ".join(f"{name} {built[name]:.2f}" for name in FIRST_STEP))
                measured += [
                    Measurement(metric=name, value=built[name], unit="s", settings=settings, num_samples=1)
                    for name in FIRST_STEP
                ]
        contestant.keep(measured)


def run_agreement(request: Request, num_steps: int) -> None:
    """Train each mixer on the fast path and on the reference path, from equal weights on equal batches."""
    folder = request.outputs / "agreement"
    start_anew(folder, "agreement", request, "The same losses")
    for mixer in request.mixers or MIXERS:
        reference: list[float] | None = None
        settings = {"attn": mixer, "num_steps": num_steps}
        for path, more in PATHS.items():
            attn = mixer if path == "fast" else REFERENCES.get(mixer, mixer)
            order = Order(
                kind="ours",
                overrides=[f"attn={attn}", "data.vocabulary_size=1015", *request.overrides, *more],
                options={} if path == "fast" else {"plain": True},
            )
            contestant = Contestant("agreement", path, order, folder)
            with ExitStack() as stack:
                contestant.build(request, stack)
                others = contestant.ask("losses", num_steps=num_steps - 1)
            trouble = contestant.trouble
            if trouble is not None:
                say(f"{mixer}, {path}: {trouble}")
                contestant.keep([*without_numbers({"train_loss": "nats"}, settings, trouble.status, trouble.reason)])
                continue
            losses = [contestant.built["loss"], *others["losses"]]
            reference = losses if path == "reference" else reference
            rows = _loss_rows(losses, reference, settings)
            last = rows[-1]
            shown = last.status if last.value is None else f"{last.value:.4f}"
            say(f"{mixer}, {path}: {last.metric.replace('_', ' ')} {shown}")
            contestant.keep(rows)


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Nats between the two at the step where they are furthest apart."""
    return max(abs(one - other) for one, other in zip(losses, reference, strict=True))


def _loss_rows(losses: list[float], reference: list[float] | None, settings: dict[str, Any]) -> list[Measurement]:
    """Losses at every tenth step, their differences from the reference's, and the largest of all steps."""
    steps = [step for step in range(len(losses)) if step % INTERVAL_STEPS == 0 or step == len(losses) - 1]
    rows = [_nats("train_loss", losses[step], settings | {"step": step}) for step in steps]
    if reference is not None and losses is not reference:
        differences = [loss - other for loss, other in zip(losses, reference, strict=True)]
        rows += [_nats("loss_difference", differences[step], settings | {"step": step}) for step in steps]
        rows.append(_nats("largest_loss_difference", largest_difference(losses, reference), settings))
    return rows


def _nats(metric: str, value: float, settings: dict[str, Any]) -> Measurement:
    if not math.isfinite(value):
        (lost,) = without_numbers({metric: "nats"}, settings, "diverged", f"the loss was {value}")
        return lost
    return Measurement(metric=metric, value=value, unit="nats", settings=settings, num_samples=1)
