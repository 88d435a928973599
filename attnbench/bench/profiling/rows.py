"""Rows of a profile: operators in the order of their time, and parts of a step."""

from collections.abc import Iterator, Sequence
from typing import Any

from attnbench.bench.profiling.parts import IDLE, Breakdown
from attnbench.bench.profiling.recording import Line, top
from attnbench.results.rows import Measurement

MAX_NAME_CHARACTERS = 90
"""The name of a kernel made from a template fills a page."""


def operator_rows(lines: Sequence[Line], settings: dict[str, Any], num_lines: int) -> Iterator[Measurement]:
    """Time, share, calls, memory and FLOPs of the longest, and time and calls of all others together.

    Args:
        lines: the longest first.
    """
    whole = sum(line.milliseconds for line in lines) or 1.0
    shown, rest = top(lines, num_lines)
    if rest is not None:
        shown.append(rest)
    for rank, line in enumerate(shown, start=1):
        labels = settings | {"rank": rank, "operator": shortened(line.name)}
        if line.part:
            labels |= {"operator_part": line.part}
        yield Measurement(metric="operator_milliseconds", value=line.milliseconds, unit="ms", settings=labels)
        yield Measurement(metric="operator_share", value=line.milliseconds / whole, unit="", settings=labels)
        yield Measurement(metric="operator_calls", value=line.calls, unit="", settings=labels)
        if line.memory_mib is not None:
            yield Measurement(metric="operator_mib", value=line.memory_mib, unit="MiB", settings=labels)
        if line.mflops is not None:
            counted = {"counted_by": "attnbench" if line.counted_here else "profiler"}
            yield Measurement(metric="operator_mflops", value=line.mflops, unit="MFLOP", settings=labels | counted)


def shortened(name: str) -> str:
    """The name without its middle where it is too long: both its ends tell kernels apart."""
    if len(name) <= MAX_NAME_CHARACTERS:
        return name
    kept = MAX_NAME_CHARACTERS // 2 - 1
    return f"{name[:kept]}…{name[-kept:]}"


def breakdown_rows(breakdown: Breakdown, settings: dict[str, Any]) -> Iterator[Measurement]:
    """Milliseconds and share of every part and pass of a step, idle time among the parts."""
    for part, share in breakdown.shares().items():
        labels = settings | {"part": part}
        yield Measurement(metric="part_share", value=share, unit="1", settings=labels)
        if part != IDLE:
            yield Measurement(metric="part_milliseconds", value=breakdown.parts[part], unit="ms", settings=labels)
    for name, milliseconds in breakdown.passes.items():
        yield Measurement(metric="pass_milliseconds", value=milliseconds, unit="ms", settings=settings | {"pass": name})
    whole = breakdown.busy or 1.0
    yield Measurement(metric="unplaced_share", value=breakdown.unplaced / whole, unit="1", settings=settings)
