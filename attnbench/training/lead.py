"""Rank 0 of a training by several processes: it tells the other ranks before every step, so that all have made the same
steps when one stops."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import TracebackType

from torch import Tensor

from attnbench.machine.group import Group, LostError
from attnbench.machine.ranks import Ranks
from attnbench.machine.signals import StopRequest
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.step import StepReport

log = logging.getLogger(__name__)


class Word(IntEnum):
    """First of three numbers that all ranks agree on, 0 except on rank 0; the second is a signal on any rank."""

    TRAIN = 1
    """A training begins; the third number is its config_hash."""
    STEP = 2
    """The next step; the third number is the last step if the training stops early, or 0."""
    END = 3
    DONE = 4
    QUIT = 5


def check_ranks(settings: TrainSettings, ranks: Ranks) -> None:
    if settings.batch_size % ranks.size:
        raise UserError(
            f"train.batch_size={settings.batch_size}: must be a multiple of the number of processes, {ranks.size}"
        )


def shared_tensors(state: TrainState) -> list[Tensor]:
    """Return all tensors of a state, in the same order on every rank."""
    moments = (state.first_moment, state.second_moment, state.update_count)
    return [*state.model.parameters(), *state.model.buffers(), *(x for kind in moments for x in kind.values())]


class Leader:
    """Rank 0 in one training; at its end the context manager tells the others.

    Args:
        stop: also receives signals to other ranks.
        config_hash: compared with that of the other ranks.
    """

    def __init__(self, group: Group, stop: StopRequest, state: TrainState, num_steps: int, config_hash: str) -> None:
        self.group, self.stop, self.state, self.num_steps, self.config_hash = group, stop, state, num_steps, config_hash
        self._is_stepping, self._has_ended, self._first_step = True, False, state.step

    def __enter__(self) -> "Leader":
        self.group.agree(Word.TRAIN, 0, int(self.config_hash, 16))
        # If another rank could not begin, it has ended and this call raises.
        self.group.agree(Word.TRAIN, 0, self.state.step)
        self.group.share(shared_tensors(self.state))
        log.info(f"{self.group.size} processes train together ({self.group.backend})")
        return self

    def goes_on(self, state: TrainState) -> bool:
        """Tell the others if there is a next step; see `loop.train`."""
        is_next = state.step < state.end(self.num_steps)
        word = Word.STEP if is_next else Word.END
        try:
            _, signal, _ = self.group.agree(word, self.stop.signal or 0, state.last_step or 0)
        except LostError:
            if self.stop.signal is None or state.step > self._first_step + 1:
                raise
            # A signal to all processes ended another one in its first step.
            raise self.stop.interruption("stopped before a step was kept; the same command resumes") from None
        self._is_stepping, self._has_ended = is_next, not is_next
        if self.stop.signal is None and signal:
            self.stop.signal = signal
        return is_next

    def stepped(self, state: TrainState, report: StepReport) -> None:
        """First hook: the others now wait for the next word."""
        self._is_stepping = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_stepping:
            # The others are inside a step and do not listen; they end when this process does.
            self.group.is_lost = True
        elif not self._has_ended and not self.group.is_lost:
            # An error of this process is reported rather than theirs.
            with suppress(LostError):
                self.group.agree(Word.END, 0, 0)


@contextmanager
def leading(group: Group) -> Iterator[None]:
    """Release the other ranks at the end of a job, or of the command after a signal."""
    word = Word.DONE
    try:
        yield
    except Interrupted:
        word = Word.QUIT
        raise
    finally:
        if not group.is_lost:
            with suppress(LostError):
                group.agree(word, 0, 0)
