from attnbench.bench.attention import SHAPE, AttentionBench, layouts_for
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError

TEXTBOOK = "textbook"


class FlashVsTextbook(AttentionBench):
    """Fused attention against the textbook: each pass, and how many times as fast it is."""

    head_widths, batch_size = [16, 32, 64], 1
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]

    ratios = (
        *((TEXTBOOK, name) for name in IMPLEMENTATIONS if name != TEXTBOOK),
        *AttentionBench.ratios,
    )
    layouts = layouts_for(("forward", "backward", "total"), ((TEXTBOOK, "triton"), *AttentionBench.ratios))
    headline = (Headline("total_milliseconds", "forward and backward ms", axes=SHAPE, label=SHAPE),)
    smoke = {**AttentionBench.smoke, "implementations": [TEXTBOOK, "sdpa_flash"]}

    def __post_init__(self) -> None:
        if TEXTBOOK not in self.implementations:
            needed = f"must have {TEXTBOOK}, that all are held against"
            raise UserError(f"bench.implementations={self.implementations}: {needed}")
