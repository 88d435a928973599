"""Times, peaks, and what is left of an attempt that ran out of memory."""

import math
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

from attnbench.machine.memory import available_mib, memory_capped
from attnbench.machine.timing import (
    MAX_TIMES_BEFORE,
    MINIMUM_REPEATS,
    OutOfMemory,
    PeakMemory,
    attempt,
    matrix_product_ceiling,
    time_repeats,
)

CPU = torch.device("cpu")
REMEMBERED = []


def test_repeats_are_counted_and_warm_up_is_not():
    calls = []

    def function():
        calls.append(0)
        # The first two are slow, as calls that compile are.
        time.sleep(0.05 if len(calls) <= 2 else 0.002)

    times = time_repeats(function, CPU, warmup=2, repeats=7)
    assert len(calls) == 9
    assert times.num_repeats == 7
    assert 2 <= times.low_ms <= times.median_ms <= times.high_ms < 50


def test_the_percentiles_are_the_20th_and_the_80th(monkeypatch):
    durations = iter([1.0, *range(1, 12)])
    clock = [0.0]

    def function():
        clock[0] += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times = time_repeats(function, CPU, warmup=1, repeats=11)
    assert times == (6000, 3000, 9000, 11)


@pytest.mark.parametrize(("max_seconds", "expected"), [(0.05, 6), (0.0, MINIMUM_REPEATS), (1.0, 20), (None, 20)])
def test_a_slow_call_is_repeated_less_but_never_below_three_times(max_seconds, expected, monkeypatch):
    clock = [0.0]

    def function():
        clock[0] += 2**-7

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times = time_repeats(function, CPU, warmup=1, repeats=20, max_seconds=max_seconds)
    assert times.num_repeats == expected


def test_without_a_warm_up_nothing_is_timed():
    with pytest.raises(ValueError, match="warmup=0"):
        time_repeats(lambda: None, CPU, warmup=0, repeats=3)


