"""Operators by themselves, forward and backward, ours beside those of libraries in one process."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    Conditions,
    TimedBench,
    check_implementations,
    error_row,
    peak_row,
    rows_or_reason,
    speedup_columns,
    with_speedups,
)
from attnbench.bench.operators.gate import GateError
from attnbench.bench.operators.library import IMPLEMENTATIONS, OPERATORS, Function, Inputs, Operator, Packed, Shape
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.machine.device import forget_compiled
from attnbench.machine.precision import multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, PeakMemory, attempt, time_repeats
from attnbench.mixers.definition import PART_FACTOR, TOLERANCES, relative_error
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts
from attnbench.settings.errors import UserError

PASSES = ("forward", "backward", "total")
PEAK = "peak_memory_mib"
UNITS = {f"{name}{MILLISECONDS}": "ms" for name in PASSES} | {MAX_ERROR: "", PEAK: "MiB"}
LINES = ("operator", *Shape._fields)
RATIOS = (
    *(("fla", "triton"), ("torch", "triton"), ("fla", "torch"), ("mamba_ssm", "triton"), ("flash_qla", "triton")),
    ("triton", "without_gates"),
)


@dataclass(kw_only=True)
class LibraryOperatorsBench(TimedBench):
    """Times each implementation of every operator at every shape.

    Args:
        operators: names, see operators/library.py.
        shapes: [sequences, positions, heads, channels a head] each, of all operators.
        grouped_shapes: [sequences, positions, heads of query and key, heads of value, channels a head], of the gated
            delta rule; [] for none.
        implementations: names; an operator has those that there are of it.

    Raises:
        UserError: a count that is none, an operator or an implementation that there is not, or heads that do not share.
    """

    operators: list
    shapes: list
    grouped_shapes: list
    implementations: list

    ratios: ClassVar[tuple[tuple[str, str], ...]] = RATIOS
    layouts: ClassVar[tuple[Layout, ...]] = (
        *(
            Layout(
                title=f"{title}, ms",
                lines=LINES,
                values=(Values(metric=f"{name}{MILLISECONDS}"), *speedup_columns(RATIOS, name)),
            )
            for name, title in (("total", "forward and backward"), ("forward", "forward"), ("backward", "backward"))
        ),
        Layout(title="peak memory of both passes, MiB", lines=LINES, values=(Values(metric=PEAK),)),
        Layout(title="largest relative error", lines=LINES, values=(Values(metric=MAX_ERROR),)),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "All implementations run in one process on the same inputs, each after calls that compile and, in the "
        "libraries, choose among configurations, which are not timed. `torch` is our form without kernels, compiled on "
        "CUDA. triton takes query, key and value side by side where a mixer's projection leaves them so. "
        "`without_gates` is fox's kernel without forget gates, another function.",
        "Peak memory is that of the tensors which both passes make, beyond their inputs.",
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = (("total_milliseconds", "sequence_length"),)
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("total_milliseconds", "ms", axes=("operator", "sequence_length"), label=("operator",)),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "shapes": [[1, 33, 2, 16]],
        "grouped_shapes": [[1, 20, 1, 2, 16]],
        "warmup": 1,
        "repeats": 3,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_implementations(self.implementations, IMPLEMENTATIONS)
        unknown = [name for name in self.operators if name not in OPERATORS]
        if unknown or not self.operators:
            raise UserError(f"bench.operators={self.operators}: must be some of {', '.join(OPERATORS)}")
        for name, names in (("shapes", Shape._fields[:2] + Shape._fields[3:]), ("grouped_shapes", Shape._fields)):
            for shape in getattr(self, name):
                if not isinstance(shape, list) or len(shape) != len(names):
                    raise UserError(f"bench.{name}: {shape} must be [{', '.join(names)}]")
                counts: dict[str, Any] = {name: shape}
                check_counts("bench", **counts)
        for shape in self.grouped_shapes:
            if shape[3] % shape[2]:
                raise UserError(f"bench.grouped_shapes: {shape}: {shape[2]} heads must divide {shape[3]}")

    def cells(self) -> Iterator[dict[str, Any]]:
        for name in dict.fromkeys(self.operators):
            shapes = [Shape(*shape[:3], *shape[2:]) for shape in self.shapes]
            if name == "gated_delta_rule":
                shapes += [Shape(*shape) for shape in self.grouped_shapes]
            for shape in dict.fromkeys(shapes):
                yield {"operator": name, **shape._asdict()}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        operator = OPERATORS[cell["operator"]]
        names = [name for name in self.implementations if name in operator.functions]
        yield from with_speedups(self._measured(operator, names, cell, conditions), RATIOS)

    def _measured(
        self, operator: Operator, names: Sequence[str], cell: dict[str, Any], conditions: Conditions
    ) -> Iterator[Measurement]:
        # The compiler makes a handful of versions of a function and no more: each shape has them all to itself.
        forget_compiled()
        shape = Shape(**{name: cell[name] for name in Shape._fields})
        with multiplying(conditions.precision):
            example = attempt(lambda: Example(operator, shape, conditions))
            for name in names:
                settings = cell | {"implementation": name}
                if isinstance(example, OutOfMemory):
                    reason = f"the reference: {example.reason}"
                    yield from without_numbers(UNITS, settings, "out_of_memory", reason)
                    continue

                def measure(name: str = name, settings: dict[str, Any] = settings, example: Example = example):
                    return self._rows(operator, name, example, settings, conditions)

                yield from rows_or_reason(UNITS, settings, measure)

    def _rows(
        self, operator: Operator, name: str, example: "Example", settings: dict[str, Any], conditions: Conditions
    ) -> Iterator[Measurement]:
        passes = Passes(operator.functions[name](example.shape, conditions), example)
        results = passes.results()
        if name not in operator.others:
            yield error_row(example.largest_error(results, conditions.precision), settings)
        del results
        peak = PeakMemory(conditions.device, of_tensors=True)
        passes.total()
        yield peak_row(PEAK, peak.mib(), settings)
        cold = ColdCaches(conditions.device)
        for part in PASSES:
            times = time_repeats(
                getattr(passes, part),
                conditions.device,
                **asdict(self.repetition),
                prepare=passes.forward if part == "backward" else None,
                before=cold,
            )
            yield time_row(times, settings, f"{part}{MILLISECONDS}")


class Example:
    """Inputs of one cell, the output's gradient, and output and gradients by the definition in float64."""

    def __init__(self, operator: Operator, shape: Shape, conditions: Conditions) -> None:
        self.shape = shape
        generator = torch.Generator(conditions.device).manual_seed(0)
        self.inputs = operator.inputs(shape, generator, conditions.dtype)
        output_shape = (*shape[:2], shape.num_heads, shape.head_width)
        gradient = torch.randn(output_shape, generator=generator, device=conditions.device)
        self.gradient = gradient.to(conditions.dtype)
        # Of heads that are independent, with T × T weights each, the first and the last, one at a time.
        last = (shape.batch_size - 1, shape.num_heads - 1)
        self.heads = list(dict.fromkeys([(0, 0), last])) if operator.by_heads else [None]
        self.expected = [self._reference(operator.definition, head) for head in self.heads]

    def _reference(self, definition: Function, head: tuple[int, int] | None) -> list[Tensor]:
        inputs = {name: _of(x, head).double().requires_grad_() for name, x in self.inputs.items()}
        output = definition(**inputs)
        gradients = torch.autograd.grad(output, list(inputs.values()), _of(self.gradient, head).double())
        return [output.detach(), *gradients]

    def largest_error(self, results: Sequence[Tensor], precision: str) -> float:
        """Return the largest relative error of output and gradients.

        Raises:
            GateError: one is more than the precision explains; gates, which sum over channels, are allowed
                PART_FACTOR times as much.
        """
        largest = 0.0
        for head, expected in zip(self.heads, self.expected, strict=True):
            for part, computed, exact in zip(("output", *self.inputs), results, expected, strict=True):
                error = relative_error(_of(computed, head), exact)
                is_wide = part in ("output", "query", "key", "value")
                allowed = TOLERANCES[precision] * (1 if is_wide else PART_FACTOR)
                # Written so that a NaN, which compares false with everything, is an error.
                if not error <= allowed:
                    words = "output" if part == "output" else f"gradient of {part}"
                    raise GateError(f"{words} is off by {error:.2g}, and {precision} explains {allowed:g}")
                largest = max(largest, error)
        return largest


