"""A function under torch's profiler: its operators as rows, and its trace for Perfetto."""

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from attnbench.machine.device import synchronize
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.paths import unlinked

MAX_NAME_CHARACTERS = 90
"""The name of a template's kernel fills a page."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Line:
    """One operator or kernel, over all recorded calls."""

    name: str
    calls: int
    milliseconds: float
    """On the device, or of the host on a CPU; without the operators that it calls."""
    memory_mib: float | None = None
    """Allocated less freed, including called operators; None if not recorded."""
    mflops: float | None = None
    """The profiler's count, which knows products, sums and convolutions, or ours; None without either."""
    counted_here: bool = False
    """`mflops` is our count."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Recording:
    profiler: profile
    device_type: str
    detailed: bool

    @property
    def milliseconds(self) -> float:
        is_work = (lambda event: event.device_type != DeviceType.CPU) if self.device_type == "cuda" else is_operator
        events = [event for event in self.profiler.events() or () if is_work(event) and not event.is_user_annotation]
        return sum(own_microseconds(event, self.device_type) for event in events) / 1e3

    def lines(self, flops: Mapping[str, float] | None = None) -> list[Line]:
        """Return a line for each operator that started work, the longest first.

        `flops`: of one call, by name, of operators that the profiler does not count.
        """
        return self._lines(is_operator, flops or {})

    def kernels(self) -> list[Line]:
        """Return a line for each kernel, the longest first: a replayed graph shows nothing else."""
        return self._lines(lambda event: event.device_type != DeviceType.CPU, {})

    def _lines(self, is_shown: Callable[[Any], bool], flops: Mapping[str, float]) -> list[Line]:
        lines = []
        for event in self.profiler.key_averages():
            times = event.self_device_time_total if self.device_type == "cuda" else event.self_cpu_time_total
            if event.is_user_annotation or not is_shown(event) or times <= 0:
                continue
            memory = event.cpu_memory_usage if self.device_type == "cpu" else event.device_memory_usage
            ours = flops.get(event.key)
            counted = ours * event.count if ours is not None else event.flops if self.detailed else None
            lines.append(
                Line(
                    name=event.key,
                    calls=event.count,
                    milliseconds=times / 1e3,
                    memory_mib=memory / 2**20 if self.detailed else None,
                    mflops=counted / 1e6 if counted else None,
                    counted_here=ours is not None,
                )
            )
        return sorted(lines, key=lambda line: -line.milliseconds)

    def write_trace(self, folder: Path | None, name: str) -> None:
        """Write a compressed trace for Perfetto or chrome://tracing into traces/ of the run's folder, without the name
        of the host; without a folder, none."""
        if folder is None:
            return
        with TemporaryDirectory() as scratch:
            written = Path(scratch) / "trace.json"
            self.profiler.export_chrome_trace(str(written))
            # torch writes names of kernels that may be no UTF-8.
            trace = json.loads(written.read_text(encoding="utf-8", errors="replace"), strict=False)
        kept = {key: value for key, value in trace.items() if key not in ("host_name", "traceName")}
        path = folder / "traces" / f"{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        unlinked(path).write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode()))


def is_operator(event: Any) -> bool:
    """True for an operator of the profiler's events, false for a kernel and for a label."""
    return event.device_type == DeviceType.CPU and not event.is_user_annotation


def own_microseconds(event: Any, device_type: str) -> float:
    """Return the time of the work that an event started itself."""
    if device_type == "cpu":
        return event.self_cpu_time_total
    if event.device_type != DeviceType.CPU:
        return event.time_range.elapsed_us()
    return sum(kernel.duration for kernel in event.kernels)


def record(function: Callable[[], object], device: torch.device, *, num_calls: int, detailed: bool) -> Recording:
    """Call a function under the profiler, after a warm-up of the caller's.

    `detailed` adds shapes, memory and FLOPs, which cost the host time at every operator. Raises UserError if the
    profiler saw no work on the device.
    """
    # Above all its levels, because it would log its starts and stops. Read when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronize(device)
    with profile(
        activities=activities, record_shapes=detailed, profile_memory=detailed, with_flops=detailed
    ) as profiler:
        for _ in range(num_calls):
            function()
        synchronize(device)
    recording = Recording(profiler=profiler, device_type=device.type, detailed=detailed)
    if not recording.milliseconds:
        raise UserError(
            f"device={device}: the profiler saw no kernel; it needs CUPTI, which another profiler may hold, and the "
            "right to use it (NVIDIA's ERR_NVGPUCTRPERM tells how)"
        )
    return recording


def operator_rows(lines: Sequence[Line], settings: dict[str, Any], num_lines: int) -> Iterator[Measurement]:
    """Yield time, share, calls, memory and FLOPs of the longest lines, and time and calls of all others together."""
    whole, shown, rest = sum(line.milliseconds for line in lines) or 1.0, [*lines[:num_lines]], lines[num_lines:]
    if rest:
        calls, milliseconds = sum(line.calls for line in rest), sum(line.milliseconds for line in rest)
        shown.append(Line(name=f"{len(rest)} others", calls=calls, milliseconds=milliseconds))
    for rank, line in enumerate(shown, start=1):
        labels = settings | {"rank": rank, "operator": shortened(line.name)}
        yield Measurement(metric="operator_milliseconds", value=line.milliseconds, unit="ms", settings=labels)
        yield Measurement(metric="operator_share", value=line.milliseconds / whole, unit="", settings=labels)
        yield Measurement(metric="operator_calls", value=line.calls, unit="", settings=labels)
        if line.memory_mib is not None:
            yield Measurement(metric="operator_mib", value=line.memory_mib, unit="MiB", settings=labels)
        if line.mflops is not None:
            counted = {"counted_by": "attnbench" if line.counted_here else "profiler"}
            yield Measurement(metric="operator_mflops", value=line.mflops, unit="MFLOP", settings=labels | counted)


def shortened(name: str) -> str:
    """Cut the middle of a long name: both its ends tell kernels apart."""
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    kept = MAX_NAME_CHARACTERS // 2 - 1
    return f"{name[:kept]}…{name[-kept:]}"
