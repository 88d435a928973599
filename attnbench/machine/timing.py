"""Time on the device, peak memory, and running out of memory as a value, also in a capped child process."""

import gc
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from attnbench.machine.child import Child
from attnbench.machine.device import forget_compiled, peak_memory_mib, start_afresh, synchronize
from attnbench.machine.memory import memory_capped, reset_resident_peak, resident_peak_mib, trim
from attnbench.machine.precision import dtype_of, multiplying
from attnbench.settings.errors import memory_reason

MINIMUM_REPEATS = 3
"""Fewest repeats for a median, however long one takes."""

BUFFER_BYTES = 2**28
"""Buffer that clears caches, several times any GPU's last-level cache."""

MAX_TIMES_BEFORE = 256
"""Most repeats of the work before a timed call; a call that itself waits for the device is always late."""

OUT_OF_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end a process out of memory, from the system or in a library that does not check malloc."""

UNKNOWN_PEAK = "this system does not say how much memory a process held at most"
"""Reason in a row without a peak."""

Value = TypeVar("Value")


class Times(NamedTuple):
    median_ms: float
    low_ms: float
    """The 20th percentile."""
    high_ms: float
    """The 80th percentile."""
    num_repeats: int


def time_repeats(
    function: Callable[[], object],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    max_seconds: float | None = None,
    prepare: Callable[[], object] | None = None,
    before: Callable[[], object] | None = None,
) -> Times:
    """Time single calls: between two events on a CUDA device, by the host's clock on a CPU.

    Nothing waits for the device between two calls: launches overlap with the call before, as in training.

    Args:
        warmup: calls before the first timed one, at least 1; the last tells how long a call takes.
        repeats: most timed calls.
        max_seconds: limit of all timed calls, though there are at least MINIMUM_REPEATS.
        prepare: called before each, not timed.
        before: called after `prepare`, not timed: work that keeps a CUDA device busy while the host queues the call.
            If the device finishes it too early, the call is repeated behind twice as much. It must cost the host less
            than the device.
    """
    if warmup < 1:
        raise ValueError(f"warmup={warmup}: at least 1")
    seconds = 0.0
    for _ in range(warmup):
        synchronize(device)
        started = time.perf_counter()
        _all(prepare, before)
        function()
        synchronize(device)
        seconds = time.perf_counter() - started
    if max_seconds is not None and repeats * seconds > max_seconds:
        repeats = min(repeats, max(MINIMUM_REPEATS, int(max_seconds / seconds)))
    durations = (_by_events if device.type == "cuda" else _by_clock)(function, device, repeats, prepare, before)
    low, median, high = np.percentile(durations, [20, 50, 80]).tolist()
    return Times(median, low, high, repeats)


def _all(*functions: Callable[[], object] | None) -> None:
    for function in functions:
        if function is not None:
            function()


def _by_events(
    function: Callable[[], object],
    device: torch.device,
    repeats: int,
    prepare: Callable[[], object] | None,
    before: Callable[[], object] | None,
) -> list[float]:
    with torch.cuda.device(device):
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        times_before = 1
        for start, end in pairs:
            while True:
                _all(prepare, *[before] * times_before)
                start.record()
                function()
                end.record()
                if before is None or times_before == MAX_TIMES_BEFORE or not start.query():
                    break
                times_before *= 2
        torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _by_clock(
    function: Callable[[], object],
    device: torch.device,
    repeats: int,
    prepare: Callable[[], object] | None,
    before: Callable[[], object] | None,
) -> list[float]:
    durations = []
    for _ in range(repeats):
        _all(prepare, before)
        started = time.perf_counter()
        function()
        durations.append((time.perf_counter() - started) * 1e3)
    return durations


def matrix_product_ceiling(device: torch.device, precision: str) -> float:
    """Return the TFLOP/s of one large square matrix product: the ceiling of a step in this precision."""
    size, dtype = 8192 if device.type == "cuda" else 1024, dtype_of(precision)
    # Random entries: multiplying zeros, a GPU draws less power and clocks higher than in training.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    with multiplying(precision):
        times = time_repeats(lambda: left @ right, device, warmup=3, repeats=20, max_seconds=2)
    return 2 * size**3 / times.median_ms / 1e9


def copy_ceiling(device: torch.device) -> float:
    """Return the GB/s read and written by one large copy: the ceiling of memory-bound work."""
    num_bytes = 2**30 if device.type == "cuda" else 2**26
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = time_repeats(lambda: target.copy_(source), device, warmup=3, repeats=20, max_seconds=2)
    return 2 * num_bytes / times.median_ms / 1e6


class ColdCaches:
    """Clear a CUDA device's caches by writing a larger buffer; on a CPU do nothing."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(BUFFER_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


