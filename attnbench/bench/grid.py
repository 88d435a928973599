"""The forward pass over batch, heads, length and head width, with its first output values beside each other."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

from attnbench.bench.attention import SHAPE
from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Bench,
    Conditions,
    speedup_columns,
)
from attnbench.bench.operators.attention import Problem, measure_attention
from attnbench.bench.tables import Layout, Values
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, OUR_KERNELS
from attnbench.ops.attention.cuda.cuda_attention import STEPS
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option

AXES = {"batch_size": "B", "num_heads": "H", "sequence_length": "N", "head_width": "D"}
"""Settings that tell cells apart, and the headers of their columns."""


class GridBench(Bench):
    """Attention's forward pass, every position seeing all, over batch, heads, length and head width."""

    batch_sizes: list[int] = option([1, 2, 4], "sequences", minimum=1)
    num_heads: list[int] = option([1, 2, 4, 8], "heads of each", minimum=1)
    lengths: list[int] = option([1024, 2048, 4096, 8192], "positions", minimum=1)
    head_widths: list[int] = option([64, 128], "channels a head", minimum=1)
    implementations: list[str] = option(
        ["textbook", "sdpa_flash", "sdpa_cudnn", "flash_attn", "triton", *STEPS],
        "the last four are one kernel in CUDA C++, in steps: attnbench/ops/attention/cuda/flash_attention.cu",
        choices=[*IMPLEMENTATIONS],
        distinct=True,
    )
    warmup, max_seconds = 2, 0.1

    ratios = (
        *(("textbook", name) for name in OUR_KERNELS),
        *(("sdpa_flash", name) for name in OUR_KERNELS),
        # Gains of each step of our CUDA kernel.
        *pairwise(STEPS),
    )
    layouts = (
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
    plots = ((f"forward{MILLISECONDS}", "sequence_length"),)
    headline = (Headline("forward_milliseconds", "forward ms", axes=(*SHAPE, "batch_size", "num_heads"), label=SHAPE),)
    smoke = {
        **{"batch_sizes": [1], "num_heads": [1, 2], "lengths": [33], "head_widths": [16], "warmup": 1, "repeats": 3},
        "implementations": ["textbook", "sdpa_flash", "flash_attn"],
    }

    def cells(self) -> Iterator[dict[str, Any]]:
        axes = (self.batch_sizes, self.num_heads, self.lengths, self.head_widths)
        for values in product(*map(dict.fromkeys, axes)):
            yield dict(zip(AXES, values, strict=True))

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        problem = Problem(**cell, causal=False, with_gradients=False, with_values=True, repetition=self)
        yield from measure_attention(problem, self.implementations, cell, conditions)
