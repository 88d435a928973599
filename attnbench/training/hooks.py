"""Logging, validation and checkpoints: hooks that run after every training step when they are due."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbench.machine.device import synchronize
from attnbench.machine.group import Group
from attnbench.machine.pauses import Pauses
from attnbench.machine.signals import StopRequest
from attnbench.model.stored import ModelRecord
from attnbench.settings.errors import UserError
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState, save_best, save_step
from attnbench.training.learning_rate import learning_rates
from attnbench.training.log import MetricsLog, ProgressBar
from attnbench.training.step import StepReport
from attnbench.training.wandb import WandbMirror

log = logging.getLogger(__name__)

LONG_SECONDS = 30 * 60
"""Length of a training on a CPU from which the demo is recommended."""

ESTIMATE_SECONDS = 10.0
"""Time after which a training's length is estimated; the first steps are slower."""


class DivergedError(UserError):
    """The loss or its gradients are not finite.

    Args:
        steps: from 0, since the loss was last known to be finite.
    """

    def __init__(self, message: str, steps: range = range(0)) -> None:
        super().__init__(message)
        self.steps = steps


class Stopwatch:
    """Sum of the seconds in training steps; a process's first step, which compiles, is a separate lap.

    Args:
        pauses: pauses of the process, which do not count.
        group: processes that train together and wait for each other.
    """

    def __init__(
        self, state: TrainState, device: torch.device, pauses: Pauses | None = None, group: Group | None = None
    ) -> None:
        self.state, self.pauses = state, pauses
        self.wait = partial(synchronize if group is None else group.wait, device)
        self.first_step_seconds: float | None = None
        self.mark, self.marked_step = self._clock(), state.step

    def _clock(self) -> float:
        return self.pauses.clock() if self.pauses is not None else time.perf_counter()

    def restart(self) -> None:
        """Exclude the time since the last lap."""
        self.mark = self._clock()

    def lap(self) -> tuple[int, float]:
        """Wait for the device; return (steps, seconds) since the last lap."""
        self.wait()
        now = self._clock()
        steps, seconds = self.state.step - self.marked_step, now - self.mark
        self.mark, self.marked_step = now, self.state.step
        self.state.seconds += seconds
        if self.first_step_seconds is None and steps:
            self.first_step_seconds = seconds
        return steps, seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside."""
        self.lap()
        yield
        self.wait()
        self.restart()


def is_logged(step: int, end: int, settings: TrainSettings) -> bool:
    return step % settings.log_interval_steps == 0 or step == end


@dataclass(kw_only=True)
class Logging:
    """Log every `log_interval_steps` and at the last step; the loss is read from the device only then.

    Raises:
        DivergedError: the loss is not finite, or updates were skipped for non-finite gradients.
    """

    log: MetricsLog
    mirror: WandbMirror | None
    bar: ProgressBar
    stopwatch: Stopwatch
    settings: TrainSettings
    num_steps: int
    tokens_per_step: int

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if self.stopwatch.first_step_seconds is None:
            self.stopwatch.lap()
        if not is_logged(state.step, state.end(self.num_steps), self.settings):
            self.bar.update(state.step, None)
            return
        steps, seconds = self.stopwatch.lap()
        loss, norm = float(report.loss), float(report.gradient_norm)
        left_out = state.step - state.num_updates()
        if not (math.isfinite(loss) and math.isfinite(norm)) or left_out:
            # If no step updated the weights, the rate is not the cause.
            rate = f"; a smaller train.learning_rate than {self.settings.learning_rate:g} may help"
            raise DivergedError(
                f"diverged by step {state.step}: loss {loss:.4g}, norm {norm:.4g}, {left_out} updates skipped "
                f"for gradients that were not finite{rate if left_out < state.step else ''}",
                range(max(0, state.step - self.settings.log_interval_steps), state.step),
            )
        rate = float(learning_rates(self.settings, state.end(self.num_steps), range(state.step - 1, state.step)))
        speed = steps * self.tokens_per_step / seconds if steps else None
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "tokens_per_second": speed}
        self.write(state, values)
        self.bar.update(state.step, loss)

    def write(self, state: TrainState, values: dict[str, Any]) -> None:
        """Write a line, with step, tokens and seconds, to the log and to wandb."""
        row = {"step": state.step, "tokens": state.step * self.tokens_per_step, **values, "seconds": state.seconds}
        self.log.write(row)
        if self.mirror is not None:
            self.mirror.write(row)


@dataclass(kw_only=True)
class Validation:
    """Validate when due and at the last step; keep the weights of the lowest loss, and possibly end the training early.

    A stop interrupts a validation, which may take minutes. The state then records that it is due; `repeat_validation`
    repeats it before the next step.
    """

    measure: Callable[[TrainState], dict[str, Any]]
    """Returns the numbers of a row; changes only the model's mode."""
    is_due: Callable[[int], bool]
    """Tells if a validation is due after this number of steps."""
    new_end: Callable[[TrainState, dict[str, Any]], int | None]
    """Returns the last step if the numbers of a validation end the training early."""
    logging: Logging
    stopwatch: Stopwatch
    stop: StopRequest
    folder: Path
    record: ModelRecord
    num_steps: int

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        if not self.is_due(state.step) and state.step != state.end(self.num_steps):
            return
        with self.stopwatch.paused():
            row = self.stop.unless_stopped(lambda: self.measure(state))
            # Also after an interruption, so that the validation can be repeated.
            state.model.train()
            state.validation_due = row is None
            if row is None:
                return
            nats = row.get("nats_per_character")
            if nats is not None and (state.best_nats is None or nats < state.best_nats):
                state.best_nats, state.best_step = nats, state.step
                save_best(self.folder, state, self.record)
            self.logging.write(state, {"split": "validation", **row})
            end = self.new_end(state, row)
            if end is not None and state.last_step is None:
                state.last_step = end
                self.logging.bar.shorten(end)