class PeakMemory:
    """Peak memory from here on, above the present: on CUDA reserved memory with graph pools, on a CPU the resident set.

    Args:
        of_tensors: on CUDA count tensors instead: beside large tensors a call may fit into segments reserved before.
    """

    def __init__(self, device: torch.device, *, of_tensors: bool = False) -> None:
        self.device, self.of_tensors = device, of_tensors
        start_afresh(device)
        if device.type == "cuda":
            self.baseline_mib = self._device_mib()
        else:
            gc.collect()
            # Otherwise memory that the allocator keeps would count in the baseline.
            trim()
            self.baseline_mib = reset_resident_peak()

    def mib(self) -> float | None:
        if self.baseline_mib is None:
            return None
        return (self._device_mib() or resident_peak_mib()) - self.baseline_mib

    def _device_mib(self) -> float | None:
        if self.of_tensors and self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return peak_memory_mib(self.device)


@dataclass(slots=True, kw_only=True, frozen=True)
class OutOfMemory:
    """Result of a function that did not fit, with the allocator's message."""

    reason: str


def attempt(function: Callable[[], Value]) -> Value | OutOfMemory:
    """Call `function`; if memory runs out, free everything of the attempt and return an `OutOfMemory`."""
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        reason = memory_reason(error)
        if reason is None:
            raise
        _clear_frames(error)
    # Outside of the except block, which holds the exception.
    forget_compiled()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return OutOfMemory(reason=reason)


def _clear_frames(error: BaseException) -> None:
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        led_to_it = (one.__cause__, one.__context__, getattr(one, "inner_exception", None))
        todo += [other for other in led_to_it if isinstance(other, BaseException) and id(other) not in seen]


class CappedChild:
    """Child process with capped memory that answers questions; one that does not fit ends only the child.

    Args:
        prepare: called in the child before its memory is capped; returns the function that answers.
        cap_mib: memory beyond that of `prepare`.
    """

    def __init__(self, prepare: Callable[[], Callable[..., Any]], cap_mib: int) -> None:
        self.prepare, self.cap_mib = prepare, cap_mib
        self._child: Child | None = None

    def ask(self, *question: Any) -> Any:
        """Return the answer, or an `OutOfMemory`.

        Raises:
            RuntimeError: the child failed; standard error has its traceback.
        """
        self._child = self._child or Child(_answer_capped, self.prepare, self.cap_mib, daemon=True)
        self._child.send(question)
        try:
            answer = self._child.receive()
        except EOFError:
            code = self._child.exit_code()
            if -code not in OUT_OF_MEMORY_SIGNALS:
                raise RuntimeError(f"the process with capped memory ended with exit code {code}") from None
            answer = OutOfMemory(reason=f"the process was ended by {signal.Signals(-code).name}")
        if isinstance(answer, OutOfMemory):
            # A failed allocation in some library must not affect the next answer.
            self.close()
            return OutOfMemory(reason=f"{answer.reason} (capped at {self.cap_mib} MiB)")
        return answer

    def close(self) -> None:
        if self._child is not None:
            self._child.ask_to_stop()
            self._child.exit_code()
        self._child = None

    def __enter__(self) -> "CappedChild":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _answer_capped(connection: Connection, prepare: Callable[[], Callable[..., Any]], cap_mib: int) -> None:
    answer = prepare()
    with memory_capped(cap_mib), suppress(EOFError):
        while True:
            connection.send(attempt(partial(answer, *connection.recv())))
