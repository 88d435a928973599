"""How long the device takes, how much memory it needs at most, and an out-of-memory as a value."""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from attnbench.machine.device import dtype_of, forget_compiled, multiplying, peak_memory_mib, start_afresh, synchronize
from attnbench.machine.memory import reset_resident_peak, resident_peak_mib, trim
from attnbench.settings.errors import memory_reason

MINIMUM_REPEATS = 3
"""However long one takes: below this there is no median to speak of."""

BUFFER_BYTES = 2**28
"""Several times the last-level cache of any GPU there is."""

MOST_TIMES_BEFORE = 32
"""So often at most is repeated what comes before a timed call: one that itself waits for the device is late always."""

UNKNOWN_PEAK = "this system does not say how much memory a process held at most"
"""The reason of a row where `PeakMemory` has no number."""

Value = TypeVar("Value")


class Times(NamedTuple):
    """Milliseconds of one call over several repeats."""

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
    """Times single calls: between two events on a CUDA device, by the host's clock on a CPU.

    Nothing waits for the device between two calls, so that a call's launches overlap with the one before, as in
    training. Fresh inputs, where they matter, are the function's own affair.

    Args:
        warmup: calls before the first that counts, at least 1: the last of them says how long a call takes.
        repeats: calls that count, at most.
        max_seconds: where those would take longer there are fewer, though never fewer than MINIMUM_REPEATS.
        prepare: called before each of them, and not timed, though it counts among those seconds.
        before: the same, after `prepare`, and what keeps a CUDA device busy while the host puts the call into its
            queue. One that is through with it earlier would be timed as it waits for the host: such a call does not
            count, and is made again behind twice as many. It must cost the host less than the device.
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
                if before is None or times_before == MOST_TIMES_BEFORE or not start.query():
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
    """TFLOP/s of one large square matrix product on this device, in this precision: what a step is held against.

    Args:
        precision: "float32", "tf32", "bfloat16" or "float16".
    """
    size, dtype = 8192 if device.type == "cuda" else 1024, dtype_of(precision)
    # Random entries: a GPU multiplying zeros draws less power and clocks higher than it ever does in training.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    with multiplying(precision):
        times = time_repeats(lambda: left @ right, device, warmup=3, repeats=20, max_seconds=2)
    return 2 * size**3 / times.median_ms / 1e9


def copy_ceiling(device: torch.device) -> float:
    """GB/s read and written together by one large copy on this device: what moves memory is held against it."""
    num_bytes = 2**30 if device.type == "cuda" else 2**26
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = time_repeats(lambda: target.copy_(source), device, warmup=3, repeats=20, max_seconds=2)
    return 2 * num_bytes / times.median_ms / 1e6


class ColdCaches:
    """Called before a call that is timed: what the call reads is then in no cache of a CUDA device.

    It writes over a buffer larger than the last-level cache. On a CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(BUFFER_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


class PeakMemory:
    """The most memory held from now on, above what is held now.

    On CUDA that is what the allocator has reserved on the device, CUDA-graph pools too; on a CPU the resident set of
    this process, as Linux counts it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        start_afresh(device)
        if device.type == "cuda":
            self.baseline_mib = peak_memory_mib(device)
        else:
            gc.collect()
            # What the allocator keeps of former work would stand in the baseline.
            trim()
            self.baseline_mib = reset_resident_peak()

    def mib(self) -> float | None:
        """MiB so far; None where the system does not tell."""
        if self.baseline_mib is None:
            return None
        return (peak_memory_mib(self.device) or resident_peak_mib()) - self.baseline_mib


@dataclass(slots=True, kw_only=True, frozen=True)
class OutOfMemory:
    """What a function gives that did not fit."""

    reason: str
    """One line, as the allocator says it."""


def attempt(function: Callable[[], Value]) -> Value | OutOfMemory:
    """What `function` returns; where memory runs out, an `OutOfMemory`, and nothing of the attempt is held any more.

    Whatever else goes wrong is raised.
    """
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        reason = memory_reason(error)
        if reason is None:
            raise
        _clear_frames(error)
    # Outside of the except block, where the interpreter itself still holds the exception.
    forget_compiled()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return OutOfMemory(reason=reason)


def _clear_frames(error: BaseException) -> None:
    """Drops the local variables of every frame that the exception, or one that led to it, has passed."""
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        led_to_it = (one.__cause__, one.__context__, getattr(one, "inner_exception", None))
        todo += [other for other in led_to_it if isinstance(other, BaseException) and id(other) not in seen]
