"""Stops by Ctrl-C, SIGTERM or a terminal that closes, at once or after a save; streams that may go away."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from attnbench.settings.errors import Interrupted, UserError, mendable, printable

Value = TypeVar("Value")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Lasting:
    """Stream of text that turns to the null device once it cannot be written to: no message is worth ending the work.

    Args:
        stream: its target until then.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write or lose it."""
        try:
            return self.stream.write(text)
        except OSError:
            lose(self.stream)
            return len(text)

    def flush(self) -> None:
        """Write or lose the content of the buffer."""
        try:
            self.stream.flush()
        except OSError:
            lose(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def lose(stream: TextIO) -> None:
    """Lead the stream to the null device: the content of its buffer goes there too, without another error."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def answering() -> Iterator[TextIO]:
    """Yield standard output for text that is the purpose of a command, and write its buffer before it ends.

    Where the reader of a pipe has seen enough, what is left of the block is passed by.

    Raises:
        UserError: it cannot be written to.
    """
    output: Any = sys.stdout
    while isinstance(output, Lasting):
        output = output.stream
    try:
        yield output
        output.flush()
    except OSError as error:
        lose(output)
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output: cannot be written to ({error.strerror})") from None


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Make standard output and standard error `Lasting` inside; their buffers are written before it ends.

    A character that the encoding of standard output lacks is written as a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    before = sys.stdout, sys.stderr
    # A process that was started without one has None there.
    lasting: list[Any] = [Lasting(stream or open(os.devnull, "w", encoding="utf-8")) for stream in before]  # noqa: SIM115
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def heard() -> list[signal.Signals]:
    """Return those of SIGNALS that mean a stop here: not the closed terminal that `nohup` has the process ignore.

    None in a thread other than the main one: Python handles signals there alone, and lets no other set a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Raise `Interrupted` with this message at a signal inside, and again at the end where a library lost it.

    A library that was in the middle of something, loading tensors or itself, may turn any exception into another error,
    or lose it; its result is not to be trusted then. In a thread other than the main one nothing changes, see `heard`.
    """
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if came and number == signal.SIGHUP:
            # Both the shell and the system report a closed terminal; the end that has begun must not be cut short.
            return
        came.append(number)
        raise Interrupted(message, 128 + number)

    before = {number: signal.signal(number, stop) for number in heard()}
    try:
        yield
    except Exception as error:
        if came:
            raise Interrupted(message, 128 + came[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Interrupted(message, 128 + came[0])


@contextmanager
def ending_in_one_line(interrupted: str = "interrupted; the same command starts over") -> Iterator[None]:
    """Around a script that Hydra does not run: what users can do something about, and a signal, end it without a
    traceback, which HYDRA_FULL_ERROR=1 shows as it does for the others.

    Args:
        interrupted: said after a signal.

    Raises:
        SystemExit: 1 after what is `errors.mendable`, 128 and its number after a signal.
    """
    try:
        with lasting_streams(), interruptible(interrupted):
            yield
    except Interrupted as interruption:
        print(printable(str(interruption)), file=sys.stderr)
        raise SystemExit(interruption.exit_code) from None
    except Exception as error:
        text = mendable(error)
        if text is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {text}")


class StopRequest:
    """Request to stop, set by any of the signals; training checks it between two steps, saves and stops.

    Before there is anything to save, and in the function of `unless_stopped`, a signal ends the work at once. A second
    signal ends the process, and a line says from where the same command goes on.

    Args:
        announced: a line at once says that it will stop; of several processes not all are to say so.
    """

    def __init__(self, *, announced: bool = True) -> None:
        self.signal: int | None = None
        self.announced = announced
        self.saves = False
        """True where a stop waits for a save: a first step may compile for minutes, and ends without loss."""
        self.saved_steps: dict[Path, int] = {}
        """Last step that is on the disk, of each training by its folder."""
        self._only_reads = False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle the signals inside the block, and restore their handlers after it.

        Raises:
            Interrupted: something failed after a signal. Ctrl-C reaches every process of the terminal, and a compiler
                that it ends is no error of the run.
        """
        before = {number: signal.getsignal(number) for number in heard()}
        for number in before:
            signal.signal(number, self._request)
        try:
            yield self
        except (UserError, OSError):
            # A save that failed is more important than the stop.
            raise
        except Exception as error:
            if self.signal is None:
                raise
            raise self.interruption("stopped before a step was done; the same command goes on") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            # Both the shell and the system report a closed terminal: that is no impatience.
            if number == signal.SIGHUP:
                return
            self._say_lost(number)
            os._exit(128 + number)
        self.signal = number
        if self.saves and self.announced:
            print(f"\n{signal.Signals(number).name}: saving, then stopping", file=sys.stderr, flush=True)
        if self._only_reads or not self.saves:
            self._only_reads = False
            raise self.interruption("stopped before a step was done; the same command goes on")

    def _say_lost(self, number: int) -> None:
        steps = sorted(set(self.saved_steps.values()))
        start = f"from step {steps[0]}" if steps and steps[0] else "from the start"
        start = start if len(steps) < 2 else f"from what each training has saved, the first {start}"
        words = f"{signal.Signals(number).name} again: ended at once, and what was not saved is lost"
        # The first signal may have come while a line was written: then there is no second one.
        with suppress(RuntimeError):
            if self.announced:
                print(f"\n{words}; the same command goes on {start}", file=sys.stderr, flush=True)

    def unless_stopped(self, measure: Callable[[], Value]) -> Value | None:
        """Return the result of `measure`; None where a stop was requested before it, or while it ran.

        A signal cuts it off anywhere, so that nobody waits minutes for it: it may only read, and the caller restores
        its temporary changes, such as a model's mode.
        """
        if self.signal is not None:
            return None
        try:
            self._only_reads = True
            value = measure()
            self._only_reads = False
        except BaseException:
            self._only_reads = False
            # Any exception: a library may have turned the interruption into another one.
            if self.signal is None:
                raise
            return None
        # Where a library has lost the interruption, the value is not to be trusted.
        return value if self.signal is None else None

    def interruption(self, message: str) -> Interrupted:
        """Return the exception to raise once everything is saved."""
        return Interrupted(message, 128 + (self.signal or signal.SIGINT))
