"""One cell of attention: every implementation compared with float64, then timed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Conditions, by_implementation, error_row, time_rows
from attnbench.bench.operators.gate import affordable_heads, compared_heads, largest_error, reference
from attnbench.bench.operators.passes import Passes
from attnbench.bench.operators.roofline import attention_work
from attnbench.evals.lib.rows import without_numbers
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.device import forget_compiled
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, Attention
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

HELD = "memory_before_backward_mib"
NO_DEVICE_MEMORY = "memory held is counted on CUDA devices alone"

NUM_VALUES = 3


@dataclass(slots=True, kw_only=True, frozen=True)
class Problem:
    batch_size: int
    num_heads: int
    sequence_length: int
    head_width: int
    causal: bool
    with_gradients: bool
    """Otherwise the forward pass is timed alone, and records nothing for a backward pass."""
    with_values: bool = False
    """Rows of the first output values, so that agreement shows."""
    repetition: Timed

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "backward", "total") if self.with_gradients else ("forward",)

    @property
    def units(self) -> dict[str, str]:
        """Metrics that always have a row."""
        units = {f"{name}{MILLISECONDS}": "ms" for name in self.passes} | {MAX_ERROR: ""}
        return units | ({HELD: "MiB"} if self.with_gradients else {})


@dataclass(slots=True, kw_only=True)
class Example:
    inputs: list[Tensor]
    """Query, key and value, and the output's gradient if any, (B, H, T, K)."""
    heads: list[int]
    """Indices of the compared heads, counted over all sequences."""
    expected: list[Tensor]
    """Output and gradients of these heads in float64, (heads, T, K) each."""


def example_of(problem: Problem, conditions: Conditions) -> Example:
    """Draw normal inputs, never zeros: multiplying zeros takes less power, and a GPU clocks higher."""
    generator = torch.Generator(conditions.device).manual_seed(problem.sequence_length * problem.head_width)
    shape = (problem.batch_size, problem.num_heads, problem.sequence_length, problem.head_width)
    inputs = [
        torch.randn(shape, generator=generator, device=conditions.device).to(conditions.dtype)
        for _ in range(4 if problem.with_gradients else 3)
    ]
    heads = compared_heads(problem.batch_size * problem.num_heads, affordable_heads(problem.sequence_length))
    query, key, value, *gradient = (by_head(x, heads) for x in inputs)
    expected = reference(query, key, value, gradient[0] if gradient else None, problem.causal)
    return Example(inputs=inputs, heads=heads, expected=expected)


def by_head(x_BHTK: Tensor, heads: Sequence[int]) -> Tensor:
    return x_BHTK.flatten(0, 1)[list(heads)]


class AttentionPasses(Passes):
    """The calls of an implementation on an example, with inputs in its layout, (B, H, T, K) or (B, T, H, K)."""

    def __init__(self, function: Attention, example: Example, problem: Problem, heads_first: bool) -> None:
        self.heads_first = heads_first
        query, key, value, *gradient = (self._exchanged(x).detach() for x in example.inputs)
        for x in (query, key, value):
            x.requires_grad_(problem.with_gradients)
        call = partial(function, query, key, value, problem.causal)
        super().__init__(call, (query, key, value), gradient[0] if gradient else None)

    def results(self, heads: Sequence[int]) -> list[Tensor]:
        """Return output and gradients of some heads, (heads, T, K) each."""
        return [by_head(self._exchanged(x), heads) for x in self.outcome()]

    def held_mib(self) -> float:
        """Return the memory of inputs, output and tensors kept for the backward pass, on CUDA."""
        device = self.inputs[0].device
        self.output = None
        before = torch.cuda.memory_allocated(device)
        self.forward()
        kept = torch.cuda.memory_allocated(device) - before
        return (kept + sum(x.nbytes for x in self.inputs)) / 2**20

    def _exchanged(self, x: Tensor) -> Tensor:
        """Convert (B, H, T, K) to the implementation's order in memory, or back."""
        return x if self.heads_first else x.transpose(1, 2).contiguous()


def measure_attention(
    problem: Problem, names: Sequence[str], cell: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    # The compiler keeps few versions of a function: each shape starts without any.
    forget_compiled()
    rows = partial(_rows, problem, conditions)
    yield from by_implementation(names, problem.units, cell, conditions, lambda: example_of(problem, conditions), rows)


def _rows(
    problem: Problem, conditions: Conditions, name: str, example: Example, settings: dict[str, Any]
) -> Iterator[Measurement]:
    implementation = IMPLEMENTATIONS[name]
    refusal = implementation.refusal(conditions.device.type, conditions.precision, problem.head_width)
    if problem.with_gradients > implementation.gradient or problem.causal > implementation.causal:
        refusal = "has a forward pass alone, in which every position sees all"
    if refusal is not None:
        raise UserError(refusal)
    passes = AttentionPasses(implementation.make(), example, problem, implementation.heads_first)
    results = passes.results(example.heads)
    yield error_row(largest_error(results, example.expected, conditions.precision), settings)
    for index, value in enumerate(results[0][0, 0, :NUM_VALUES].tolist() if problem.with_values else ()):
        yield Measurement(metric="output_value", value=value, unit="", settings=settings | {"index": index})
    del results
    work = attention_work(problem, passes.inputs[0].itemsize)
    for part, times in passes.times(problem.passes, problem.repetition):
        yield from time_rows(part, times, settings, work[part].floor_ms(conditions.ceilings))
    if problem.with_gradients and conditions.device.type == "cuda":
        yield Measurement(metric=HELD, value=passes.held_mib(), unit="MiB", settings=settings)
    elif problem.with_gradients:
        yield from without_numbers({HELD: "MiB"}, settings, "unsupported", NO_DEVICE_MEMORY)
