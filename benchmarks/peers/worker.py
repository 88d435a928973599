"""An implementation in a process of its own, which the parent asks over a pipe: "build", "time", "losses", "memory".

Nothing here imports torch: the process first puts the packages in front that were given for it.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from attnbench.machine.child import Child, cause_of_death
from attnbench.settings.paths import unlinked_log

LIMIT_SECONDS = 1800.0
"""Longest wait for an answer: compilers of some peers take minutes."""

EXIT_SECONDS = 30.0
"""Longest wait for a process that has nothing more to do."""


class WorkerError(Exception):
    """A question without an answer; `status` is that of a result row, or cases.ABSENT."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class Worker:
    """The parent's end.

    Args:
        log: gets what the process prints.
        caches: folder of what compilers keep; an empty one for a cold start.
        paths: put first on its PYTHONPATH.
        variables: of its environment.
        limit_seconds: longest wait for an answer; then the process and its children are ended.
    """

    def __init__(
        self,
        log: Path,
        caches: Path,
        *,
        paths: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.limit_seconds = limit_seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")])),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        with _environment({**environment, **(variables or {})}):
            self.child = Child(_serve, str(log), list(paths))

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer.

        Raises:
            WorkerError: there is none, it took too long, or the process died.
        """
        self.child.send((question, arguments))
        try:
            status, answer = self.child.receive(self.limit_seconds)
        except TimeoutError:
            self.child.kill()
            words = f"no answer to {question} within {self.limit_seconds:g} s; --limit waits longer"
            raise WorkerError("failed", words) from None
        except EOFError:
            raise WorkerError("failed", cause_of_death(self.child.exit_code())) from None
        if status != "ok":
            raise WorkerError(status, answer)
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # It may be at a step that takes minutes, and Ctrl-C on the terminal does not reach it.
            self.child.kill()
        self.child.connection.close()
        self.child.process.join(EXIT_SECONDS)
        self.child.kill()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that start inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection, log: str, paths: list[str]) -> None:
    """Answer until the other end closes; nothing here is worth saving, so the process and its children end at once."""
    # It leads a group, so that what it starts ends with it.
    os.setsid()
    with unlinked_log(Path(log)).open("a", encoding="utf-8") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    Thread(target=_end_with_parent, daemon=True).start()
    # The parent's sys.path has taken the place of PYTHONPATH's.
    sys.path[:0] = paths
    from benchmarks.peers.session import Session

    session = Session()
    with suppress(EOFError, ConnectionError):
        while True:
            question, arguments = connection.recv()
            connection.send(session.answer(question, arguments))
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
