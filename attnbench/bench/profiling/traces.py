"""A profiler's trace read as pieces of work, each with the operators and regions that it was started from.

On a CUDA device a piece is a kernel, a copy or a fill; on a CPU it is what an operator does itself, without those that
it calls. A trace is the Chrome JSON that torch.profiler exports and Perfetto opens.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.settings.text import unlinked

OPERATORS = "cpu_op"
REGIONS = "user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
BACKWARD_NODE = "autograd::engine::evaluate_function"
"""Beginning of the name of the operator in which autograd's engine runs one node; the node's name follows."""

UNREAD = ("Input Strides", "Concrete Inputs", "Input type", "Ev Idx", "Record function id")
"""Arguments that make a trace twice as large and are of no use to its reader."""


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """An operator, a labelled region or a launch, on the host; microseconds."""

    name: str
    kind: str
    start: float
    duration: float
    arguments: dict[str, Any]
    parent: "Span | None" = None
    children_duration: float = 0.0

    @property
    def sequence_number(self) -> int | None:
        """Number of the autograd node that a forward operator makes, or that a backward operator is."""
        number = self.arguments.get("Sequence number", -1)
        return number if number >= 0 else None

    @property
    def is_backward(self) -> bool:
        """True for a node that autograd's engine runs."""
        return self.name.startswith(BACKWARD_NODE)

    def path(self) -> Iterator["Span"]:
        """This span and those around it, innermost first."""
        span = self
        while span is not None:
            yield span
            span = span.parent


@dataclass(slots=True, kw_only=True, frozen=True)
class Work:
    """One piece of work: a kernel, a copy or a fill, or an operator on a CPU."""

    name: str
    start: float
    microseconds: float
    path: list[Span] = field(repr=False)
    """Spans that started it, innermost first; empty where the trace does not have them."""

    @property
    def operator(self) -> str:
        """The innermost operator that started it, empty where there is none; on a CPU the piece itself."""
        return next((span.name for span in self.path if span.kind == OPERATORS), "")


@dataclass(slots=True, kw_only=True, frozen=True)
class Reading:
    """The content of a trace."""

    work: list[Work]
    """In the order in which it was begun."""
    makers: dict[int, Span]
    """The forward operator that made the autograd node of each sequence number."""


def read_trace(trace: dict[str, Any], device_type: str) -> Reading:
    """The work of one device, "cuda" or "cpu"."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = _nested(event for event in events if event.get("cat") in (OPERATORS, REGIONS, *LAUNCHES))
    work = _on_device(events, spans) if device_type == "cuda" else _on_host(spans)
    return Reading(work=sorted(work, key=lambda piece: piece.start), makers=_makers(spans))


def _nested(events: Iterator[dict[str, Any]]) -> list[Span]:
    """Every span with its parent: on a host's thread, what lies inside another was called by it."""
    threads: dict[tuple[Any, Any], list[Span]] = {}
    for event in events:
        span = Span(
            name=event["name"],
            kind=event["cat"],
            start=float(event["ts"]),
            duration=float(event.get("dur", 0)),
            arguments=event.get("args", {}),
        )
        threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        spans.sort(key=lambda span: (span.start, -span.duration))
        open_spans: list[Span] = []
        for span in spans:
            while open_spans and open_spans[-1].start + open_spans[-1].duration <= span.start:
                open_spans.pop()
            if open_spans:
                span.parent = open_spans[-1]
                open_spans[-1].children_duration += span.duration
            open_spans.append(span)
    return [span for spans in threads.values() for span in spans]


def _on_host(spans: Sequence[Span]) -> Iterator[Work]:
    for span in spans:
        if span.kind == OPERATORS:
            alone = max(0.0, span.duration - span.children_duration)
            yield Work(name=span.name, start=span.start, microseconds=alone, path=list(span.path()))


def _on_device(events: Sequence[dict[str, Any]], spans: Sequence[Span]) -> Iterator[Work]:
    launches = {span.arguments.get("correlation"): span for span in spans if span.kind in LAUNCHES}
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            launch = launches.get(event.get("args", {}).get("correlation"))
            yield Work(
                name=event["name"],
                start=float(event["ts"]),
                microseconds=float(event["dur"]),
                path=list(launch.path()) if launch is not None else [],
            )


def _makers(spans: Sequence[Span]) -> dict[int, Span]:
    """An operator shows the number that the next node will get, whether it makes that node or not. The maker is the
    last to begin: after it the number is another."""
    makers: dict[int, Span] = {}
    for span in spans:
        number = span.sequence_number
        is_forward = span.kind == OPERATORS and not span.arguments.get("Fwd thread id")
        if number is None or not is_forward or any(outer.is_backward for outer in span.path()):
            continue
        if number not in makers or makers[number].start <= span.start:
            makers[number] = span
    return makers


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """Write it for Perfetto or chrome://tracing, compressed, without the name of the host."""
    events = [
        {**event, "args": {key: value for key, value in event["args"].items() if key not in UNREAD}}
        if "args" in event
        else event
        for event in trace["traceEvents"]
    ]
    kept = {key: value for key, value in trace.items() if key not in ("host_name", "traceName", "traceEvents")}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**kept, "traceEvents": events}, separators=(",", ":"))
    # Without the time of writing, so that equal traces are equal files.
    unlinked(path).write_bytes(gzip.compress(content.encode(), mtime=0))
