"""The forward pass over batch, heads, length and head width, with its first output values beside each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar

from attnbench.bench.attention import SHAPE
from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Conditions,
    TimedBench,
    check_implementations,
    speedup_columns,
    with_speedups,
)
from attnbench.bench.operators.attention import Problem, measure_attention
from attnbench.bench.tables import Layout, Values
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, OUR_KERNELS
from attnbench.ops.attention.cuda.cuda_attention import STEPS
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline

AXES = {"batch_size": "B", "num_heads": "H", "sequence_length": "N", "head_width": "D"}
"""Settings that tell cells apart, and the headers of their columns."""


@dataclass(kw_only=True)
class GridBench(TimedBench):
    """Times the forward pass of each implementation, every position seeing all, nothing recorded for a backward pass.

    Args:
        batch_sizes, num_heads, lengths, head_widths: the axes; every combination is a cell.
        implementations: names, see ops/attention/attention_kernels.py.

    Raises:
        UserError: a count that is none, or an implementation that there is not.
    """

    batch_sizes: list[int]
    num_heads: list[int]
    lengths: list[int]
    head_widths: list[int]
    implementations: list

    ratios: ClassVar[tuple[tuple[str, str], ...]] = (
        *(("textbook", name) for name in OUR_KERNELS),
        *(("sdpa_flash", name) for name in OUR_KERNELS),
        # What each step of our CUDA kernel gains over the one before.
        *pairwise(STEPS),
    )
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            title="forward, ms",
            lines=tuple(AXES),
            headers=AXES,
            values=(
                Values(metric=f"forward{MILLISECONDS}"),
                Values(metric=ROOFLINE, header="{}, roof", only=OUR_KERNELS, is_share=True),
            ),
        ),
        Layout(title="times as fast", lines=tuple(AXES), headers=AXES, values=speedup_columns(ratios, "forward")),
        Layout(
            title="largest relative error",
            lines=tuple(AXES),
            headers=AXES,
            values=(Values(metric=MAX_ERROR),),
            on_page_alone=True,
        ),
        Layout(
            title="the first values of the output",
            lines=(*AXES, "implementation"),
            headers=AXES,
            values=(Values(metric="output_value", header="value {}"),),
            columns="index",
            on_page_alone=True,
        ),
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = ((f"forward{MILLISECONDS}", "sequence_length"),)
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("forward_milliseconds", "forward ms", axes=(*SHAPE, "batch_size", "num_heads"), label=SHAPE),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "batch_sizes": [1],
        "num_heads": [1, 2],
        "lengths": [33],
        "head_widths": [16],
        "implementations": ["textbook", "sdpa_flash", "flash_attn"],
        "warmup": 1,
        "repeats": 3,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_implementations(self.implementations, IMPLEMENTATIONS)

    def cells(self) -> Iterator[dict[str, Any]]:
        axes = (self.batch_sizes, self.num_heads, self.lengths, self.head_widths)
        for values in product(*map(dict.fromkeys, axes)):
            yield dict(zip(AXES, values, strict=True))

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        problem = Problem(**cell, causal=False, with_gradients=False, with_values=True, repetition=self.repetition)
        yield from with_speedups(measure_attention(problem, self.implementations, cell, conditions), self.ratios)