def _of(x: Tensor, head: tuple[int, int] | None) -> Tensor:
    """All of a tensor (B, T, H, ...), or one head of one sequence."""
    return x if head is None else x[head[0] : head[0] + 1, :, head[1] : head[1] + 1]


class Passes:
    """The forward and the backward call of an implementation on an example."""

    def __init__(self, function: Function | Packed, example: Example) -> None:
        self.example = example
        self.is_packed = isinstance(function, Packed)
        self.function = function.function if isinstance(function, Packed) else function
        inputs = dict(example.inputs)
        if self.is_packed:
            heads = [inputs.pop(name).flatten(2) for name in ("query", "key", "value")]
            inputs = {"mixed": torch.cat(heads, dim=-1), **inputs}
        self.inputs: Inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        self._output: Tensor | None = None

    def forward(self) -> None:
        """Keep the output, and with it what the backward pass needs, in place of the last."""
        self._output = None
        self._output = self.function(**self.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        """The gradients of the last forward pass; frees what it kept."""
        output, self._output = self._output, None
        assert output is not None
        # What a function does not read has no gradient.
        return torch.autograd.grad(output, list(self.inputs.values()), self.example.gradient, allow_unused=True)

    def total(self) -> None:
        self.forward()
        self.backward()

    def results(self) -> list[Tensor]:
        """Output and gradients in the order of the example's inputs."""
        self.forward()
        assert self._output is not None
        output = self._output.detach()
        gradients = list(self.backward())
        if self.is_packed:
            parts = [self.example.inputs[name] for name in ("query", "key", "value")]
            split = gradients[0].split([x[0, 0].numel() for x in parts], dim=-1)
            gradients = [part.view(x.shape) for part, x in zip(split, parts, strict=True)] + gradients[1:]
        return [output, *gradients]
