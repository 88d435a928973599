"""Work in processes of its own: several at once, or each item in a fresh one; what dies there is an outcome here."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnbench.errors import Interrupted, UserError

Item = TypeVar("Item")

STOP_SECONDS = 60.0
"""Longest wait for workers to save what they are at when the whole is interrupted."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome(Generic[Item]):
    """What became of one item."""

    item: Item
    seconds: float
    error: str | None
    """None where the function returned."""


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
) -> Iterator[Outcome[Item]]:
    """Calls `function(item)` for every item in other processes, and yields outcomes as they come.

    A worker that dies is an outcome with an error, and another takes its place. Interrupted (Ctrl-C, SIGTERM), it asks
    the workers to stop, waits until they have saved, and raises on.

    Args:
        function, items: what another process can be sent: a function of a module, plain data.
        num_workers: processes at a time.
        log: gets what they print.
        num_threads: of torch in each; None leaves torch's own number.
        fresh: a new process for each item, so that nothing of one is left when the next begins.
    """
    context = multiprocessing.get_context("spawn")
    log.parent.mkdir(parents=True, exist_ok=True)
    waiting, workers = deque(items), []

    def start() -> _Worker[Item]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(function, theirs, str(log), num_threads))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                workers.append(start())
                _give(workers[-1], waiting.popleft())
            ready = wait([worker.connection for worker in workers])
            for worker in [worker for worker in workers if worker.connection in ready]:
                outcome, is_alive = _outcome(worker)
                if is_alive and waiting and not fresh:
                    _give(worker, waiting.popleft())
                else:
                    _end(worker)
                    workers.remove(worker)
                yield outcome
    finally:
        # Empty unless something ended this early.
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(STOP_SECONDS)


def run_alone(function: Callable[[Item], Any], item: Item, *, log: Path) -> None:
    """Calls `function(item)` in a process of its own.

    Raises:
        UserError: it failed there.
    """
    (outcome,) = run_in_processes(function, [item], num_workers=1, log=log, fresh=True)
    if outcome.error is not None:
        raise UserError(outcome.error)


def _give(worker: _Worker[Item], item: Item) -> None:
    worker.item, worker.started = item, time.perf_counter()
    worker.connection.send(item)


def _outcome(worker: _Worker[Item]) -> tuple[Outcome[Item], bool]:
    """What the worker says, or that it says nothing any more; and whether it lives."""
    assert worker.item is not None
    try:
        error, is_alive = worker.connection.recv(), True
    except (EOFError, ConnectionResetError):
        worker.process.join()
        error, is_alive = _cause_of_death(worker.process.exitcode), False
    return Outcome(item=worker.item, seconds=time.perf_counter() - worker.started, error=error), is_alive


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"its process was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"its process ended with exit code {exit_code}"


def _end(worker: _Worker[Item]) -> None:
    worker.connection.close()
    worker.process.join()


def _serve(function: Callable[[Any], Any], connection: Connection, log: str, num_threads: int | None) -> None:
    """A worker's life: items in, None or an error out, until the other end closes."""
    # In a session of its own, Ctrl-C on the terminal reaches the parent alone, which then asks it to stop, once.
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            function(item)
            error = None
        except Interrupted as interruption:
            sys.exit(interruption.exit_code)
        except Exception as failure:
            traceback.print_exc()
            first_line = str(failure).strip().partition("\n")[0]
            error = first_line if isinstance(failure, UserError) else f"{type(failure).__name__}: {first_line}"
        connection.send(error)
