from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    Bench,
    Conditions,
    by_implementation,
    error_row,
    speedup_columns,
)
from attnbench.bench.operators.gate import GateError
from attnbench.bench.operators.library import IMPLEMENTATIONS, OPERATORS, Function, Inputs, Operator, Packed, Shape
from attnbench.bench.operators.passes import Passes
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import peak_row, time_row
from attnbench.machine.device import forget_compiled
from attnbench.machine.timing import PeakMemory
from attnbench.mixers.definition import PART_FACTOR, TOLERANCES, relative_error
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

PASSES = ("forward", "backward", "total")
PEAK = "peak_memory_mib"
UNITS = {f"{name}{MILLISECONDS}": "ms" for name in PASSES} | {MAX_ERROR: "", PEAK: "MiB"}
LINES = ("operator", *Shape._fields)
RATIOS = (
    *(("fla", "triton"), ("torch", "triton"), ("fla", "torch"), ("mamba_ssm", "triton"), ("flash_qla", "triton")),
    ("triton", "without_gates"),
)


class LibraryOperatorsBench(Bench):
    """The mixers' operators by themselves, forward and backward, ours beside those of libraries in one process."""

    operators: list[str] = option(
        [*OPERATORS], "one operator each, without a mixer around it", choices=[*OPERATORS], distinct=True
    )
    shapes: list = option([[128, 256, 4, 64], [2, 16384, 12, 64]], "sequences, positions, heads, channels a head")
    grouped_shapes: list = option(
        [[1, 8192, 16, 32, 128]], "of the gated delta rule: heads of query and key, then of value; []: none"
    )
    implementations: list[str] = option(
        [*IMPLEMENTATIONS],
        "what is not installed or not registered for a mixer is a row that says so",
        choices=IMPLEMENTATIONS,
        distinct=True,
    )
    warmup, repeats, max_seconds = 3, 50, 1

    ratios = RATIOS
    layouts = (
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
    notes = (
        "All implementations run in one process on the same inputs, each after calls that compile and, in the "
        "libraries, choose among configurations, which are not timed. `torch` is our form without kernels, compiled on "
        "CUDA. triton takes query, key and value side by side where a mixer's projection leaves them so. "
        "`without_gates` is fox's kernel without forget gates, another function.",
        "Peak memory is that of the tensors which both passes make, beyond their inputs.",
    )
    plots = (("total_milliseconds", "sequence_length"),)
    headline = (Headline("total_milliseconds", "ms", axes=("operator", "sequence_length"), label=("operator",)),)
    smoke = {"shapes": [[1, 33, 2, 16]], "grouped_shapes": [[1, 20, 1, 2, 16]], "warmup": 1, "repeats": 3}

    def __post_init__(self) -> None:
        for name, names in (("shapes", Shape._fields[:2] + Shape._fields[3:]), ("grouped_shapes", Shape._fields)):
            for shape in getattr(self, name):
                if not isinstance(shape, list) or len(shape) != len(names):
                    raise UserError(f"bench.{name}: {shape} must be [{', '.join(names)}]")
                check_value(f"bench.{name}", shape, kind=list[int], minimum=1)
        for shape in self.grouped_shapes:
            if shape[3] % shape[2]:
                raise UserError(f"bench.grouped_shapes: {shape}: {shape[2]} heads must divide {shape[3]}")

    def cells(self) -> Iterator[dict[str, Any]]:
        for name in self.operators:
            shapes = [Shape(*shape[:3], *shape[2:]) for shape in self.shapes]
            if name == "gated_delta_rule":
                shapes += [Shape(*shape) for shape in self.grouped_shapes]
            for shape in dict.fromkeys(shapes):
                yield {"operator": name, **shape._asdict()}

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        operator = OPERATORS[cell["operator"]]
        names = [name for name in self.implementations if name in operator.functions]
        shape = Shape(**{name: cell[name] for name in Shape._fields})
        # The compiler keeps few versions of a function: each shape starts without any.
        forget_compiled()

        def rows(name: str, example: "Example", settings: dict[str, Any]) -> Iterator[Measurement]:
            passes = OperatorPasses(operator.functions[name](shape, conditions), example)
            results = passes.results()
            if name not in operator.others:
                yield error_row(example.largest_error(results, conditions.precision), settings)
            del results
            peak = PeakMemory(conditions.device, of_tensors=True)
            passes.total()
            yield peak_row(PEAK, peak.mib(), settings)
            for part, times in passes.times(PASSES, self):
                yield time_row(times, settings, f"{part}{MILLISECONDS}")

        make = partial(Example, operator, shape, conditions)
        yield from by_implementation(names, UNITS, cell, conditions, make, rows)


class Example:
    """Inputs of one cell, the output's gradient, and output and gradients in float64."""

    def __init__(self, operator: Operator, shape: Shape, conditions: Conditions) -> None:
        self.shape = shape
        generator = torch.Generator(conditions.device).manual_seed(0)
        self.inputs = operator.inputs(shape, generator, conditions.dtype)
        output_shape = (*shape[:2], shape.num_heads, shape.head_width)
        gradient = torch.randn(output_shape, generator=generator, device=conditions.device)
        self.gradient = gradient.to(conditions.dtype)
        # Of independent heads, with T × T weights each, the first and the last, one at a time.
        last = (shape.batch_size - 1, shape.num_heads - 1)
        self.heads = list(dict.fromkeys([(0, 0), last])) if operator.by_heads else [None]
        self.expected = [self._reference(operator.definition, head) for head in self.heads]

    def _reference(self, definition: Function, head: tuple[int, int] | None) -> list[Tensor]:
        inputs = {name: _of(x, head).double().requires_grad_() for name, x in self.inputs.items()}
        output = definition(**inputs)
        gradients = torch.autograd.grad(output, list(inputs.values()), _of(self.gradient, head).double())
        return [output.detach(), *gradients]

    def largest_error(self, results: Sequence[Tensor], precision: str) -> float:
        """Return the largest relative error of output and gradients; raise GateError for one beyond the precision's.
        Gradients of gates, which sum over channels, are allowed PART_FACTOR times as much."""
        largest = 0.0
        for head, expected in zip(self.heads, self.expected, strict=True):
            for part, computed, exact in zip(("output", *self.inputs), results, expected, strict=True):
                error = relative_error(_of(computed, head), exact)
                is_wide = part in ("output", "query", "key", "value")
                allowed = TOLERANCES[precision] * (1 if is_wide else PART_FACTOR)
                # Written so that a NaN fails.
                if not error <= allowed:
                    words = "output" if part == "output" else f"gradient of {part}"
                    raise GateError(f"{words} is off by {error:.2g}, and {precision} explains {allowed:g}")
                largest = max(largest, error)
        return largest


def _of(x: Tensor, head: tuple[int, int] | None) -> Tensor:
    """Take one head of one sequence of (B, T, H, ...); None: all."""
    return x if head is None else x[head[0] : head[0] + 1, :, head[1] : head[1] + 1]


class OperatorPasses(Passes):
    def __init__(self, function: Function | Packed, example: Example) -> None:
        self.example, self.is_packed = example, isinstance(function, Packed)
        call = function.function if isinstance(function, Packed) else function
        inputs = dict(example.inputs)
        if self.is_packed:
            heads = [inputs.pop(name).flatten(2) for name in ("query", "key", "value")]
            inputs = {"mixed": torch.cat(heads, dim=-1), **inputs}
        inputs: Inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        super().__init__(partial(call, **inputs), list(inputs.values()), example.gradient)

    def results(self) -> list[Tensor]:
        """Return output and gradients in the order of the example's inputs."""
        output, *gradients = self.outcome()
        if self.is_packed:
            parts = [self.example.inputs[name] for name in ("query", "key", "value")]
            split = gradients[0].split([x[0, 0].numel() for x in parts], dim=-1)
            gradients = [part.view(x.shape) for part, x in zip(split, parts, strict=True)] + gradients[1:]
        return [output, *gradients]
