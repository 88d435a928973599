"""Items processed by child processes: by several at once, or by a new process for each.

A child that dies is an outcome. The parent logs warnings of its workers. Children end with their parent.
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
from typing import Any, Generic, Self, TypeVar

from attnbench.machine.child import Child, cause_of_death
from attnbench.machine.signals import SIGNALS, lasting_streams
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.escape import OneLine
from attnbench.settings.paths import unlinked_log

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

STOP_SECONDS = 60.0
"""Longest wait for workers to save when the parent is interrupted or has died."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome(Generic[Item]):
    item: Item
    seconds: float
    error: str | None
    """None if the function returned."""
    result: Any = None


@dataclass(slots=True, frozen=True)
class _Warning:
    line: str


@dataclass(slots=True)
class _Worker(Generic[Item]):
    child: Child
    item: Item
    started: float
    gpu: str | None

    def next(self, item: Item) -> None:
        self.item, self.started = item, time.perf_counter()
        self.child.send(item)

    def outcome(self) -> tuple[Outcome[Item] | None, bool]:
        """Return the outcome, None for a warning, and whether the worker lives."""
        try:
            answer, is_alive = self.child.receive(), True
            if isinstance(answer, _Warning):
                logger.warning(answer.line)
                return None, True
        except EOFError:
            answer, is_alive = (cause_of_death(self.child.exit_code()), None), False
        error, result = answer
        seconds = time.perf_counter() - self.started
        return Outcome(item=self.item, seconds=seconds, error=error, result=result), is_alive


class IdleWorkers:
    """Idle processes of `run_in_processes` for its next calls: importing torch and loading kernels takes seconds."""

    def __init__(self) -> None:
        self._children: dict[Any, list[Child]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def take(self, kind: Any) -> Child | None:
        children = self._children.get(kind, [])
        while children:
            child = children.pop()
            if child.process.is_alive():
                return child
            # It has died since.
            _end(child, is_alive=False)
        return None

    def keep(self, kind: Any, child: Child) -> None:
        self._children.setdefault(kind, []).append(child)

    def end(self) -> None:
        """End all, so that timed work is undisturbed."""
        for child in (child for children in self._children.values() for child in children):
            _end(child, is_alive=True)
        self._children.clear()


def run_in_processes(
    function: Callable[[Item], Any],
    items: Iterable[Item],
    *,
    num_workers: int,
    log: Path,
    num_threads: int | None = None,
    fresh: bool = False,
    idle: IdleWorkers | None = None,
    gpus: Sequence[str] = (),
) -> Generator[Outcome[Item], None, None]:
    """Call `function(item)` for every item in other processes, and yield outcomes as they come.

    A worker that dies is an outcome with an error, and is replaced. When interrupted or closed it asks the workers to
    stop and waits until they have saved. The caller must close it, see `contextlib.closing`: otherwise an exception of
    the caller leaves the workers running.

    Args:
        function, items: a function of a module and plain data; they and the result are pickled. The caller may add to a
            deque of items between two outcomes.
        log: file of the workers' output.
        num_threads: of torch in each; None: torch's default.
        fresh: a new process for each item.
        idle: workers of former calls to reuse, to which they return; None: workers end with the call.
        gpus: GPUs by their names in CUDA_VISIBLE_DEVICES, one for each worker in turn; empty: all that are visible.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    idle = None if fresh else idle
    waiting, workers = items if isinstance(items, deque) else deque(items), []
    # A worker takes over the GPU of the one that it replaces.
    free: deque[str | None] = deque(gpus[index % len(gpus)] if gpus else None for index in range(num_workers))
    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                # A worker whose start is interrupted would be lost.
                with _signals_held():
                    kind = (function, log, num_threads, free[0])
                    child = idle.take(kind) if idle is not None else None
                    if child is None:
                        child = Child(_serve, function, str(log), num_threads, gpu=free[0])
                    workers.append(_Worker(child, waiting[0], 0.0, free.popleft()))
                workers[-1].next(waiting.popleft())
            ready = wait([worker.child.connection for worker in workers])
            for worker in [worker for worker in workers if worker.child.connection in ready]:
                outcome, is_alive = worker.outcome()
                if outcome is None:
                    continue
                if is_alive and waiting and not fresh:
                    worker.next(waiting.popleft())
                else:
                    workers.remove(worker)
                    free.append(worker.gpu)
                    if is_alive and idle is not None:
                        idle.keep((function, log, num_threads, worker.gpu), worker.child)
                    else:
                        _end(worker.child, is_alive)
                yield outcome
    finally:
        _stop([worker.child for worker in workers])


def run_alone(function: Callable[[Item], Any], item: Item, *, log: Path, num_threads: int) -> None:
    """Call `function(item)` in a new process; see run_in_processes."""
    with closing(
        run_in_processes(function, [item], num_workers=1, log=log, num_threads=num_threads, fresh=True)
    ) as outcomes:
        (outcome,) = outcomes
    if outcome.error is not None:
        raise UserError(outcome.error)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block signals inside; a process that starts there unblocks them in `_serve`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(child: Child, is_alive: bool) -> None:
    """End an idle process; of a dead one, kill the processes that it had started."""
    child.connection.close()
    child.exit_code()
    if not is_alive:
        child.kill()


def _stop(children: Sequence[Child]) -> None:
    """Ask them to stop, and kill them after STOP_SECONDS."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()


def _serve(connection: Connection, function: Callable[[Any], Any], log: str, num_threads: int | None) -> None:
    """Run a worker: read items, and send warnings and then an error or a result, until the other end closes."""
    # In a separate session: Ctrl-C reaches only the parent, which asks the worker to stop once.
    os.setsid()
    descriptor = os.open(unlinked_log(Path(log)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    # Here SIGHUP means that the parent has died, also if the parent ignores it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.getLogger("attnbench").addHandler(_ToParent(connection))
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    try:
        with lasting_streams(), suppress(EOFError, ConnectionError):
            while True:
                connection.send(_answer_of(function, connection.recv()))
    finally:
        if not parent.is_alive():
            # Nothing else ends the processes that this one has started.
            os.killpg(os.getpid(), signal.SIGKILL)


def _end_with(parent: BaseProcess) -> None:
    """Wait until the parent has died, then stop this process as the parent would have."""
    parent.join()
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # To the main thread, whose wait for a lock a signal ends. A SIGHUP interrupts no save that has begun.
    signal.pthread_kill(main_thread, signal.SIGHUP)
    time.sleep(STOP_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


class _ToParent(logging.Handler):
    """Sends warnings to the parent and prints them in the worker's log."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.WARNING)
        self.connection = connection
        self.setFormatter(OneLine("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        print(line, file=sys.stderr, flush=True)
        with suppress(OSError):
            self.connection.send(_Warning(line))


def _answer_of(function: Callable[[Any], Any], item: Any) -> tuple[str | None, Any]:
    try:
        return None, function(item)
    except Interrupted as interruption:
        sys.exit(interruption.exit_code)
    except Exception as failure:
        traceback.print_exc()
        first_line = str(failure).strip().partition("\n")[0]
        return (first_line if isinstance(failure, UserError) else f"{type(failure).__name__}: {first_line}"), None
