"""Fused attention against the textbook, over length and head width: each pass, and how many times as fast it is."""

from typing import Any, ClassVar

from attnbench.bench.attention import AttentionBench, layouts_for
from attnbench.bench.base import Layout
from attnbench.bench.implementations import IMPLEMENTATIONS
from attnbench.settings.errors import UserError

TEXTBOOK = "textbook"


class FlashVsTextbook(AttentionBench):
    """Times each implementation at every head width and length, and how many times the textbook's speed that is.

    Raises:
        UserError: as AttentionBench; or the textbook is not among the implementations.
    """

    title: ClassVar[str] = "Fused attention against the textbook"
    ratios: ClassVar[tuple[tuple[str, str], ...]] = (
        *((TEXTBOOK, name) for name in IMPLEMENTATIONS if name != TEXTBOOK),
        *AttentionBench.ratios,
    )
    layouts: ClassVar[tuple[Layout, ...]] = layouts_for(
        ("forward", "backward", "total"), ((TEXTBOOK, "triton"), *AttentionBench.ratios)
    )
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
