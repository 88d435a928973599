"""One cell of attention: every implementation held against float64, and then its passes timed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Subject, error_row, timed
from attnbench.bench.gate import GateError, largest_error
from attnbench.bench.implementations import IMPLEMENTATIONS, Implementation
from attnbench.bench.passes import Example, Passes, Problem, example_of
from attnbench.bench.roofline import attention_work
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.device import forget_compiled, multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, attempt, time_repeats
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

HELD = "memory_before_backward_mib"
NO_DEVICE_MEMORY = "memory held is counted on CUDA devices alone"
NO_KERNEL = "No available kernel"
"""What SDPA says, after warnings that name the reason, where the kernel that it is held to does not take a shape."""

NUM_VALUES = 3

Value = TypeVar("Value")


def measure_attention(
    problem: Problem, names: Sequence[str], cell: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    """All rows of a cell, implementation after implementation."""
    # The compiler makes a handful of versions of a function and no more: each shape has them all to itself.
    forget_compiled()
    with multiplying(subject.precision):
        example = attempt(lambda: example_of(problem, subject))
        for name in names:
            settings = cell | {"implementation": name}
            if isinstance(example, OutOfMemory):
                yield from _without(problem, settings, "out_of_memory", f"the reference: {example.reason}")
            else:
                yield from _measure_one(problem, IMPLEMENTATIONS[name], example, settings, subject)


def _measure_one(
    problem: Problem, implementation: Implementation, example: Example, settings: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    refusal = implementation.refuse(subject.device.type, subject.precision, problem.head_width)
    if implementation.is_plain and (problem.with_gradients or problem.causal):
        refusal = "has a forward pass alone, in which every position sees all"
    try:
        function = implementation.make() if refusal is None else None
    except UserError as error:
        function, refusal = None, str(error)
    if function is None:
        yield from _without(problem, settings, "unsupported", str(refusal))
        return

    def rows() -> list[Measurement]:
        passes = Passes(function, example, problem, implementation.heads_first)
        return _rows(problem, passes, example, settings, subject)

    found = tried(rows)
    yield from _without(problem, settings, *found) if isinstance(found, Missing) else found


class Missing(NamedTuple):
    """Why there is no number."""

    status: str
    reason: str


def tried(measure: Callable[[], Value]) -> Value | Missing:
    """What it gives; or why there is nothing: what the gate said, did not fit, was refused or raised.

    As in an examination: whatever a kernel or its compiler raises is told, and the others still have their turn.
    """
    try:
        found = attempt(measure)
    except UserError as refusal:
        return Missing("unsupported", str(refusal))
    except GateError as error:
        return Missing("failed", str(error))
    except Exception as error:
        if "CUDA error" in str(error):
            # The device takes no more work from this process.
            raise
        line = (str(error).strip().splitlines() or [""])[0]
        return Missing("unsupported" if NO_KERNEL in line else "failed", f"{type(error).__name__}: {line}")
    if isinstance(found, OutOfMemory):
        return Missing("out_of_memory", found.reason)
    return found


def _rows(
    problem: Problem, passes: Passes, example: Example, settings: dict[str, Any], subject: Subject
) -> list[Measurement]:
    results = passes.results(example.heads)
    rows = [error_row(largest_error(results, example.expected, subject.precision), settings)]
    if problem.with_values:
        values = results[0][0, 0, :NUM_VALUES].tolist()
        rows += [
            Measurement(metric="output_value", value=value, unit="", settings=settings | {"index": index})
            for index, value in enumerate(values)
        ]
    del results
    rows += _times(problem, passes, settings, subject)
    return rows + _held(passes, settings) if problem.with_gradients else rows


def _times(problem: Problem, passes: Passes, settings: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
    """Every pass, its inputs in no cache."""
    cold = ColdCaches(subject.device)
    work = attention_work(
        batch_size=problem.batch_size,
        num_heads=problem.num_heads,
        length=problem.sequence_length,
        head_width=problem.head_width,
        causal=problem.causal,
        itemsize=passes.query.itemsize,
    )

    for name in problem.passes:
        times = time_repeats(
            {"forward": passes.forward, "backward": passes.backward, "total": passes.total}[name],
            subject.device,
            warmup=problem.repetition.warmup,
            repeats=problem.repetition.repeats,
            max_seconds=problem.repetition.max_seconds,
            prepare=passes.forward if name == "backward" else None,
            before=cold,
        )
        yield from timed(name, times, settings, work[name].floor_ms(subject.ceilings))


def _held(passes: Passes, settings: dict[str, Any]) -> list[Measurement]:
    value = passes.held_mib()
    if value is None:
        return list(without_numbers({HELD: "MiB"}, settings, "unsupported", NO_DEVICE_MEMORY))
    return [Measurement(metric=HELD, value=value, unit="MiB", settings=settings)]


def _without(problem: Problem, settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    units = {f"{name}{MILLISECONDS}": "ms" for name in problem.passes} | {MAX_ERROR: ""}
    yield from without_numbers(units | ({HELD: "MiB"} if problem.with_gradients else {}), settings, status, reason)