class SlowHost:
    """A CUDA device, whose host takes longer to put a call into the queue than the device for what comes before it."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.calls = []
        machine = self

        class Event:
            def __init__(self, enable_timing):
                self.time = math.nan

            def record(self):
                machine.device = self.time = max(machine.device, machine.host)

            def query(self):
                return self.time <= machine.host

            def elapsed_time(self, end):
                return end.time - self.time

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr("attnbench.machine.timing.synchronize", self.synchronize)

    def synchronize(self, device=None):
        self.host = max(self.host, self.device)

    def before(self):
        self.calls.append("before")
        self.device = max(self.device, self.host) + 1

    def prepare(self):
        self.calls.append("prepare")
        self.host += 3
        self.device = max(self.device, self.host) + 1

    def function(self):
        self.calls.append("function")
        self.host += 5
        self.device = max(self.device, self.host) + 2


def test_a_call_for_which_the_device_waited_is_made_again_behind_more(monkeypatch):
    machine = SlowHost(monkeypatch)
    times = time_repeats(machine.function, torch.device("cuda"), warmup=1, repeats=3, before=machine.before)
    assert times == (2, 2, 2, 3)
    tries = "".join(call[0] for call in machine.calls).split("f")
    # The warm-up, three tries of the first that counts, and the others behind as many.
    assert [len(before) for before in tries] == [1, 1, 2, 4, 4, 4, 0]


def test_what_prepares_a_call_comes_once_however_much_has_to_come_before_it(monkeypatch):
    """It may take the host longer than the device: more of it would never keep the device busy."""
    machine = SlowHost(monkeypatch)
    times = time_repeats(
        machine.function, torch.device("cuda"), warmup=1, repeats=2, prepare=machine.prepare, before=machine.before
    )
    assert times == (2, 2, 2, 2)
    tries = "".join(call[0] for call in machine.calls).split("f")[:-1]
    assert [one[0] + one[1:].strip("b") for one in tries] == ["p"] * len(tries)
    assert [one.count("b") for one in tries][:3] == [1, 1, 2]


def test_without_anything_before_it_a_call_counts_as_often_as_it_was_made(monkeypatch):
    machine = SlowHost(monkeypatch)
    times = time_repeats(machine.function, torch.device("cuda"), warmup=1, repeats=3)
    assert times.median_ms == 5
    assert len(machine.calls) == 4


def test_a_call_that_waits_for_the_device_is_not_made_again_for_ever(monkeypatch):
    machine = SlowHost(monkeypatch)

    def function():
        machine.function()
        machine.synchronize()

    times = time_repeats(function, torch.device("cuda"), warmup=1, repeats=3, before=machine.before)
    assert times.num_repeats == 3
    assert machine.calls.count("function") == 1 + math.log2(MAX_TIMES_BEFORE) + 3


def test_the_ceiling_is_what_a_product_reaches(monkeypatch):
    times = []

    def remember(function, device, **options):
        times.append(time_repeats(function, device, warmup=1, repeats=3))
        assert torch.is_tensor(function())
        return times[0]

    monkeypatch.setattr("attnbench.machine.timing.time_repeats", remember)
    ceiling = matrix_product_ceiling(CPU, "float32")
    assert math.isclose(ceiling * 1e12 * times[0].median_ms / 1e3, 2 * 1024**3)


def test_the_peak_counts_what_was_held_for_a_moment_and_not_what_was_there():
    there = torch.ones(2**24)
    memory = PeakMemory(CPU)
    if memory.mib() is None:
        pytest.skip("this system does not count a process's peak anew")
    before = memory.mib()
    torch.ones(2**24).sum()
    after = memory.mib()
    assert before is not None
    assert after is not None
    assert before < 8
    assert 60 < after < 76
    again = PeakMemory(CPU).mib()
    assert again is not None
    assert again < 8
    assert there.sum() == 2**24


def exhausted(held, kind=torch.OutOfMemoryError, words="CUDA out of memory. Tried to allocate 2 GiB\nmore"):
    large = torch.ones(1000, requires_grad=True)
    held.append(weakref.ref(large))
    result = large.exp()
    held.append(weakref.ref(result))
    raise kind(words)


def exhausted_while_handling(held):
    other = torch.ones(1000)
    held.append(weakref.ref(other))
    try:
        exhausted(held)
    except RuntimeError as error:
        raise MemoryError from error


def compiled_in_vain(held):
    """The same inside the compiler, which wraps the exception in one of its own; somebody keeps the inner one."""
    try:
        exhausted(held)
    except RuntimeError as error:
        REMEMBERED.append(error)
        wrapped = RuntimeError("backend='inductor' raised")
        wrapped.inner_exception = error  # pyright: ignore[reportAttributeAccessIssue]
        raise wrapped from None


@pytest.mark.parametrize("function", [exhausted, exhausted_while_handling, compiled_in_vain])
def test_what_a_failed_attempt_held_is_released(function):
    held = []
    outcome = attempt(lambda: function(held))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.reason
    assert "\n" not in outcome.reason
    assert len(held) >= 2
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_every_allocator_is_understood(words):
    outcome = attempt(lambda: exhausted([], RuntimeError, words))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.reason == words.splitlines()[0]


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("not enough memory"), KeyError("memory")])
def test_every_other_failure_is_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        attempt(fail)
    assert caught.value is error


def test_under_a_cap_an_allocation_fails_and_a_smaller_one_still_works():
    resource = pytest.importorskip("resource")
    if available_mib() is None:
        pytest.skip("only Linux caps private memory")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_capped(256):
        too_large = attempt(lambda: torch.empty(2**27))
        enough = attempt(lambda: torch.empty(2**22).shape)
        in_python = attempt(lambda: len(bytearray(2**29)))
    assert isinstance(too_large, OutOfMemory)
    assert "536870912 bytes" in too_large.reason
    assert enough == (2**22,)
    assert isinstance(in_python, OutOfMemory)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert attempt(lambda: torch.empty(2**27).shape) == (2**27,)
