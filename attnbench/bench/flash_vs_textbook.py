"""Fused attention against the textbook, over length and head width: each pass, and how many times as fast it is."""

from collections.abc import Iterator
from typing import Any, ClassVar

from attnbench.bench.attention import LINES, AttentionBench, times_of
from attnbench.bench.base import Layout, Subject, Values
from attnbench.bench.implementations import OURS
from attnbench.bench.operator import SPEEDUP, with_speedups
from attnbench.errors import UserError
from attnbench.results import Measurement

TEXTBOOK = "textbook"


def _layout(name: str) -> Layout:
    speedup = Values(metric=SPEEDUP, header=f"{TEXTBOOK} / {{}}", where={"pass": name}, only=OURS)
    return Layout(title=f"{name}, ms", lines=LINES, values=(*times_of(name), speedup))


class FlashVsTextbook(AttentionBench):
    """As AttentionBench, and the ratio of the textbook's time to everybody's.

    Raises:
        UserError: as AttentionBench; or the textbook is not among the implementations.
    """

    title: ClassVar[str] = "Fused attention against the textbook"
    layouts: ClassVar[tuple[Layout, ...]] = tuple(map(_layout, ("forward", "backward", "both")))
    smoke: ClassVar[dict[str, Any]] = {**AttentionBench.smoke, "implementations": [TEXTBOOK, "sdpa_flash"]}

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
        super().__init__(
            head_widths=head_widths,
            lengths=lengths,
            batch_size=batch_size,
            num_heads=num_heads,
            causal=causal,
            implementations=implementations,
            warmup=warmup,
            repeats=repeats,
            max_seconds=max_seconds,
        )
        if TEXTBOOK not in implementations:
            raise UserError(f"bench.implementations={implementations}: must have {TEXTBOOK}, that all are held against")

    def measure(self, cell: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
        yield from with_speedups(super().measure(cell, subject), TEXTBOOK)
