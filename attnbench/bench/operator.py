"""One cell of attention: every implementation held against float64, and then its passes timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import Subject, timed
from attnbench.bench.gate import compared_heads, objection, reference
from attnbench.bench.implementations import IMPLEMENTATIONS, Attention, Implementation
from attnbench.bench.roofline import attention_work
from attnbench.errors import UserError
from attnbench.evals.rows import without_numbers
from attnbench.results import Measurement
from attnbench.runtime import multiplying
from attnbench.timing import ColdCaches, OutOfMemory, attempt, time_repeats

HELD = "held_before_backward_mib"
NO_DEVICE_MEMORY = "memory held is counted on CUDA devices alone"
NUM_VALUES = 3


@dataclass(slots=True, kw_only=True, frozen=True)
class Repetition:
    """How often a pass is repeated."""

    warmup: int
    repeats: int
    max_seconds: float
    """For the repeats of one pass: fewer where they would take longer, at least three."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Problem:
    """Attention of one shape."""

    batch_size: int
    num_heads: int
    length: int
    head_width: int
    causal: bool
    with_gradients: bool
    """Otherwise the forward pass is timed alone, and nothing is recorded for a backward pass."""
    with_values: bool = False
    """Rows of the first output values, so that agreement shows."""
    repetition: Repetition

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, K)."""
        return self.batch_size, self.num_heads, self.length, self.head_width

    def metrics(self) -> dict[tuple[str, str | None], str]:
        """Metric, pass and unit of what an implementation is expected to give."""
        passes = ("forward", "backward", "both") if self.with_gradients else ("forward",)
        found: dict[tuple[str, str | None], str] = {("milliseconds", name): "ms" for name in passes}
        return found | ({(HELD, None): "MiB"} if self.with_gradients else {})


@dataclass(slots=True, kw_only=True)
class Example:
    """Random inputs, never zeros, and what attention makes of some of their heads in float64."""

    inputs: list[Tensor]
    """Query, key, value and the output's gradient, (B, H, T, K)."""
    heads: list[int]
    expected: list[Tensor]


def measure_attention(
    problem: Problem, names: Sequence[str], cell: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    """All rows of a cell, implementation after implementation."""
    with multiplying(subject.precision):
        example = attempt(lambda: _example(problem, subject))
        for name in names:
            settings = cell | {"implementation": name}
            if isinstance(example, OutOfMemory):
                yield from _without(problem, settings, "out_of_memory", f"the reference: {example.reason}")
                continue
            yield from _measure_one(problem, IMPLEMENTATIONS[name], example, settings, subject)


def _example(problem: Problem, subject: Subject) -> Example:
    generator = torch.Generator(subject.device).manual_seed(problem.length * problem.head_width)
    inputs = [
        torch.randn(problem.shape, generator=generator, device=subject.device, dtype=torch.float32).to(subject.dtype)
        for _ in range(4 if problem.with_gradients else 3)
    ]
    heads = compared_heads(problem.batch_size * problem.num_heads, problem.length)
    query, key, value, *gradient = (_compared(x, heads) for x in inputs)
    expected = reference(query, key, value, gradient[0] if gradient else None, problem.causal)
    return Example(inputs=inputs, heads=heads, expected=expected)


def _compared(x_BHTK: Tensor, heads: Sequence[int]) -> Tensor:
    return x_BHTK.flatten(0, 1)[list(heads)]


def _measure_one(
    problem: Problem, implementation: Implementation, example: Example, settings: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    refusal = implementation.refuse(subject.device.type, subject.precision, problem.head_width)
    try:
        function = implementation.load() if refusal is None else None
    except UserError as error:
        function, refusal = None, str(error)
    if function is None:
        yield from _without(problem, settings, "unsupported", str(refusal))
        return
    # A kernel that raises is told, and the others still have their turn.
    try:
        found = attempt(lambda: _passes(problem, implementation, function, example, settings, subject))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if "CUDA error" in str(error):
            # The device takes no more work from this process.
            raise
        found = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if isinstance(found, OutOfMemory):
        yield from _without(problem, settings, "out_of_memory", found.reason)
    elif isinstance(found, str):
        yield from _without(problem, settings, "failed", found)
    else:
        yield from found


def _passes(
    problem: Problem,
    implementation: Implementation,
    function: Attention,
    example: Example,
    settings: dict[str, Any],
    subject: Subject,
) -> list[Measurement] | str:
    """The rows; or what the gate has against this implementation."""
    inputs = [_laid_out(x, implementation.heads_first) for x in example.inputs]
    query, key, value, *gradient = (x.detach() for x in inputs)
    for x in (query, key, value):
        x.requires_grad_(problem.with_gradients)
    made: list[Tensor] = []

    def forward() -> None:
        made.clear()
        with torch.set_grad_enabled(problem.with_gradients):
            made.append(function(query, key, value, problem.causal))

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(made.pop(), (query, key, value), gradient)

    device = subject.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    forward()
    held = None if before is None else torch.cuda.memory_allocated(device) - before
    output = made[0].detach()
    gradients = backward() if problem.with_gradients else ()
    heads_first = implementation.heads_first
    actual = [_compared(_laid_out(x, heads_first), example.heads) for x in (output, *gradients)]
    reason = objection(actual, example.expected, subject.precision)
    if reason is not None:
        return reason
    rows = _first_values(actual[0], settings) if problem.with_values else []
    del output, gradients, actual
    cold = ColdCaches(device)
    work = attention_work(
        batch_size=problem.batch_size,
        num_heads=problem.num_heads,
        length=problem.length,
        head_width=problem.head_width,
        causal=problem.causal,
        itemsize=query.itemsize,
    )

    def both() -> None:
        forward()
        backward()

    cold.fit(both if problem.with_gradients else forward)

    def forward_and_cold() -> None:
        forward()
        cold()

    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {"forward": (forward, cold)}
    if problem.with_gradients:
        calls |= {"backward": (backward, forward_and_cold), "both": (both, cold)}
    for name, (call, prepare) in calls.items():
        times = time_repeats(
            call,
            device,
            warmup=problem.repetition.warmup,
            repeats=problem.repetition.repeats,
            max_seconds=problem.repetition.max_seconds,
            before=prepare,
        )
        rows += timed(times, settings | {"pass": name}, work[name].floor_ms(subject.ceilings))
    return rows + _held(held, example.inputs[:3], settings) if problem.with_gradients else rows


def _laid_out(x: Tensor, heads_first: bool) -> Tensor:
    """(B, H, T, K) as an implementation wants it in memory, or back: the two are one exchange."""
    return x if heads_first else x.transpose(1, 2).contiguous()


def _held(held: int | None, inputs: Sequence[Tensor], settings: dict[str, Any]) -> list[Measurement]:
    """Inputs, output and what is kept for the backward pass."""
    own = sum(x.nbytes for x in inputs)
    return [
        Measurement(
            metric=HELD,
            value=None if held is None else (held + own) / 2**20,
            unit="MiB",
            settings=settings,
            status="unsupported" if held is None else "ok",
            reason=NO_DEVICE_MEMORY if held is None else "",
        )
    ]


def _first_values(output_BTK: Tensor, settings: dict[str, Any]) -> list[Measurement]:
    """Of the first position of the first head."""
    values = output_BTK[0, 0, :NUM_VALUES].tolist()
    return [
        Measurement(metric="output_value", value=value, unit="", settings=settings | {"index": index})
        for index, value in enumerate(values)
    ]


def _without(problem: Problem, settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    for (metric, name), unit in problem.metrics().items():
        own = settings if name is None else settings | {"pass": name}
        yield from without_numbers({metric: unit}, own, status, reason)
