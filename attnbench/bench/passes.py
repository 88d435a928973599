"""Attention of one shape: random inputs, what it makes of them in float64, and an implementation's calls on them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.bench.base import Subject
from attnbench.bench.gate import compared_heads, reference
from attnbench.bench.implementations import Attention


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
        """What is timed."""
        return ("forward", "backward", "total") if self.with_gradients else ("forward",)


@dataclass(slots=True, kw_only=True)
class Example:
    """Inputs, and what attention makes of some of their heads."""

    inputs: list[Tensor]
    """Query, key and value, and the output's gradient where there is one, (B, H, T, K)."""
    heads: list[int]
    """Those that are compared, counted over all sequences."""
    expected: list[Tensor]
    """Output and gradients of these heads in float64, (heads, T, K) each."""


def example_of(problem: Problem, subject: Subject) -> Example:
    """Normally distributed, never zeros: a GPU that multiplies zeros draws less power and clocks higher."""
    generator = torch.Generator(subject.device).manual_seed(problem.sequence_length * problem.head_width)
    shape = (problem.batch_size, problem.num_heads, problem.sequence_length, problem.head_width)
    inputs = [
        torch.randn(shape, generator=generator, device=subject.device).to(subject.dtype)
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
        heads_first: whether it takes (B, H, T, K) or (B, T, H, K); its inputs lie in memory as it wants them.
    """

    def __init__(self, function: Attention, example: Example, problem: Problem, heads_first: bool) -> None:
        self.function, self.problem, self.heads_first = function, problem, heads_first
        self.query, self.key, self.value, *self.gradient = (self._exchanged(x).detach() for x in example.inputs)
        for x in (self.query, self.key, self.value):
            x.requires_grad_(problem.with_gradients)
        self._output: Tensor | None = None

    def forward(self) -> None:
        """Keeps its output, and with it what the backward pass needs, in place of the last."""
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
