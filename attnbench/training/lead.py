"""Rank 0's side of a training by several processes: words that tell the others to train, to step, to stop and to leave.

Rank 0 decides all that one process decides. The others hear of it before every step, so that all have made the same
steps whenever one stops.
"""

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
    """The first of the three words that all ranks agree on, 0 from all but rank 0; the second is a signal, of any."""

    TRAIN = 1
    """A training begins; the third word is its config_hash, as a number."""
    STEP = 2
    """The next step; the third word is the last step where a rule has ended the training early, otherwise 0."""
    END = 3
    """The training has ended, whichever way."""
    DONE = 4
    """The job is done, and the command may have others."""
    QUIT = 5
    """The command ends."""


def check_ranks(settings: TrainSettings, ranks: Ranks) -> None:
    """Raise UserError unless every rank has as many rows of a batch."""
    if settings.batch_size % ranks.size:
        raise UserError(
            f"train.batch_size={settings.batch_size}: must be a multiple of the number of processes, {ranks.size}"
        )


def shared_tensors(state: TrainState) -> list[Tensor]:
    """All tensors of a state, in an order that is the same on every rank."""
    moments = (state.first_moment, state.second_moment, state.update_count)
    return [*state.model.parameters(), *(tensor for kind in moments for tensor in kind.values())]


class Leader:
    """Rank 0 in one training; as a context manager around it, which tells the others of its end.

    Args:
        stop: a signal that came to another rank becomes this one's.
        num_steps: the last step, where no rule ends the training early.
        config_hash: of what is trained, which the others have made by themselves.
    """

    def __init__(self, group: Group, stop: StopRequest, state: TrainState, num_steps: int, config_hash: str) -> None:
        self.group, self.stop, self.state, self.num_steps, self.config_hash = group, stop, state, num_steps, config_hash
        self._is_stepping, self._has_ended, self._first_step = True, False, state.step

    def __enter__(self) -> "Leader":
        self.group.agree(Word.TRAIN, 0, int(self.config_hash, 16))
        # Others that could not begin have ended, and this does not return.
        self.group.agree(Word.TRAIN, 0, self.state.step)
        self.group.share(shared_tensors(self.state))
        log.info(f"{self.group.size} processes train together ({self.group.backend})")
        return self

    def goes_on(self, state: TrainState) -> bool:
        """Tell the others that there is a next step, or none, and return whether there is; see `loop.train`."""
        is_next = state.step < state.end(self.num_steps)
        word = Word.STEP if is_next else Word.END
        try:
            _, signal, _ = self.group.agree(word, self.stop.signal or 0, state.last_step or 0)
        except LostError:
            if self.stop.signal is None or state.step > self._first_step + 1:
                raise
            # A signal to all ended another at once, which was still in its first step.
            raise self.stop.interruption("stopped before a step was kept; the same command goes on") from None
        self._is_stepping, self._has_ended = is_next, not is_next
        if self.stop.signal is None and signal:
            self.stop.signal = signal
        return is_next

    def stepped(self, state: TrainState, report: StepReport) -> None:
        """Hook that comes first: the others wait for the next word from now on."""
        self._is_stepping = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_stepping:
            # They are inside a step, and hear no word: they end once this process has.
            self.group.is_lost = True
        elif not self._has_ended and not self.group.is_lost:
            # Where there is an error, it is this one that counts.
            with suppress(LostError):
                self.group.agree(Word.END, 0, 0)


@contextmanager
def leading(group: Group) -> Iterator[None]:
    """Let the other ranks go at the end of a job, or of the command where a signal ends it."""
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
