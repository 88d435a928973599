"""Rows of what a profiler found: operators in the order of their time, and parts of a step."""

from collections.abc import Iterator, Sequence
from typing import Any

from attnbench.bench.parts import IDLE, Breakdown
from attnbench.bench.recording import Line, top
from attnbench.machine.timing import UNKNOWN_PEAK
from attnbench.results.rows import Measurement

MOST_NAME_CHARACTERS = 90
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
        own = settings | {"rank": rank, "operator": shortened(line.name)}
        if line.part:
            own |= {"operator_part": line.part}
        yield Measurement(metric="operator_milliseconds", value=line.milliseconds, unit="ms", settings=own)
        yield Measurement(metric="operator_share", value=line.milliseconds / whole, unit="", settings=own)
        yield Measurement(metric="operator_calls", value=line.calls, unit="", settings=own)
        if line.memory_mib is not None:
            yield Measurement(metric="operator_mib", value=line.memory_mib, unit="MiB", settings=own)
        if line.mflops is not None:
            counted = {"counted_by": "attnbench" if line.counted_here else "profiler"}
            yield Measurement(metric="operator_mflops", value=line.mflops, unit="MFLOP", settings=own | counted)


def shortened(name: str) -> str:
    """Without the middle of a name that is too long: both its ends tell kernels apart."""
    if len(name) <= MOST_NAME_CHARACTERS:
        return name
    kept = MOST_NAME_CHARACTERS // 2 - 1
    return f"{name[:kept]}…{name[-kept:]}"


def breakdown_rows(found: Breakdown, settings: dict[str, Any]) -> Iterator[Measurement]:
    """Milliseconds and share of every part and pass of a step, idle time among the parts."""
    for part, share in found.shares().items():
        own = settings | {"part": part}
        yield Measurement(metric="part_share", value=share, unit="1", settings=own)
        if part != IDLE:
            yield Measurement(metric="part_milliseconds", value=found.parts[part], unit="ms", settings=own)
    for name, milliseconds in found.passes.items():
        yield Measurement(metric="pass_milliseconds", value=milliseconds, unit="ms", settings=settings | {"pass": name})
    whole = found.busy or 1.0
    yield Measurement(metric="unplaced_share", value=found.unplaced / whole, unit="1", settings=settings)


def peak_row(metric: str, peak_mib: float | None, settings: dict[str, Any]) -> Measurement:
    """A peak of memory; without a number where the system does not tell."""
    unknown = peak_mib is None
    return Measurement(
        metric=metric,
        value=peak_mib,
        unit="MiB",
        settings=settings,
        status="unsupported" if unknown else "ok",
        reason=UNKNOWN_PEAK if unknown else "",
    )
