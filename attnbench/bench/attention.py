"""Attention alone over head width and length: forward, backward, both, and what is held between the two."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from attnbench.bench.base import (
    MAX_ERROR,
    MILLISECONDS,
    ROOFLINE,
    Bench,
    Conditions,
    check_implementations,
    speedup_columns,
    with_speedups,
)
from attnbench.bench.operators.attention import HELD, Problem, measure_attention
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.step_cost import Repetition
from attnbench.ops.attention_kernels import IMPLEMENTATIONS, OUR_KERNELS
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts
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


class AttentionBench(Bench):
    """Times each implementation at every head width and length.

    Args:
        head_widths: channels a head.
        lengths: positions.
        batch_size, num_heads: of every cell.
        causal: false lets every position see all.
        implementations: names, see ops/attention_kernels.py.
        warmup, repeats: calls of a pass before those that count, and those that count, at most.
        max_seconds: for the repeats of one pass: fewer where they would take longer, at least three.

    Raises:
        UserError: a count that is none, or an implementation that there is not.
    """

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

    def __init__(
        self,
        *,
        head_widths: list,
        lengths: list,
        batch_size: int,
        num_heads: int,
        causal: bool,
        implementations: list,
        warmup: int,
        repeats: int,
        max_seconds: float,
    ) -> None:
        check_counts("bench", head_widths=head_widths, lengths=lengths, batch_size=batch_size, num_heads=num_heads)
        check_counts("bench", warmup=warmup, repeats=repeats)
        check_implementations(implementations, IMPLEMENTATIONS)
        missing = [name for name in self.required if name not in implementations]
        if missing:
            raise UserError(
                f"bench.implementations={implementations}: must have {missing[0]}, that all are held against"
            )
        self.head_widths, self.lengths = list(dict.fromkeys(head_widths)), list(dict.fromkeys(lengths))
        self.batch_size, self.num_heads, self.causal = batch_size, num_heads, causal
        self.implementations = implementations
        self.repetition = Repetition(warmup=warmup, repeats=repeats, max_seconds=max_seconds)

    def cells(self) -> Iterator[dict[str, Any]]:
        for width in self.head_widths:
            for length in self.lengths:
                yield {
                    "head_width": width,
                    "sequence_length": length,
                    "batch_size": self.batch_size,
                    "num_heads": self.num_heads,
                    "causal": self.causal,
                }

    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        problem = Problem(**cell, with_gradients=True, repetition=self.repetition)
        yield from with_speedups(measure_attention(problem, self.implementations, cell, conditions), self.ratios)
