"""One training of a probe's task, from its first step to its scores, in a folder of its own."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attnbench.data.batches import block_order
from attnbench.evals.base import Task
from attnbench.evals.runners.prepare_probe import (
    CHECK_STEPS,
    ProbeRun,
    probe_config,
    probe_identity,
    probe_record,
    probe_settings,
)
from attnbench.machine.device import computing, keep_freed_memory, start_afresh, synchronize
from attnbench.machine.locks import device_lock
from attnbench.machine.signals import StopRequest
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.mixers.contract import check_causality
from attnbench.model.language_model import build_model
from attnbench.model.matching import Matched
from attnbench.results.folder import recording, stamp_environment, write_config
from attnbench.results.rows import Measurement, ResultsWriter, is_complete
from attnbench.settings.schema import LoggerSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.divergence import located
from attnbench.training.hooks import Checkpoints, DivergedError, Logging, Plateau, Stopwatch, make_up
from attnbench.training.loop import Batch, train
from attnbench.training.metrics import MetricsLog, read_metrics
from attnbench.training.progress import ProgressBar
from attnbench.training.wandb import WandbMirror

PLATEAU = 0.95
"""The value of `selection` that steps_to_95 waits for."""


VALIDATION = {"split": "validation"}

log = logging.getLogger(__name__)


class TrainingSequences:
    """A task's training data, all of it on the device; batch n is a function of (seed, n)."""

    def __init__(self, task: Task, seed: int, device: torch.device) -> None:
        self.task, self.seed, self.device = task, seed, device
        # A few first: what is loaded at the first use is no speed of the generator.
        task.sequences("train", seed, 0, task.batch_size, device)
        synchronize(device)
        started = time.perf_counter()
        self.all = task.sequences("train", seed, 0, task.num_train_sequences, device)
        synchronize(device)
        self.tokens_per_second = self.all.tokens_BT.numel() / (time.perf_counter() - started)
        self.batches_per_epoch = task.num_train_sequences // task.batch_size
        self._epoch, self._order = -1, torch.empty(0)

    @property
    def length(self) -> int:
        return self.all.tokens_BT.shape[1]

    def batch(self, step: int) -> Batch:
        """Every sequence once an epoch, in an order of the epoch's own."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = block_order(self.task.num_train_sequences, self.seed, epoch).to(self.device)
            self._epoch = epoch
        return self.all.rows(self._order[batch * self.task.batch_size : (batch + 1) * self.task.batch_size])


def run_probe(prepared: ProbeRun, *, shares_device: bool = False) -> Path:
    """Trains and scores, or goes on with what was cut off, unless complete results are there; returns their file.

    A training that diverges, does not fit, or cannot be built leaves rows that say so.

    Args:
        shares_device: others run on the device at the same time; then the rows of its speed say so.

    Raises:
        Interrupted: a signal asked to stop, and the state is kept.
    """
    stop = StopRequest()
    with recording(prepared.folder, waits=True), device_lock(prepared.device, shared=shares_device):
        # Asked inside: another process may have finished it while this one waited.
        if not prepared.settings.rerun and is_complete(prepared.results):
            return prepared.results
        write_config(prepared.folder, probe_config(prepared))
        stamp = stamp_environment(prepared.folder, prepared.device)
        with ResultsWriter(prepared.results, probe_identity(prepared, stamp), probe_settings(prepared)) as writer:
            for measurement in _measurements(prepared, shares_device, stop):
                writer.write(measurement)
    if stop.signal is not None:
        # It came during the last step, when there was nothing left to stop but what follows.
        raise stop.interruption(
            f"trained and scored to the end: {prepared.folder}; the same command goes on from there"
        )
    return prepared.results


def _measurements(prepared: ProbeRun, shares_device: bool, stop: StopRequest) -> Iterator[Measurement]:
    if prepared.matched is None:
        yield from _failed(prepared, "unsupported", prepared.obstacle)
        return
    log.info(prepared.matched.statement(prepared.settings.mixer.name))
    yield from _budget(prepared.matched)
    try:
        trained = attempt(lambda: _train(prepared, stop))
    except DivergedError as error:
        yield from _failed(prepared, "diverged", str(error))
        return
    if isinstance(trained, OutOfMemory):
        yield from _failed(prepared, "out_of_memory", trained.reason)
        return
    state, speeds = trained
    scored = attempt(lambda: list(_scores(prepared, state)))
    yield from _failed(prepared, "out_of_memory", scored.reason) if isinstance(scored, OutOfMemory) else scored
    for metric, value in speeds.items():
        settings = {"shared_device": True} if shares_device else {}
        yield Measurement(metric=metric, value=value, unit="token/s", settings=settings)
    checkpoint.save_final(prepared.folder / "checkpoint", state, probe_record(prepared))


def _scores(prepared: ProbeRun, state: TrainState) -> Iterator[Measurement]:
    """What the rate is chosen by, the plateau, and, for a seed that is scored, the scores."""
    task, seed, device = prepared.task, prepared.settings.seed, prepared.device
    state.model.eval()
    with torch.no_grad(), computing(prepared.precision, device):
        selected = task.selection(state.model, seed, device)
        yield Measurement(metric="selection", value=selected, unit="", settings=VALIDATION)
        yield _steps_to_plateau(prepared)
        if prepared.is_scored:
            yield from task.score(state.model, seed, device)


def _train(prepared: ProbeRun, stop: StopRequest) -> tuple[TrainState, dict[str, float]]:
    """The trained state, and tokens a second of the steps and of the generator of their data."""
    task, seed, device, folder = prepared.task, prepared.settings.seed, prepared.device, prepared.folder
    assert prepared.matched is not None
    start_afresh(device)
    if device.type == "cpu":
        keep_freed_memory()
    model = build_model(
        prepared.mixers,
        prepared.matched.model,
        vocabulary_size=task.vocabulary_size,
        seed=seed,
        device=device,
    )
    sequences = TrainingSequences(task, seed, device)
    speeds = {"generator_tokens_per_second": sequences.tokens_per_second}
    resumed = checkpoint.load_last(folder / "checkpoint", model)
    if resumed is None:
        check_causality(
            prepared.mixers,
            [block.mixer for block in model.layers],
            prepared.matched.model.dim,
            sequences.length,
            prepared.precision,
        )
    state = resumed or TrainState.fresh(model)
    tokens_per_step = task.batch_size * sequences.length
    stopwatch = Stopwatch(state, device)
    with ExitStack() as stack:
        stack.enter_context(stop.listening())
        hooks = _hooks(prepared, state, stopwatch, stop, stack, tokens_per_step, is_resumed=resumed is not None)
        stopwatch.restart()
        try:
            make_up(state, hooks)
            train(
                state,
                sequences.batch,
                prepared.train,
                precision=prepared.precision,
                num_steps=task.num_steps,
                hooks=hooks,
                captured=device.type == "cuda",
            )
        except DivergedError as error:
            kept = folder / "checkpoint"
            raise located(error, state, sequences.batch, prepared.train, prepared.precision, kept) from None
    if state.warm_steps:
        speeds["tokens_per_second"] = state.warm_steps * tokens_per_step / state.warm_seconds
    return state, speeds


def _hooks(
    prepared: ProbeRun,
    state: TrainState,
    stopwatch: Stopwatch,
    stop: StopRequest,
    stack: ExitStack,
    tokens_per_step: int,
    *,
    is_resumed: bool,
) -> list[Any]:
    """As a language model's: log first, the checkpoint last, so that it holds what the others wrote."""
    task, seed, device = prepared.task, prepared.settings.seed, prepared.device
    metrics_log = MetricsLog(
        prepared.folder / "metrics.jsonl", state.step if is_resumed else None, state.num_metrics_rows
    )
    stack.callback(metrics_log.close)
    bar = ProgressBar(task.num_steps, tokens_per_step, state.step, prepared.settings.mixer.name)
    stack.callback(bar.close)
    shown = Logging(
        log=metrics_log,
        mirror=_no_mirror(prepared),
        bar=bar,
        stopwatch=stopwatch,
        settings=prepared.train,
        num_steps=task.num_steps,
        tokens_per_step=tokens_per_step,
    )
    plateau = Plateau(
        select=lambda: task.selection(state.model, seed, device),
        precision=prepared.precision,
        logging=shown,
        stopwatch=stopwatch,
        stop=stop,
        interval=CHECK_STEPS,
        num_steps=task.num_steps,
    )
    checkpoints = Checkpoints(
        folder=prepared.folder / "checkpoint",
        record=probe_record(prepared),
        log=metrics_log,
        stopwatch=stopwatch,
        stop=stop,
        interval_seconds=prepared.train.checkpoint_interval_seconds,
        validation_interval=task.num_steps,
        num_steps=task.num_steps,
    )
    return [shown, plateau, checkpoints]


