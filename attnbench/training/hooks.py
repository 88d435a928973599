"""What happens around training steps. Each hook is called after every step and decides whether it is its turn."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbench.machine.device import synchronize, uncompiled
from attnbench.machine.precision import computing
from attnbench.machine.signals import StopRequest
from attnbench.model.loss import perplexity, split_nats
from attnbench.settings.errors import UserError
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import ModelRecord, TrainState, save_best, save_step
from attnbench.training.log import MetricsLog, ProgressBar
from attnbench.training.loop import StepReport, learning_rates
from attnbench.training.wandb import WandbMirror

log = logging.getLogger(__name__)

LONG_SECONDS = 30 * 60


class DivergedError(UserError):
    """The loss or its gradients were not finite.

    Args:
        steps: those, from 0, since the loss was last known to be finite.
    """

    def __init__(self, message: str, steps: range = range(0)) -> None:
        super().__init__(message)
        self.steps = steps


class Stopwatch:
    """Adds up the seconds spent in training steps, and apart from them those after each sitting's first step.

    The first step compiles, so speed is what the later ones show.
    """

    def __init__(self, state: TrainState, device: torch.device) -> None:
        self.state, self.device = state, device
        self.first_step_seconds: float | None = None
        self.mark, self.marked_step = time.perf_counter(), state.step

    def restart(self) -> None:
        """What happened since the last lap was no training."""
        self.mark = time.perf_counter()

    def lap(self) -> tuple[int, float]:
        """Waits for the device and counts what passed since the last lap: (steps, seconds)."""
        synchronize(self.device)
        now = time.perf_counter()
        steps, seconds = self.state.step - self.marked_step, now - self.mark
        self.mark, self.marked_step = now, self.state.step
        self.state.seconds += seconds
        if self.first_step_seconds is not None:
            self.state.warm_steps += steps
            self.state.warm_seconds += seconds
        elif steps:
            self.first_step_seconds = seconds
        return steps, seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training."""
        self.lap()
        yield
        synchronize(self.device)
        self.restart()


class Logging:
    """Writes a line every `log_interval_steps` and at the last one; reads the loss from the device only then.

    Raises:
        DivergedError: the loss is not finite, or an update was left out because its gradients were not.
    """

    def __init__(
        self,
        *,
        log: MetricsLog,
        mirror: WandbMirror | None,
        bar: ProgressBar,
        stopwatch: Stopwatch,
        settings: TrainSettings,
        num_steps: int,
        tokens_per_step: int,
    ) -> None:
        self.log, self.mirror, self.bar, self.stopwatch = log, mirror, bar, stopwatch
        self.settings, self.num_steps, self.tokens_per_step = settings, num_steps, tokens_per_step
        self.interval = settings.log_interval_steps

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if self.stopwatch.first_step_seconds is None:
            self.stopwatch.lap()
        if state.step % self.interval and state.step != self.num_steps:
            self.bar.update(state.step, None)
            return
        loss, norm = float(report.loss), float(report.gradient_norm)
        steps, seconds = self.stopwatch.lap()
        left_out = state.step - int(torch.stack([*state.update_count.values()]).min())
        if not (math.isfinite(loss) and math.isfinite(norm)) or left_out:
            rate = self.settings.learning_rate
            raise DivergedError(
                f"diverged by step {state.step}: loss {loss:.4g}, norm {norm:.4g}, {left_out} updates skipped "
                f"for gradients that were not finite; a smaller train.learning_rate than {rate:g} may help",
                range(max(0, state.step - self.interval), state.step),
            )
        self.write(
            state,
            {
                "loss": loss,
                "gradient_norm": norm,
                "learning_rate": float(
                    learning_rates(self.settings, self.num_steps, range(state.step - 1, state.step))
                ),
                "tokens_per_second": steps * self.tokens_per_step / seconds if steps else None,
            },
        )
        self.bar.update(state.step, loss)

    def write(self, state: TrainState, values: dict[str, Any]) -> None:
        """One line, with the step, the tokens seen and the seconds trained; mirrored to wandb."""
        row = {"step": state.step, "tokens": state.step * self.tokens_per_step, **values, "seconds": state.seconds}
        self.log.write(row)
        if self.mirror is not None:
            self.mirror.write(row)


class Validating(ABC):
    """Looks at validation data every `interval` steps and at the last one, which may take minutes.

    A stop cuts that off. The state then says that it is due, and whoever resumes it calls this before the next step.
    """

    def __init__(
        self, *, logging: Logging, stopwatch: Stopwatch, stop: StopRequest, interval: int, num_steps: int
    ) -> None:
        self.logging, self.stopwatch, self.stop = logging, stopwatch, stop
        self.interval, self.num_steps = interval, num_steps

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        if state.step % self.interval and state.step != self.num_steps:
            return
        with self.stopwatch.paused():
            found = self.stop.unless_stopped(lambda: self.measured(state))
            # Cut off, it is still as a validation needs it.
            state.model.train()
            state.validation_due = found is None
            if found is not None:
                self.keep(state, found)

    @abstractmethod
    def measured(self, state: TrainState) -> float:
        """Measure; changes nothing but the model's mode."""

    @abstractmethod
    def keep(self, state: TrainState, found: float) -> None:
        """Writes it down."""


