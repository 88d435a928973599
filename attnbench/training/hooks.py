"""One sitting of a training: log, validations and checkpoints, by hooks that run after every step."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnbench.machine.device import synchronize
from attnbench.machine.group import Group
from attnbench.machine.pauses import Pauses
from attnbench.machine.signals import StopRequest
from attnbench.settings.errors import UserError
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState, save_best, save_step
from attnbench.training.learning_rate import learning_rates
from attnbench.training.log import MetricsLog, ProgressBar
from attnbench.training.loop import Hook
from attnbench.training.step import StepReport
from attnbench.training.wandb import WandbMirror

if TYPE_CHECKING:
    from attnbench.training.run import TrainedJob

log = logging.getLogger(__name__)

LONG_SECONDS = 30 * 60
"""Length of a training on a CPU from which the demo is recommended."""

ESTIMATE_SECONDS = 10.0
"""Time after which a training's length is estimated; the first steps are slower."""


class DivergedError(UserError):
    """The loss or its gradients are not finite; `steps` (from 0) are those since the loss was last known to be
    finite."""

    def __init__(self, message: str, steps: range = range(0)) -> None:
        super().__init__(message)
        self.steps = steps


class Stopwatch:
    """Sum of the seconds in training steps; a process's first step, which compiles, is a separate lap.

    Args:
        pauses: of the process; they do not count.
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
        self.lap()
        yield
        self.wait()
        self.restart()


def is_logged(step: int, end: int, settings: TrainSettings) -> bool:
    return step % settings.log_interval_steps == 0 or step == end


@dataclass(kw_only=True)
class Sitting:
    """A stop interrupts a validation, which may take minutes. The state then records that it is due, and it is repeated
    before the next step."""

    job: "TrainedJob"
    log: MetricsLog
    mirror: WandbMirror | None
    bar: ProgressBar
    stopwatch: Stopwatch
    stop: StopRequest
    kept_at: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        return self.job.folder / "checkpoint"

    def write_log(self, state: TrainState, report: StepReport) -> None:
        """Log every `log_interval_steps` and at the last step; only then is the loss read from the device. Raises
        DivergedError if it is not finite, or if updates were skipped for non-finite gradients."""
        settings, end = self.job.train, state.end(self.job.num_steps)
        if self.stopwatch.first_step_seconds is None:
            self.stopwatch.lap()
        if not is_logged(state.step, end, settings):
            self.bar.update(state.step, None)
            return
        steps, seconds = self.stopwatch.lap()
        loss, norm = float(report.loss), float(report.gradient_norm)
        left_out = state.step - state.num_updates()
        if not (math.isfinite(loss) and math.isfinite(norm)) or left_out:
            # Without any update the rate is not the cause.
            rate = f"; a smaller train.learning_rate than {settings.learning_rate:g} may help"
            raise DivergedError(
                f"diverged by step {state.step}: loss {loss:.4g}, norm {norm:.4g}, {left_out} updates skipped "
                f"for gradients that were not finite{rate if left_out < state.step else ''}",
                range(max(0, state.step - settings.log_interval_steps), state.step),
            )
        rate = float(learning_rates(settings, end, range(state.step - 1, state.step)))
        speed = steps * self.job.tokens_per_step / seconds if steps else None
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "tokens_per_second": speed}
        self._write(state, values)
        self.bar.update(state.step, loss)

    def _write(self, state: TrainState, values: dict[str, Any]) -> None:
        row = {"step": state.step, "tokens": state.step * self.job.tokens_per_step, **values, "seconds": state.seconds}
        self.log.write(row)
        if self.mirror is not None:
            self.mirror.write(row)

    def validate(self, state: TrainState, report: StepReport | None = None) -> None:
        """Validate when due and at the last step; keep the weights of the lowest loss, and possibly end early."""
        if not self.job.is_due(state.step) and state.step != state.end(self.job.num_steps):
            return
        with self.stopwatch.paused():
            row = self.stop.unless_stopped(lambda: self.job.measure(state))
            # An interrupted validation is repeated.
            state.model.train()
            state.validation_due = row is None
            if row is None:
                return
            nats = row.get("nats_per_character")
            if nats is not None and (state.best_nats is None or nats < state.best_nats):
                state.best_nats, state.best_step = nats, state.step
                save_best(self.folder, state, self.job.record())
            self._write(state, {"split": "validation", **row})
            end = self.job.new_end(state, row)
            if end is not None and state.last_step is None:
                state.last_step = end
                self.bar.shorten(end)

    def keep(self, state: TrainState, report: StepReport | None = None) -> None:
        """Keep the state every so many steps and seconds, and when the run is asked to stop, which then raises
        Interrupted."""
        # From now on, stopping without a checkpoint would lose steps.
        self.stop.saves = True
        job, end = self.job, state.end(self.job.num_steps)
        if state.step == end and not state.validation_due:
            return
        is_late = time.monotonic() - self.kept_at >= job.train.checkpoint_interval_seconds
        if not is_late and state.step % job.checkpoint_interval and self.stop.signal is None:
            return
        with self.stopwatch.paused():
            self.log.sync()
            state.num_metrics_rows = self.log.num_rows
            save_step(self.folder, state, job.record())
        self.stop.saved_steps[self.folder] = state.step
        self.kept_at = time.monotonic()
        if self.stop.signal is not None:
            raise self.stop.interruption(
                f"stopped at step {state.step} of {end}, saved in {self.folder}; the same command resumes it"
            )

    def hooks(self, start_step: int) -> list[Hook]:
        """The log comes first, so that a validation follows its step; the checkpoint last, so that it counts both."""
        estimate = [Estimate(self.bar, start_step, self.job.folder.parent.name)] if self.job.estimated else []
        return [self.write_log, *estimate, self.validate, self.keep]


class Estimate:
    """Print once how long a training on a CPU will take, if that is long, and recommend the demo."""

    def __init__(self, bar: ProgressBar, start_step: int, experiment: str) -> None:
        self.bar, self.first = bar, start_step + 4
        self.started, self.is_told = time.perf_counter(), experiment == "demo"

    def __call__(self, state: TrainState, report: StepReport) -> None:
        is_early = state.step < self.first or time.perf_counter() - self.started < ESTIMATE_SECONDS
        seconds = self.bar.seconds_left
        if self.is_told or is_early or not seconds:
            return
        self.is_told = True
        if seconds > LONG_SECONDS:
            log.info(
                "about %s of training to go on this CPU; experiment=demo trains a smaller model on a smaller corpus "
                "in minutes",
                duration(seconds),
            )


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
