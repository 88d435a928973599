"""Attention alone over head width and length: forward, backward, both, and what is held between the two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

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
from attnbench.bench.operators.attention import HELD, Problem, measure_attention
from attnbench.bench.tables import Layout, Values
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, OUR_KERNELS
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError

LINES = ("head_width", "sequence_length")
SHAPE = ("sequence_length", "head_width")
"""Settings that order the sizes of a headline."""


def times_of(name: str) -> tuple[Values, ...]:
    """Columns of one pass: milliseconds, and the share of the roofline that our kernels reach."""
    return (
        Values(metric=f"{name}{MILLISECONDS}"),
        Values(metric=ROOFLINE, header="{}, roof", where={"pass": name}, only=OUR_KERNELS, is_share=True),
    )


def layouts_for(names: Sequence[str], ratios: Sequence[tuple[str, str]]) -> tuple[Layout, ...]:
    """A table a pass, each with the ratios that are shown, and then the errors."""
    return (
        *(
            Layout(title=f"{name}, ms", lines=LINES, values=(*times_of(name), *speedup_columns(ratios, name)))
            for name in names
        ),
        Layout(title="largest relative error", lines=LINES, values=(Values(metric=MAX_ERROR),)),
    )


@dataclass(kw_only=True)
class AttentionBench(TimedBench):
    """Times each implementation at every head width and length.

    Args:
        head_widths: channels a head.
        lengths: positions.
        batch_size, num_heads: of every cell.
        causal: false lets every position see all.
        implementations: names, see ops/attention/attention_kernels.py.

    Raises:
        UserError: a count that is none, or an implementation that there is not.
    """

    head_widths: list[int]
    lengths: list[int]
    batch_size: int
    num_heads: int
    causal: bool
    implementations: list

    required: ClassVar[tuple[str, ...]] = ()
    """Implementations that the table cannot do without."""
    ratios: ClassVar[tuple[tuple[str, str], ...]] = (("sdpa_flash", "triton"),)
    layouts: ClassVar[tuple[Layout, ...]] = (
        *layouts_for(("forward", "backward"), ratios),
        Layout(title="held before backward, MiB", lines=LINES, values=(Values(metric=HELD),)),
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = tuple(
        (f"{name}{MILLISECONDS}", "sequence_length") for name in ("forward", "backward", "total")
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("forward_milliseconds", "forward ms", axes=SHAPE, label=SHAPE),
        Headline("backward_milliseconds", "backward ms", axes=SHAPE, label=SHAPE),
    )
    smoke: ClassVar[dict[str, Any]] = {
        "head_widths": [16],
        "lengths": [32, 33],
        "batch_size": 1,
        "implementations": ["textbook", "sdpa_flash", "flash_attn"],
        "warmup": 1,
        "repeats": 3,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_implementations(self.implementations, IMPLEMENTATIONS)
        missing = [name for name in self.required if name not in self.implementations]
        if missing:
            needed = f"must have {missing[0]}, that all are held against"
            raise UserError(f"bench.implementations={self.implementations}: {needed}")

    def cells(self) -> Iterator[dict[str, Any]]:
        shared = {"batch_size": self.batch_size, "num_heads": self.num_heads, "causal": self.causal}
        for values in product(dict.fromkeys(self.head_widths), dict.fromkeys(self.lengths)):
            yield dict(zip(LINES, values, strict=True)) | shared

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        problem = Problem(**cell, with_gradients=True, repetition=self.repetition)
        yield from with_speedups(measure_attention(problem, self.implementations, cell, conditions), self.ratios)
