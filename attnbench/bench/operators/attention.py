"""One cell of attention: every implementation held against float64, and then its passes timed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Conditions, error_row, rows_or_reason, time_rows
from attnbench.bench.operators.gate import compared_heads, largest_error, reference
from attnbench.bench.operators.roofline import attention_work
from attnbench.evals.lib.rows import without_numbers
from attnbench.evals.lib.step_cost import Repetition
from attnbench.machine.device import forget_compiled
from attnbench.machine.precision import multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, attempt, time_repeats
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, Attention
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

HELD = "memory_before_backward_mib"
NO_DEVICE_MEMORY = "memory held is counted on CUDA devices alone"

NUM_VALUES = 3


@dataclass(slots=True, kw_only=True, frozen=True)
class Problem:
    """Attention of one shape, and the passes that are timed."""

    batch_size: int
    num_heads: int
    sequence_length: int
    head_width: int
    causal: bool
    with_gradients: bool
    """Otherwise the forward pass is timed alone, and nothing is recorded for a backward pass."""
    with_values: bool = False
    """Rows of the first output values, so that agreement shows."""
    repetition: Repetition

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that are timed."""
        return ("forward", "backward", "total") if self.with_gradients else ("forward",)

    @property
    def units(self) -> dict[str, str]:
        """Metrics that have a row whatever happens, and their units."""
        units = {f"{name}{MILLISECONDS}": "ms" for name in self.passes} | {MAX_ERROR: ""}
        return units | ({HELD: "MiB"} if self.with_gradients else {})


@dataclass(slots=True, kw_only=True)
class Example:
    """Random inputs, and attention over some of their heads."""

    inputs: list[Tensor]
    """Query, key and value, and the output's gradient where there is one, (B, H, T, K)."""
    heads: list[int]
    """Indices of those that are compared, counted over all sequences."""
    expected: list[Tensor]
    """Output and gradients of these heads in float64, (heads, T, K) each."""


def example_of(problem: Problem, conditions: Conditions) -> Example:
    """Normally distributed, never zeros: a GPU that multiplies zeros draws less power and clocks higher."""
    generator = torch.Generator(conditions.device).manual_seed(problem.sequence_length * problem.head_width)
    shape = (problem.batch_size, problem.num_heads, problem.sequence_length, problem.head_width)
    inputs = [
        torch.randn(shape, generator=generator, device=conditions.device).to(conditions.dtype)
        for _ in range(4 if problem.with_gradients else 3)
    ]
    heads = compared_heads(problem.batch_size * problem.num_heads, problem.sequence_length)
    query, key, value, *gradient = (by_head(x, heads) for x in inputs)
    expected = reference(query, key, value, gradient[0] if gradient else None, problem.causal)
    return Example(inputs=inputs, heads=heads, expected=expected)


def by_head(x_BHTK: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads, (heads, T, K)."""
    return x_BHTK.flatten(0, 1)[list(heads)]


class Passes:
    """The forward and the backward call of an implementation on an example.

    Args:
        heads_first: layout that it takes, (B, H, T, K) or (B, T, H, K); its inputs lie in memory so.
    """

    def __init__(self, function: Attention, example: Example, problem: Problem, heads_first: bool) -> None:
        self.function, self.problem, self.heads_first = function, problem, heads_first
        self.query, self.key, self.value, *self.gradient = (self._exchanged(x).detach() for x in example.inputs)
        for x in (self.query, self.key, self.value):
            x.requires_grad_(problem.with_gradients)
        self._output: Tensor | None = None

    def forward(self) -> None:
        """Keep the output, and with it what the backward pass needs, in place of the last."""
        self._output = None
        with torch.set_grad_enabled(self.problem.with_gradients):
            self._output = self.function(self.query, self.key, self.value, self.problem.causal)

    def backward(self) -> tuple[Tensor, ...]:
        """The gradients of the last forward pass; frees what it kept."""
        output, self._output = self._output, None
        assert output is not None
        return torch.autograd.grad(output, (self.query, self.key, self.value), self.gradient)

    def total(self) -> None:
        self.forward()
        self.backward()

    def results(self, heads: Sequence[int]) -> list[Tensor]:
        """Output and gradients of some heads, (heads, T, K) each."""
        self.forward()
        assert self._output is not None
        output = self._output.detach()
        gradients = self.backward() if self.problem.with_gradients else ()
        return [by_head(self._exchanged(x), heads) for x in (output, *gradients)]

    def held_mib(self) -> float | None:
        """Inputs, output and what is kept for the backward pass, after calls that loaded libraries; None on a CPU."""
        device = self.query.device
        if device.type != "cuda":
            return None
        self._output = None
        before = torch.cuda.memory_allocated(device)
        self.forward()
        kept = torch.cuda.memory_allocated(device) - before
        return (kept + sum(x.nbytes for x in (self.query, self.key, self.value))) / 2**20

    def _exchanged(self, x: Tensor) -> Tensor:
        """From (B, H, T, K) to the order in memory that is wanted, or back."""
        return x if self.heads_first else x.transpose(1, 2).contiguous()


def measure_attention(
    problem: Problem, names: Sequence[str], cell: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    """All rows of a cell, implementation after implementation."""
    # The compiler makes a handful of versions of a function and no more: each shape has them all to itself.
    forget_compiled()
    with multiplying(conditions.precision):
        example = attempt(lambda: example_of(problem, conditions))
        for name in names:
            settings = cell | {"implementation": name}
            if isinstance(example, OutOfMemory):
                reason = f"the reference: {example.reason}"
                yield from without_numbers(problem.units, settings, "out_of_memory", reason)
            else:
                yield from _measure_one(problem, name, example, settings, conditions)


def _measure_one(
    problem: Problem, name: str, example: Example, settings: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    implementation = IMPLEMENTATIONS[name]
    refusal = implementation.refusal(conditions.device.type, conditions.precision, problem.head_width)
    if problem.with_gradients > implementation.gradient or problem.causal > implementation.causal:
        refusal = "has a forward pass alone, in which every position sees all"

    def measure() -> list[Measurement]:
        if refusal is not None:
            raise UserError(refusal)
        passes = Passes(implementation.make(), example, problem, implementation.heads_first)
        return _rows(problem, passes, example, settings, conditions)

    yield from rows_or_reason(problem.units, settings, measure)


def _rows(
    problem: Problem, passes: Passes, example: Example, settings: dict[str, Any], conditions: Conditions
) -> list[Measurement]:
    results = passes.results(example.heads)
    rows = [error_row(largest_error(results, example.expected, conditions.precision), settings)]
    if problem.with_values:
        values = results[0][0, 0, :NUM_VALUES].tolist()
        rows += [
            Measurement(metric="output_value", value=value, unit="", settings=settings | {"index": index})
            for index, value in enumerate(values)
        ]
    del results
    rows += _times(problem, passes, settings, conditions)
    return rows + _held(passes, settings) if problem.with_gradients else rows


def _times(problem: Problem, passes: Passes, settings: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
    """Every pass, its inputs in no cache."""
    cold = ColdCaches(conditions.device)
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
            getattr(passes, name),
            conditions.device,
            **asdict(problem.repetition),
            prepare=passes.forward if name == "backward" else None,
            before=cold,
        )
        yield from time_rows(name, times, settings, work[name].floor_ms(conditions.ceilings))


def _held(passes: Passes, settings: dict[str, Any]) -> list[Measurement]:
    value = passes.held_mib()
    if value is None:
        return list(without_numbers({HELD: "MiB"}, settings, "unsupported", NO_DEVICE_MEMORY))
    return [Measurement(metric=HELD, value=value, unit="MiB", settings=settings)]
