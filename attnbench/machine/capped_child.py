"""A child process whose memory is capped: what does not fit ends no more than the child."""

import multiprocessing
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from attnbench.machine.memory import memory_capped
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.settings.registry import TRUSTED, trust

SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""How a process ends that is out of memory without torch noticing: by the system, or in a library that does not look
at what malloc gave it."""


class CappedChild:
    """Answers one question after another in a process of its own, until one does not fit; then a new one goes on.

    Args:
        prepare: called in the child before its memory is capped, gives the function that answers; can be sent there.
        cap_mib: what the child may allocate beyond what it has by then.
    """

    def __init__(self, prepare: Callable[[], Callable[..., Any]], cap_mib: int) -> None:
        self.prepare, self.cap_mib = prepare, cap_mib
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def ask(self, *question: Any) -> Any:
        """The answer, or an `OutOfMemory`.

        Raises:
            RuntimeError: the child failed; its traceback is on standard error.
        """
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            answer = self._ended()
        if isinstance(answer, OutOfMemory):
            # What a failed allocation left half done in some library must not show in the next answer.
            self.close()
            return OutOfMemory(reason=f"{answer.reason} (capped at {self.cap_mib} MiB)")
        return answer

    def _start(self) -> None:
        # Spawned, not forked: a fork of a process with threads can hang in either.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, self.prepare, self.cap_mib, frozenset(TRUSTED)), daemon=True
        )
        self._process.start()
        other.close()

    def _ended(self) -> OutOfMemory:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        if -code in SIGNALS:
            return OutOfMemory(reason=f"the process was ended by {signal.Signals(-code).name}")
        raise RuntimeError(f"the process with capped memory ended with exit code {code}")

    def close(self) -> None:
        """Ends the child."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.terminate()
            self._process.join()
        self._connection = self._process = None

    def __enter__(self) -> "CappedChild":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(
    connection: Connection, prepare: Callable[[], Callable[..., Any]], cap_mib: int, trusted: frozenset[str]
) -> None:
    trust(trusted)
    answer = prepare()
    with memory_capped(cap_mib):
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            connection.send(attempt(partial(answer, *question)))