class Validation(Validating):
    """Measures the validation split, and keeps the best weights.

    Args:
        part: what the row says of a split that is not read as a whole, see `data.first_characters`.
    """

    def __init__(
        self,
        *,
        batches: Callable[[], Iterable[tuple[Tensor, Tensor, Tensor]]],
        folder: Path,
        record: ModelRecord,
        part: dict[str, int],
        logging: Logging,
        stopwatch: Stopwatch,
        stop: StopRequest,
        interval: int,
        num_steps: int,
    ) -> None:
        super().__init__(logging=logging, stopwatch=stopwatch, stop=stop, interval=interval, num_steps=num_steps)
        self.batches, self.folder, self.record, self.part = batches, folder, record, part

    def measured(self, state: TrainState) -> float:
        """Nats a character."""
        # Not compiled: a second graph for one pass in a thousand steps takes longer than it saves.
        with uncompiled():
            nats_T, count_T = split_nats(state.model, self.batches(), self.record.precision)
        return float(nats_T.sum() / count_T.sum())

    def keep(self, state: TrainState, found: float) -> None:
        """The weights, if they are the best so far; and a row."""
        if state.best_nats is None or found < state.best_nats:
            state.best_nats, state.best_step = found, state.step
            save_best(self.folder, state, self.record)
        row = {"split": "validation", "nats_per_character": found, "perplexity": perplexity(found), **self.part}
        self.logging.write(state, row)


class Plateau(Validating):
    """Looks at what a probe's rates are chosen by; logs it as `selection`."""

    def __init__(
        self,
        *,
        select: Callable[[], float],
        precision: str,
        logging: Logging,
        stopwatch: Stopwatch,
        stop: StopRequest,
        interval: int,
        num_steps: int,
    ) -> None:
        super().__init__(logging=logging, stopwatch=stopwatch, stop=stop, interval=interval, num_steps=num_steps)
        self.select, self.precision = select, precision

    def measured(self, state: TrainState) -> float:
        """The accuracy that rates are chosen by."""
        state.model.eval()
        with torch.no_grad(), computing(self.precision, next(state.model.parameters()).device):
            return self.select()

    def keep(self, state: TrainState, found: float) -> None:
        """A row."""
        self.logging.write(state, {"split": "validation", "selection": found})


class Checkpoints:
    """Keeps the state every `interval_seconds`, after every validation, and when the run is asked to stop.

    Raises:
        Interrupted: the state is kept after a signal.
    """

    def __init__(
        self,
        *,
        folder: Path,
        record: ModelRecord,
        log: MetricsLog,
        stopwatch: Stopwatch,
        stop: StopRequest,
        interval_seconds: float,
        validation_interval: int,
        num_steps: int,
    ) -> None:
        self.folder, self.record, self.log, self.stopwatch, self.stop = folder, record, log, stopwatch, stop
        self.interval_seconds, self.validation_interval = interval_seconds, validation_interval
        self.num_steps, self.last = num_steps, time.monotonic()

    def __call__(self, state: TrainState, report: StepReport | None = None) -> None:
        # From now on a stop would lose steps.
        self.stop.saves = True
        if state.step == self.num_steps and not state.validation_due:
            return
        is_due = time.monotonic() - self.last >= self.interval_seconds or state.step % self.validation_interval == 0
        if not is_due and self.stop.signal is None:
            return
        with self.stopwatch.paused():
            self.log.sync()
            state.num_metrics_rows = self.log.num_rows
            save_step(self.folder, state, self.record)
        self.last = time.monotonic()
        if self.stop.signal is not None:
            raise self.stop.interruption(
                f"stopped at step {state.step} of {self.num_steps}, saved in {self.folder}; the same command resumes it"
            )


def make_up(state: TrainState, hooks: Sequence[Any]) -> None:
    """Validates what a stop cut off, before the next step.

    Args:
        hooks: the last two of which validate and keep the state.
    """
    if state.validation_due:
        for hook in hooks[-2:]:
            hook(state)


class Estimate:
    """On a CPU, says after a few steps how long the training will take, and names the demo where that is long."""

    def __init__(self, *, num_steps: int, start_step: int) -> None:
        self.num_steps = num_steps
        self.first, self.last = start_step + 1, start_step + 4
        self.started = 0.0

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if state.step == self.first:
            self.started = time.perf_counter()
        if state.step != self.last:
            return
        seconds = (time.perf_counter() - self.started) / 3 * (self.num_steps - state.step)
        log.info("about %s of training to go on this CPU", duration(seconds))
        if seconds > LONG_SECONDS:
            log.info("experiment=demo trains a smaller model on a smaller corpus in minutes")


def duration(seconds: float) -> str:
    """1:05:09, or 5:09 below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
