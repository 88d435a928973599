"""Standard output and standard error that may go away: a pipe that nobody reads on, a closed terminal, a full disk."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Lasting:
    """A stream of text that leads to the null device as soon as it cannot be written to: nothing that is said is worth
    ending the work that it is said of.

    Args:
        stream: where it leads until then.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes or loses it."""
        try:
            return self.stream.write(text)
        except OSError:
            lose(self.stream)
            return len(text)

    def flush(self) -> None:
        """Writes or loses what is in the buffer."""
        try:
            self.stream.flush()
        except OSError:
            lose(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def lose(stream: TextIO) -> None:
    """Leads the stream to the null device: what its buffer holds goes there too, without another error."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def raising(stream: TextIO) -> TextIO:
    """The stream itself, whose errors are heard: for text that is what a command is there for."""
    while isinstance(stream, Lasting):
        stream = stream.stream
    return stream


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, standard output and standard error are `Lasting`; what is in their buffers is written before it ends."""
    before = sys.stdout, sys.stderr
    # A process that was started without one has None there.
    lasting: list[Any] = [Lasting(stream or open(os.devnull, "w")) for stream in before]  # noqa: SIM115
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
