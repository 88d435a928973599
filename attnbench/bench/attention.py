"""Attention alone over head width and length: forward, backward, both, and the memory held between them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Bench,
    Conditions,
    speedup_columns,
)
from attnbench.bench.operators.attention import HELD, Problem, measure_attention
from attnbench.bench.tables import Layout, Values
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, OUR_KERNELS
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option

LINES = ("head_width", "sequence_length")
SHAPE = ("sequence_length", "head_width")
"""Settings that order the sizes of a headline."""


def layouts_for(names: Sequence[str], ratios: Sequence[tuple[str, str]]) -> tuple[Layout, ...]:
    roof = Values(metric=ROOFLINE, header="{}, roof", only=OUR_KERNELS, is_share=True)
    return (
        *(
            Layout(
                title=f"{name}, ms",
                lines=LINES,
                values=(
                    Values(metric=f"{name}{MILLISECONDS}"),
                    replace(roof, where={"pass": name}),
                    *speedup_columns(ratios, name),
                ),
            )
            for name in names
        ),
        Layout(title="largest relative error", lines=LINES, values=(Values(metric=MAX_ERROR),)),
    )


class AttentionBench(Bench):
    """Attention alone, by each implementation, at every head width and length."""

    head_widths: list[int] = option([16, 32, 64, 128], "channels a head", minimum=1)
    lengths: list[int] = option([256, 1024, 2048, 4096, 8192, 16384], "positions", minimum=1)
    batch_size: int = option(8, "sequences", minimum=1)
    num_heads: int = option(1, "heads of each", minimum=1)
    causal: bool = option(True, "false: every position sees all")
    implementations: list[str] = option(
        ["textbook", "compiled", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flash_attn", "triton"],
        "unsupported and out_of_memory are rows: nothing runs under another's name",
        choices=[*IMPLEMENTATIONS],
        distinct=True,
    )
    warmup, max_seconds = 2, 0.1

    ratios = (("sdpa_flash", "triton"),)
    layouts = (
        *layouts_for(("forward", "backward"), ratios),
        Layout(title="held before backward, MiB", lines=LINES, values=(Values(metric=HELD),)),
    )
    plots = tuple((f"{name}{MILLISECONDS}", "sequence_length") for name in ("forward", "backward", "total"))
    headline = (
        Headline("forward_milliseconds", "forward ms", axes=SHAPE, label=SHAPE),
        Headline("backward_milliseconds", "backward ms", axes=SHAPE, label=SHAPE),
    )
    smoke = {
        **{"head_widths": [16], "lengths": [32, 33], "batch_size": 1, "warmup": 1, "repeats": 3},
        "implementations": ["textbook", "sdpa_flash", "flash_attn"],
    }

    def cells(self) -> Iterator[dict[str, Any]]:
        shared = {"batch_size": self.batch_size, "num_heads": self.num_heads, "causal": self.causal}
        for values in product(dict.fromkeys(self.head_widths), dict.fromkeys(self.lengths)):
            yield dict(zip(LINES, values, strict=True)) | shared

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        problem = Problem(**cell, with_gradients=True, repetition=self)
        yield from measure_attention(problem, self.implementations, cell, conditions)
