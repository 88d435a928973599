"""One training, to its end or to a stop that keeps its state."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnbench.machine.device import keep_freed_memory, start_afresh, warn_of_load
from attnbench.machine.group import Group
from attnbench.machine.pauses import Pauses
from attnbench.machine.signals import StopRequest
from attnbench.mixers.causality import check_causality
from attnbench.model.language_model import LanguageModel
from attnbench.model.stored import ModelRecord
from attnbench.settings.schema import TrainSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.divergence import located
from attnbench.training.hooks import Checkpoints, DivergedError, Estimate, Logging, Stopwatch, Validation, make_up
from attnbench.training.lead import Leader
from attnbench.training.log import MetricsLog, ProgressBar, stream_metrics
from attnbench.training.loop import train
from attnbench.training.stack import Member
from attnbench.training.step import Batch
from attnbench.training.wandb import WandbMirror

log = logging.getLogger(__name__)


def make_ready(device: torch.device, shape: str | None = None) -> None:
    """Make the device ready for a training: called before anything of it is built, generated or timed.

    Args:
        shape: see `device.start_afresh`.
    """
    start_afresh(device, shape)
    if device.type == "cpu":
        warn_of_load()
        keep_freed_memory()


@dataclass(slots=True, kw_only=True)
class Training:
    """One training, a language model's or a probe's, before it begins."""

    name: str
    """In front of its progress."""
    folder: Path
    """Folder of the job, for metrics.jsonl and checkpoint/."""
    device: torch.device
    record: ModelRecord
    build: Callable[[], LanguageModel]
    batches: Callable[[int], Batch]
    """The batch of each step."""
    settings: TrainSettings
    num_steps: int
    measure: Callable[[TrainState], dict[str, Any]]
    """See `hooks.Validation`."""
    is_due: Callable[[int], bool]
    """See `hooks.Validation`."""
    new_end: Callable[[TrainState, dict[str, Any]], int | None]
    """See `hooks.Validation`."""
    checkpoint_interval: int
    """Steps between two checkpoints, beside those by the clock."""
    mirror: Callable[[bool], WandbMirror] | None = None
    """Opener of the run in wandb, resumed or not; None: it has none."""
    compiled: bool = False
    captured: bool = False
    estimated: bool = False
    """True where a line after a few steps tells how long it will take."""
    group: Group | None = None
    """The processes that train it together, this one as their rank 0."""
    shares: Callable[[int], Batch] | None = None
    """This rank's rows of each step's batch; None: all."""
    config_hash: str = ""
    """See `lead.Leader`."""

    def run(self, stop: StopRequest, *, shares_device: bool = False) -> tuple[TrainState, Stopwatch]:
        """Train from the last kept state to the end, on a device that `make_ready` was called for.

        Args:
            shares_device: others run on the device at the same time; the state remembers it.

        Raises:
            DivergedError: with the step, the layer and the last good checkpoint.
            Interrupted: a signal asked to stop, and the state is kept.
            UserError: a damaged checkpoint, or a mixer from outside attnbench that sees the future.
        """
        with ExitStack() as stack:
            stack.enter_context(stop.listening())
            member, stopwatch = self.begin(stop, stack, shares_device=shares_device)
            hooks, goes_on = member.hooks, None
            if self.group is not None:
                leader = Leader(self.group, stop, member.state, self.num_steps, self.config_hash)
                stack.enter_context(leader)
                hooks, goes_on = [leader.stepped, *hooks], leader.goes_on
                stopwatch.restart()
            try:
                train(
                    member.state,
                    self.shares or self.batches,
                    self.settings,
                    precision=self.record.precision,
                    num_steps=self.num_steps,
                    hooks=hooks,
                    compiled=self.compiled,
                    captured=self.captured,
                    group=self.group,
                    goes_on=goes_on,
                )
            except DivergedError as error:
                raise self.located(error, member.state) from None
        return member.state, stopwatch

    def begin(self, stop: StopRequest, stack: ExitStack, *, shares_device: bool) -> tuple[Member, Stopwatch]:
        """Load the last kept state, or build a fresh one, and open its log; what a stop cut off is made up for.

        Args:
            stack: closes the log, and ends the watch for pauses.
        """
        model, record, folder = self.build(), self.record, self.folder / "checkpoint"
        resumed = checkpoint.load_last(folder, model)
        if resumed is None:
            layers = [block.mixer for block in model.layers]
            check_causality(record.mixers, layers, record.model.dim, record.seq_len, record.precision)
        state = resumed or TrainState.fresh(model)
        stop.saved_steps[folder] = state.step
        num_devices = num_devices_of(self.group)
        if resumed is not None and state.num_devices != num_devices:
            log.info(f"was on {state.num_devices} devices, and goes on with {num_devices}: no row says its speed")
        # A speed over sittings of which each had another is that of none.
        state.shared_device |= shares_device or (resumed is not None and state.num_devices != num_devices)
        state.num_devices = num_devices
        stopwatch = Stopwatch(state, self.device, stack.enter_context(Pauses()), self.group)
        hooks = self._hooks(state, stopwatch, stop, stack, is_resumed=resumed is not None)
        stopwatch.restart()
        make_up(state, hooks)
        given = {"state": state, "batches": self.batches, "settings": self.settings, "num_steps": self.num_steps}
        return Member(**given, hooks=hooks), stopwatch

    def located(self, error: DivergedError, state: TrainState) -> DivergedError:
        """See `divergence.located`."""
        folder, settings = self.folder / "checkpoint", self.settings
        if self.group is not None:
            # This process looks at the rows of all, as many at once as it had.
            num_rows = settings.batch_size // self.group.size
            settings = replace(settings, micro_batch_size=min(settings.micro_batch_size or num_rows, num_rows))
        return located(error, state, self.batches, settings, self.record.precision, folder)

    def _hooks(
        self, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
    ) -> list[Any]:
        """Log first, so that a validation's line follows its step's; the checkpoint last, so that it holds both."""
        path, tokens_per_step = self.folder / "metrics.jsonl", self.settings.batch_size * self.record.seq_len
        metrics_log = MetricsLog(path, state.step if is_resumed else None, state.num_metrics_rows)
        stack.callback(metrics_log.close)
        mirror = self.mirror(is_resumed) if self.mirror is not None else None
        if mirror is not None:
            # What an exception ends has failed, in wandb too.
            stack.push(lambda kind, *_: mirror.close(exit_code=0 if kind is None else 1))
            log.info(mirror.notice)
            if is_resumed:
                mirror.replay(stream_metrics(path))
        if is_resumed:
            log.info(f"resumes at step {state.step} of {state.end(self.num_steps)}: {self.folder}")
        bar = ProgressBar(state.end(self.num_steps), tokens_per_step, state.step, self.name)
        stack.callback(bar.close)
        shared: dict[str, Any] = {"stopwatch": stopwatch, "num_steps": self.num_steps}
        logging = Logging(
            log=metrics_log, mirror=mirror, bar=bar, settings=self.settings, tokens_per_step=tokens_per_step, **shared
        )
        shared |= {"stop": stop, "folder": self.folder / "checkpoint", "record": self.record}
        looks = {"measure": self.measure, "is_due": self.is_due, "new_end": self.new_end}
        validation = Validation(**looks, logging=logging, **shared)
        checkpoints = Checkpoints(
            log=metrics_log,
            interval=self.checkpoint_interval,
            interval_seconds=self.settings.checkpoint_interval_seconds,
            **shared,
        )
        estimate = [Estimate(bar, state.step, self.folder.parent.name)] if self.estimated else []
        return [logging, *estimate, validation, checkpoints]


def num_devices_of(group: Group | None) -> int:
    """Devices that a training has together."""
    return group.size if group is not None else 1
