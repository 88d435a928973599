"""A function run under torch's profiler: its trace, and its operators as a table."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from attnbench.bench.profiling.traces import Reading, Work, read_trace
from attnbench.machine.device import synchronize
from attnbench.settings.errors import UserError


@dataclass(slots=True, kw_only=True, frozen=True)
class Line:
    """One operator or kernel of a table, over all calls that were recorded."""

    name: str
    calls: int
    milliseconds: float
    """On the device, or of the host where that is the device; without the operators that it calls."""
    memory_mib: float | None = None
    """Allocated less freed, the operators that it calls included; None where that was not recorded."""
    mflops: float | None = None
    """The profiler's count, which knows products, sums and convolutions, or ours; None where there is neither."""
    counted_here: bool = False
    """`mflops` is our count."""
    part: str = ""
    """Part of the step, where that is known."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Recording:
    """Some calls as the profiler saw them."""

    trace: dict[str, Any]
    reading: Reading
    """The device's work in the trace."""
    lines: list[Line]
    """Every operator that started work, the longest first; their times add up to those of all work."""

    @property
    def milliseconds(self) -> float:
        """All work of all calls together."""
        return sum(work.microseconds for work in self.reading.work) / 1e3


def record(
    function: Callable[[], object],
    device: torch.device,
    *,
    num_calls: int,
    detailed: bool,
    flops: Mapping[str, float] | None = None,
) -> Recording:
    """Call it so many times under the profiler. Warm it up before.

    Args:
        detailed: also shapes, memory and FLOPs, which cost the host time at every operator.
        flops: of one call of an operator that the profiler counts none of, by its name.

    Raises:
        UserError: the profiler saw no work on the device.
    """
    # Above all its levels: it would write of its own starts and stops to standard error. Read when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronize(device)
    with profile(
        activities=activities, record_shapes=detailed, profile_memory=detailed, with_flops=detailed
    ) as profiler:
        for _ in range(num_calls):
            function()
        synchronize(device)
    trace = _trace_of(profiler)
    reading = read_trace(trace, device.type)
    if not reading.work:
        raise UserError(
            f"device={device}: the profiler saw no kernel; it needs CUPTI, which another profiler may hold, and the "
            "right to use it (NVIDIA's ERR_NVGPUCTRPERM tells how)"
        )
    lines = _lines(reading.work, profiler, device, detailed, flops or {})
    return Recording(trace=trace, reading=reading, lines=lines)


def top(lines: Sequence[Line], number: int) -> tuple[list[Line], Line | None]:
    """The first of them, and all others as one; None where there are no others."""
    rest = lines[number:]
    if not rest:
        return list(lines), None
    name = f"{len(rest)} others"
    return list(lines[:number]), Line(
        name=name, calls=sum(line.calls for line in rest), milliseconds=sum(line.milliseconds for line in rest)
    )


def _lines(
    work: Sequence[Work], profiler: profile, device: torch.device, detailed: bool, flops: Mapping[str, float]
) -> list[Line]:
    """A line for each operator, timed by the work that it started itself, and for work that no operator started."""
    groups: dict[str, list[Work]] = {}
    for piece in work:
        groups.setdefault(piece.operator or piece.name, []).append(piece)
    # Kernels stand in that table too, under their own names.
    known = {event.key: event for event in profiler.key_averages() if event.device_type == DeviceType.CPU}
    lines = []
    for name, pieces in groups.items():
        event, ours = known.get(name), flops.get(name)
        calls = event.count if event is not None else len(pieces)
        memory, counted = None, ours * calls if ours is not None else None
        if detailed and event is not None:
            # With what it calls: ours allocate by operators that have no work of their own, and so no line.
            memory = (event.cpu_memory_usage if device.type == "cpu" else event.device_memory_usage) / 2**20
            counted = counted or event.flops
        lines.append(
            Line(
                name=name,
                calls=calls,
                milliseconds=sum(piece.microseconds for piece in pieces) / 1e3,
                memory_mib=memory,
                mflops=counted / 1e6 if counted else None,
                counted_here=ours is not None,
            )
        )
    return sorted((line for line in lines if line.milliseconds > 0), key=lambda line: -line.milliseconds)


def _trace_of(profiler: profile) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        # As torch writes it: names of kernels may hold what is no UTF-8.
        return json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
