import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from attnbench.settings.registry import TRUSTED, trust

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees, by index or UUID."""


class Child:
    """Process that answers questions over a pipe; it trusts the same classes as this process.

    Args:
        serve: runs in the child with its end of the pipe until that is closed.
        given: further arguments of `serve`, which can be pickled.
        daemon: ended by multiprocessing with this process.
        gpu: the only visible GPU, as in CUDA_VISIBLE_DEVICES; None: those of this process.
    """

    def __init__(self, serve: Callable[..., None], *given: Any, daemon: bool = False, gpu: str | None = None) -> None:
        # Spawned: a fork of a process with threads can hang.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (serve, theirs, frozenset(TRUSTED), given)
        self.process: BaseProcess = context.Process(target=_begin, args=arguments, daemon=daemon)
        # Set before it starts: what it imports may ask CUDA for devices.
        with _environment_variable(VISIBLE_GPUS, gpu), _without_the_program():
            self.process.start()
        theirs.close()

    def send(self, question: Any) -> None:
        """`receive` finds out if the child is dead."""
        with suppress(ConnectionError):
            self.connection.send(question)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Raises EOFError if the child has ended, TimeoutError without an answer in time; `kill` ends the child."""
        try:
            if not self.connection.poll(timeout_seconds):
                raise TimeoutError
            return self.connection.recv()
        except ConnectionError:
            raise EOFError from None

    def exit_code(self) -> int:
        self.process.join()
        return self.process.exitcode or 0

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and close the pipe so that the child does not wait for another question."""
        self.process.terminate()
        self.connection.close()

    def kill(self) -> None:
        """Kill the process and, if it leads a group, the processes that it has started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # If it does not lead a group, or not yet.
        self.process.kill()
        self.process.join()


@contextmanager
def _environment_variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


@contextmanager
def _without_the_program() -> Iterator[None]:
    """Hide the main program from a child that starts inside, unless a trusted class is defined there.

    multiprocessing has the child run the program's file first: without a main guard it would start itself again.
    """
    program = sys.modules["__main__"]
    if any(name.startswith("__main__.") for name in TRUSTED):
        yield
        return
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _begin(serve: Callable[..., None], connection: Connection, trusted: frozenset[str], given: tuple[Any, ...]) -> None:
    trust(trusted)
    serve(connection, *given)


def cause_of_death(exit_code: int | None) -> str:
    """A negative exit code is a signal."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"its process was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"its process ended with exit code {exit_code}"