@dataclass(kw_only=True)
class Checkpoints:
    """Keep the state every `interval` steps, every `interval_seconds`, and when the run is asked to stop.

    Raises:
        Interrupted: after a signal, once the state is kept.
    """

    folder: Path
    record: ModelRecord
    log: MetricsLog
    stopwatch: Stopwatch
    stop: StopRequest
    interval: int
    interval_seconds: float
    num_steps: int
    last: float = field(default_factory=time.monotonic)

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        # From now on, stopping without a checkpoint would lose steps.
        self.stop.saves = True
        end = state.end(self.num_steps)
        if state.step == end and not state.validation_due:
            return
        is_due = time.monotonic() - self.last >= self.interval_seconds or state.step % self.interval == 0
        if not is_due and self.stop.signal is None:
            return
        with self.stopwatch.paused():
            self.log.sync()
            state.num_metrics_rows = self.log.num_rows
            save_step(self.folder, state, self.record)
        self.stop.saved_steps[self.folder] = state.step
        self.last = time.monotonic()
        if self.stop.signal is not None:
            raise self.stop.interruption(
                f"stopped at step {state.step} of {end}, saved in {self.folder}; the same command resumes it"
            )


def repeat_validation(state: TrainState, hooks: Sequence[Any]) -> None:
    """Repeat an interrupted validation before the next step; the last two hooks validate and keep the state."""
    if state.validation_due:
        for hook in hooks[-2:]:
            hook(state)


class Estimate:
    """Print once, on a CPU, how long the training will take, and recommend the demo if that is long."""

    def __init__(self, bar: ProgressBar, start_step: int, experiment: str) -> None:
        self.bar, self.first, self.experiment = bar, start_step + 4, experiment
        self.started, self.is_told = time.perf_counter(), False

    def __call__(self, state: TrainState, report: StepReport) -> None:
        is_early = state.step < self.first or time.perf_counter() - self.started < ESTIMATE_SECONDS
        seconds = self.bar.seconds_left
        if self.is_told or is_early or not seconds:
            return
        self.is_told = True
        log.info("about %s of training to go on this CPU", duration(seconds))
        if seconds > LONG_SECONDS and self.experiment != "demo":
            log.info("experiment=demo trains a smaller model on a smaller corpus in minutes")


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
