"""Stops by Ctrl-C, SIGTERM or SIGHUP, at once or after a save; output streams that may be closed."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from attnbench.settings.errors import Interrupted, UserError, mendable
from attnbench.settings.escape import printable

Value = TypeVar("Value")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Lasting:
    """Text stream that continues to the null device once it cannot be written to: no message should end the work."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            lose(self.stream)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            lose(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def lose(stream: TextIO) -> None:
    """Redirect the stream, with the content of its buffer, to the null device."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def answering() -> Iterator[TextIO]:
    """Yield standard output for a command's result, and flush it at the end. The block is left when the reader of a
    pipe has closed it."""
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
    """Make standard output and standard error `Lasting` inside; characters that their encoding lacks become "?"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    before = sys.stdout, sys.stderr
    # None in a process that was started without one.
    lasting: list[Any] = [Lasting(stream or open(os.devnull, "w", encoding="utf-8")) for stream in before]  # noqa: SIM115
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def heard() -> list[signal.Signals]:
    """Return the signals that stop this process: all of SIGNALS except a SIGHUP that `nohup` ignores.

    None outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Raise `Interrupted` with this message at a signal inside, and again at the end if a library swallowed it.

    A library that is interrupted may raise another error or none; its result is not to be trusted. Outside the main
    thread nothing changes, see `heard`.
    """
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if came and number == signal.SIGHUP:
            # The shell and the system both report a closed terminal.
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
    """End a script without a traceback after an error that the user can mend, with code 1, and after a signal, with 128
    plus its number. HYDRA_FULL_ERROR=1 shows tracebacks."""
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
        # Imported here: tqdm takes longer to load than a script's arguments to read.
        from attnbench.machine.bars import wrapped

        sys.exit(wrapped(f"error: {text}"))


class StopRequest:
    """Request to stop, set by a signal; training checks it between two steps, saves and stops.

    Before there is anything to save, and inside `unless_stopped`, a signal ends the work at once. A second signal ends
    the process with a message from where the same command resumes. `announced` prints a line at the signal.
    """

    def __init__(self, *, announced: bool = True) -> None:
        self.signal: int | None = None
        self.announced = announced
        self.saves = False
        """A stop waits for a save; not in a first step, which may compile for minutes."""
        self.saved_steps: dict[Path, int] = {}
        """Last saved step of each training, by its folder."""
        self._only_reads = False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle the signals inside. Raises Interrupted if something failed after a signal: Ctrl-C also ends a
        compiler's process, say."""
        before = {number: signal.getsignal(number) for number in heard()}
        for number in before:
            signal.signal(number, self._request)
        try:
            yield self
        except (UserError, OSError):
            # A failed save matters more than the stop.
            raise
        except Exception as error:
            if self.signal is None:
                raise
            raise self.interruption("stopped before a step was done; the same command resumes") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            # The shell and the system both report a closed terminal.
            if number == signal.SIGHUP:
                return
            self._say_lost(number)
            os._exit(128 + number)
        self.signal = number
        if self.saves and self.announced:
            print(f"\n{signal.Signals(number).name}: saving, then stopping", file=sys.stderr, flush=True)
        if self._only_reads or not self.saves:
            self._only_reads = False
            raise self.interruption("stopped before a step was done; the same command resumes")

    def _say_lost(self, number: int) -> None:
        steps = sorted(set(self.saved_steps.values()))
        start = f"from step {steps[0]}" if steps and steps[0] else "from the start"
        start = start if len(steps) < 2 else f"from what each training has saved, the first {start}"
        words = f"{signal.Signals(number).name} again: ended at once, and what was not saved is lost"
        # The first signal may have come while a line was written.
        with suppress(RuntimeError):
            if self.announced:
                print(f"\n{words}; the same command resumes {start}", file=sys.stderr, flush=True)

    def unless_stopped(self, measure: Callable[[], Value]) -> Value | None:
        """Return the result of `measure`, None if a stop was requested before or meanwhile.

        A signal interrupts it anywhere: it may only read, and the caller restores temporary changes, such as a model's
        mode.
        """
        if self.signal is not None:
            return None
        try:
            self._only_reads = True
            value = measure()
            self._only_reads = False
        except BaseException:
            self._only_reads = False
            # A library may have raised another exception at the interruption.
            if self.signal is None:
                raise
            return None
        # If a library swallowed the interruption, the value is not to be trusted.
        return value if self.signal is None else None

    def interruption(self, message: str) -> Interrupted:
        return Interrupted(message, 128 + (self.signal or signal.SIGINT))
