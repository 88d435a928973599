"""One training, to its end or to a stop that keeps its state."""

import logging
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from attnbench.machine.device import keep_freed_memory, start_afresh, warn_of_load
from attnbench.machine.group import Group
from attnbench.machine.pauses import Pauses
from attnbench.machine.signals import StopRequest
from attnbench.mixers.causality import check_causality
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import Matched
from attnbench.model.stored import ModelRecord
from attnbench.results.job import Job
from attnbench.settings.schema import TrainSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.divergence import located
from attnbench.training.hooks import DivergedError, Sitting, Stopwatch
from attnbench.training.lead import Leader
from attnbench.training.log import MetricsLog, ProgressBar, stream_metrics
from attnbench.training.loop import train
from attnbench.training.step import Batch
from attnbench.training.wandb import WandbMirror

log = logging.getLogger(__name__)

_say_once = cache(log.info)


def make_ready(device: torch.device, shape: str | None = None) -> None:
    """Make the device ready before anything is built, generated or timed. `shape`: see `device.start_afresh`."""
    start_afresh(device, shape)
    if device.type == "cpu":
        warn_of_load()
        keep_freed_memory()


class TrainedJob(Job):
    """A job that is one training: of a language model, or of a probe's task.

    Attributes:
        name: its variant, in front of its progress.
        matched: its model; None where it cannot be built.
        num_steps: the most that it makes.
        checkpoint_interval: steps between two checkpoints, beside those by the clock.
        estimated: a line after a few steps tells how long it will take.
        captured: the step is replayed as a CUDA graph.
        group: the processes that train it together, this one as their rank 0.
    """

    name: str
    matched: Matched | None
    train: TrainSettings
    num_steps: int
    checkpoint_interval: int
    compiled: bool = False
    estimated: bool = False
    captured: bool
    group: Group | None = None

    @abstractmethod
    def record(self) -> ModelRecord: ...

    @abstractmethod
    def build(self) -> LanguageModel:
        """The model with initial weights."""

    def load_data(self) -> None:
        """Load the data onto the device."""

    @abstractmethod
    def trial_batch(self) -> Batch:
        """A batch to time a step with."""

    @abstractmethod
    def batches(self, step: int) -> Batch:
        """The batch of a step."""

    def share(self, step: int) -> Batch:
        return self.batches(step)

    @abstractmethod
    def measure(self, state: TrainState) -> dict[str, Any]:
        """The numbers of a validation; changes only the model's mode."""

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Tell if a validation is due after this number of steps."""

    @abstractmethod
    def new_end(self, state: TrainState, row: dict[str, Any]) -> int | None:
        """Return the last step if the numbers of a validation end the training early."""

    def mirror(self, is_resumed: bool) -> WandbMirror | None:
        return None

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.record().seq_len

    @property
    def num_devices(self) -> int:
        return self.group.size if self.group is not None else 1

    def train_model(self, stop: StopRequest) -> tuple[TrainState, Stopwatch]:
        """Train from the last kept state to the end, on a device that `make_ready` was called for.

        Raises:
            DivergedError: with the step, the layer and the last good checkpoint.
            Interrupted: a signal asked to stop, and the state is kept.
        """
        self.load_data()
        with ExitStack() as stack:
            stack.enter_context(stop.listening())
            state, sitting = self.begin_training(stop, stack)
            hooks, goes_on = sitting.hooks(state.step), None
            if self.group is not None:
                leader = Leader(self.group, stop, state, self.num_steps, self.config_hash)
                stack.enter_context(leader)
                hooks, goes_on = [leader.stepped, *hooks], leader.goes_on
                sitting.stopwatch.restart()
            try:
                train(
                    state,
                    self.share,
                    self.train,
                    precision=self.record().precision,
                    num_steps=self.num_steps,
                    hooks=hooks,
                    compiled=self.compiled,
                    captured=self.captured,
                    group=self.group,
                    goes_on=goes_on,
                )
            except DivergedError as error:
                raise self.located(error, state) from None
        return state, sitting.stopwatch

    def begin_training(self, stop: StopRequest, stack: ExitStack) -> tuple[TrainState, Sitting]:
        """Load the last kept state or build a fresh one, open its log, and make up for an interrupted validation.
        `stack` closes the log and the watch for pauses."""
        model, record, folder = self.build(), self.record(), self.folder / "checkpoint"
        resumed = checkpoint.load_last(folder, model)
        if resumed is None:
            layers = [block.mixer for block in model.layers]
            check_causality(record.mixers, layers, record.model.dim, record.seq_len, record.precision)
        state = resumed or TrainState.fresh(model)
        stop.saved_steps[folder] = state.step
        if resumed is not None and state.num_devices != self.num_devices:
            log.info(f"was on {state.num_devices} devices, resumes on {self.num_devices}: its speed is not recorded")
        # Sittings on different numbers of devices have no common speed.
        state.shared_device |= self.shares_device or (resumed is not None and state.num_devices != self.num_devices)
        state.num_devices = self.num_devices
        stopwatch = Stopwatch(state, self.device, stack.enter_context(Pauses()), self.group)
        sitting = self._sit(state, stopwatch, stop, stack, is_resumed=resumed is not None)
        stopwatch.restart()
        if state.validation_due:
            sitting.validate(state)
            sitting.keep(state)
        return state, sitting

    def located(self, error: DivergedError, state: TrainState) -> DivergedError:
        settings = self.train
        if self.group is not None:
            # This process runs the rows of all ranks, in parts of its own size.
            num_rows = settings.batch_size // self.group.size
            settings = replace(settings, micro_batch_size=min(settings.micro_batch_size or num_rows, num_rows))
        return located(error, state, self.batches, settings, self.record().precision, self.folder / "checkpoint")

    def _sit(
        self, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
    ) -> Sitting:
        path = self.folder / "metrics.jsonl"
        metrics_log = MetricsLog(path, state.step if is_resumed else None, state.num_metrics_rows)
        stack.callback(metrics_log.close)
        mirror = self.mirror(is_resumed)
        if mirror is not None:
            # An exception is a failure in wandb too.
            stack.push(lambda kind, *_: mirror.close(exit_code=0 if kind is None else 1))
            _say_once(mirror.notice)
            if is_resumed:
                mirror.replay(stream_metrics(path))
        if is_resumed:
            log.info(f"resumes at step {state.step} of {state.end(self.num_steps)}: {self.folder}")
        bar = ProgressBar(state.end(self.num_steps), self.tokens_per_step, state.step, self.name)
        stack.callback(bar.close)
        return Sitting(job=self, log=metrics_log, mirror=mirror, bar=bar, stopwatch=stopwatch, stop=stop)
