"""Fused attention against the textbook, over length and head width: each pass, and how many times as fast it is."""

from dataclasses import dataclass
from typing import Any, ClassVar

from attnbench.bench.attention import SHAPE, AttentionBench, layouts_for
from attnbench.bench.tables import Layout
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.results.tables import Headline

TEXTBOOK = "textbook"


@dataclass(kw_only=True)
class FlashVsTextbook(AttentionBench):
    """Times each implementation at every head width and length, and how many times the textbook's speed that is.

    Raises:
        UserError: as AttentionBench; or the textbook is not among the implementations.
    """

    required: ClassVar[tuple[str, ...]] = (TEXTBOOK,)
    ratios: ClassVar[tuple[tuple[str, str], ...]] = (
        *((TEXTBOOK, name) for name in IMPLEMENTATIONS if name != TEXTBOOK),
        *AttentionBench.ratios,
    )
    layouts: ClassVar[tuple[Layout, ...]] = layouts_for(
        ("forward", "backward", "total"), ((TEXTBOOK, "triton"), *AttentionBench.ratios)
    )
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("total_milliseconds", "forward and backward ms", axes=SHAPE, label=SHAPE),
    )
    smoke: ClassVar[dict[str, Any]] = {**AttentionBench.smoke, "implementations": [TEXTBOOK, "sdpa_flash"]}