def _no_mirror(prepared: ProbeRun) -> WandbMirror:
    """Hundreds of small trainings would bury a project; compare shows wandb their scores instead."""
    return WandbMirror(
        LoggerSettings(mode="none"), root=Path(), run_id="", name="", group="", job_type="", config={}, resume=False
    )


def _steps_to_plateau(prepared: ProbeRun) -> Measurement:
    rows = read_metrics(prepared.folder / "metrics.jsonl")
    reached = [row["step"] for row in rows if row.get("selection", 0) >= PLATEAU]
    if reached:
        return Measurement(metric="steps_to_95", value=min(reached), unit="step", settings=VALIDATION)
    return Measurement(
        metric="steps_to_95",
        value=None,
        unit="step",
        settings=VALIDATION,
        status="not_reached",
        reason=f"selection stayed below {PLATEAU} for {prepared.task.num_steps} steps",
    )


def _budget(matched: Matched) -> Iterator[Measurement]:
    """What stands beside every score."""
    yield Measurement(metric="parameters", value=matched.parameters, unit="")
    yield Measurement(metric="forward_flops_per_token", value=matched.flops_per_token, unit="FLOP")
    if matched.state_bytes is not None:
        yield Measurement(metric="state_bytes", value=matched.state_bytes, unit="B")


def _failed(prepared: ProbeRun, status: str, reason: str) -> Iterator[Measurement]:
    """What `_scores` would have given, without numbers."""
    scores = prepared.task.axes() if prepared.is_scored else []
    for metric, settings in (("selection", VALIDATION), ("steps_to_95", VALIDATION), *scores):
        unit = "step" if metric == "steps_to_95" else ""
        yield Measurement(metric=metric, value=None, unit=unit, settings=settings, status=status, reason=reason)
