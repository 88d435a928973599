"""Work in processes of its own: several at once, or each item in a fresh one; what dies there is an outcome here.

What a worker warns of is said here too. Workers end with their parent, however that ends.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnbench.machine.signals import SIGNALS
from attnbench.machine.streams import lasting_streams
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.registry import TRUSTED, trust
from attnbench.settings.text import OneLine, unlinked_log

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

STOP_SECONDS = 60.0
"""Longest wait for workers to save what they are at when the whole is interrupted, or their parent has died."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome(Generic[Item]):
    """What became of one item."""

    item: Item
    seconds: float
    error: str | None
    """None where the function returned."""


@dataclass(slots=True, frozen=True)
class _Warning:
    """A line that a worker has to say before it is done."""

    line: str


@dataclass(slots=True)
class _Worker(Generic[Item]):
    process: BaseProcess
    connection: Connection
    item: Item | None = None
    started: float = 0.0


def run_in_processes(
    function: Callable[[Item], Any],
    items: Iterable[Item],
    *,
    num_workers: int,
    log: Path,
    num_threads: int | None = None,
    fresh: bool = False,
) -> Generator[Outcome[Item], None, None]:
    """Calls `function(item)` for every item in other processes, and yields outcomes as they come.

    A worker that dies is an outcome with an error, and another takes its place. Interrupted (Ctrl-C, SIGTERM, SIGHUP)
    or closed, it asks the workers to stop, waits until they have saved, and raises on. The caller closes it, see
    `contextlib.closing`: an exception of the caller's own would otherwise leave the workers running.

    Args:
        function, items: what another process can be sent: a function of a module, plain data.
        num_workers: processes at a time.
        log: gets what they print.
        num_threads: of torch in each; None leaves torch's own number.
        fresh: a new process for each item, so that nothing of one is left when the next begins.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    waiting, workers = deque(items), []
    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                # A worker whose start is interrupted half way would be known to nobody.
                with _signals_held():
                    workers.append(_start(function, log, num_threads))
                _give(workers[-1], waiting.popleft())
            ready = wait([worker.connection for worker in workers])
            for worker in [worker for worker in workers if worker.connection in ready]:
                outcome, is_alive = _outcome(worker)
                if outcome is None:
                    continue
                if is_alive and waiting and not fresh:
                    _give(worker, waiting.popleft())
                else:
                    _end(worker, is_alive)
                    workers.remove(worker)
                yield outcome
    finally:
        # Empty unless something ended this early.
        _stop(workers)


def run_alone(function: Callable[[Item], Any], item: Item, *, log: Path, num_threads: int) -> None:
    """Calls `function(item)` in a process of its own; see run_in_processes.

    Raises:
        UserError: it failed there.
    """
    with closing(
        run_in_processes(function, [item], num_workers=1, log=log, num_threads=num_threads, fresh=True)
    ) as outcomes:
        (outcome,) = outcomes
    if outcome.error is not None:
        raise UserError(outcome.error)


@contextmanager
def _signals_held() -> Iterator[None]:
    """What interrupts waits until the block is left; a process that starts inside holds it too, see `_serve`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(function: Callable[[Item], Any], log: Path, num_threads: int | None) -> _Worker[Item]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs, str(log), num_threads, frozenset(TRUSTED)))
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker[Item], item: Item) -> None:
    worker.item, worker.started = item, time.perf_counter()
    # One that is dead already says so when it is listened to.
    with suppress(ConnectionError):
        worker.connection.send(item)


def _outcome(worker: _Worker[Item]) -> tuple[Outcome[Item] | None, bool]:
    """Outcome of its item, None where the worker only had a warning; and whether it lives."""
    assert worker.item is not None
    try:
        error, is_alive = worker.connection.recv(), True
        if isinstance(error, _Warning):
            logger.warning(error.line)
            return None, True
    except (EOFError, ConnectionError):
        worker.process.join()
        error, is_alive = cause_of_death(worker.process.exitcode), False
    return Outcome(item=worker.item, seconds=time.perf_counter() - worker.started, error=error), is_alive


def cause_of_death(exit_code: int | None) -> str:
    """How a process ended, in words; `exit_code` as multiprocessing and subprocess give it."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"its process was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"its process ended with exit code {exit_code}"


def _end(worker: _Worker[Item], is_alive: bool) -> None:
    """The process leaves when nothing more can come; what one that died had started is ended with it."""
    worker.connection.close()
    worker.process.join()
    if not is_alive:
        _kill_group(worker)


def _stop(workers: Sequence[_Worker[Item]]) -> None:
    """Asks them to stop, and ends those that have not done so in STOP_SECONDS."""
    for worker in workers:
        worker.process.terminate()
        # One that has saved, or finished just now, must not wait for another item.
        worker.connection.close()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        _kill_group(worker)
        worker.process.join()


def _kill_group(worker: _Worker[Item]) -> None:
    """A worker leads a group of its own, see `_serve`: itself and whatever it has started."""
    assert worker.process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    # One that has not come as far as to lead a group.
    worker.process.kill()


def _serve(
    function: Callable[[Any], Any], connection: Connection, log: str, num_threads: int | None, trusted: frozenset[str]
) -> None:
    """A worker's life: items in, warnings and then None or an error out, until the other end closes."""
    # In a session of its own, Ctrl-C on the terminal reaches the parent alone, which then asks it to stop, once.
    os.setsid()
    descriptor = os.open(unlinked_log(Path(log)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    # Also where the parent ignores a terminal that closes: here it means that the parent has died.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.getLogger("attnbench").addHandler(_ToParent(connection))
    trust(trusted)
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    try:
        with lasting_streams(), suppress(EOFError, ConnectionError):
            while True:
                connection.send(_error_of(function, connection.recv()))
    finally:
        if not parent.is_alive():
            # Nobody else ends what this process has started.
            os.killpg(os.getpid(), signal.SIGKILL)


def _end_with(parent: BaseProcess) -> None:
    """Waits until the parent has died; then stops this process, as the parent would have."""
    parent.join()
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # To the thread that Python handles signals in: it may be waiting for a lock, which a signal ends. One that cuts no
    # save short, where the parent had asked for a stop before it died.
    signal.pthread_kill(main_thread, signal.SIGHUP)
    time.sleep(STOP_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


class _ToParent(logging.Handler):
    """Sends warnings to where they are read; on standard error they stand as well, which is the worker's log."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.WARNING)
        self.connection = connection
        self.setFormatter(OneLine("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a line."""
        line = self.format(record)
        print(line, file=sys.stderr, flush=True)
        with suppress(OSError):
            self.connection.send(_Warning(line))


def _error_of(function: Callable[[Any], Any], item: Any) -> str | None:
    """What went wrong, in one line; None where the function returned."""
    try:
        function(item)
    except Interrupted as interruption:
        sys.exit(interruption.exit_code)
    except Exception as failure:
        traceback.print_exc()
        first_line = str(failure).strip().partition("\n")[0]
        return first_line if isinstance(failure, UserError) else f"{type(failure).__name__}: {first_line}"
    return None
