"""Launch choices of the gated delta rule: chunk sizes, blocks and warps of each kernel, and which of two forms runs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbench.ops.common.triton.chunked import Chunked
from attnbench.ops.common.triton.launching import is_roomy, num_multiprocessors
from attnbench.ops.common.triton.products import product_precision

LAUNCH: dict[str, dict[str, int]] = {
    "pairs": {"num_warps": 4},
    "walk_forward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "walk_backward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "key_parts": {"num_warps": 4},
    "prepare_forward": {"num_warps": 4, "num_stages": 1, "VALUES": 64},
    "scan_forward": {"num_warps": 4, "num_stages": 3, "VALUES": 16},
    "read": {"num_warps": 4, "VALUES": 64},
    "prepare_backward": {"num_warps": 4, "VALUES": 64},
    "scan_backward": {"num_warps": 4, "num_stages": 3, "VALUES": 16},
    "gradient": {"num_warps": 4, "num_stages": 1, "VALUES": 64},
}
"""Launch of each kernel: warps, stages of the loads in its loop and the largest block of value channels."""

NARROW = 64
"""Heads with fewer key channels, or fewer value channels per program, have shorter chunks (`positions_of_chunk`) and
blocks (`NARROW_VALUES`), so that all products are a single warp's. Triton 3.6 miscompiles Hopper's four-warp products
for narrow tiles: at 16 and 32 key channels rows of W from 16 on are wrong, and at 16 and 32 value channels gradients
are read from beyond the shared memory."""

NARROW_VALUES = 32

NARROW_LAUNCH: dict[str, dict[str, int]] = LAUNCH | {
    "pairs": {"num_warps": 1},
    "walk_forward": {"num_warps": 1, "num_stages": 2, "VALUES": 32},
    "walk_backward": {"num_warps": 2, "num_stages": 2, "VALUES": 32},
    "gradient": {"num_warps": 2, "num_stages": 1, "VALUES": 32},
}
"""LAUNCH of heads with fewer than NARROW key channels: four warps would repeat half of the products of a chunk of 32,
and three quarters of one of 16. On an H200, 2,560 x 40 positions of 4 heads of 32 take 51 µs for pairs with one warp,
166 with four."""

LEAST = 16
"""Positions of the shortest chunk; Triton's products have at least 16 rows."""

SHORT = 48
"""Positions of a sequence up to which heads with fewer than NARROW key channels have chunks of LEAST: as compiled for
Hopper, three of these take fewer registers and instructions than two chunks of 32."""

NARROWEST = 32
"""Fewest value channels of a walk's block; docs/kernels.md has the timings."""

MANY_CHUNKS = 8
"""Fewest chunks of a long walk."""

WIDE = 128
"""Largest number of key channels in float32."""

WIDE_LAUNCH: dict[str, dict[str, int]] = {
    "walk_forward": {"num_warps": 8, "num_stages": 2, "VALUES": 128},
    "walk_backward": {"num_warps": 8, "num_stages": 2, "VALUES": 128},
    "gradient": {"num_warps": 8, "num_stages": 2},
}
"""Overrides of LAUNCH for heads wider than WIDE: the state of a walk fills half of a multiprocessor's registers."""

CRAMPED_LAUNCH: dict[str, dict[str, int]] = {
    "walk_forward": {"num_warps": 4, "num_stages": 1, "VALUES": 32},
    "walk_backward": {"num_warps": 4, "num_stages": 1, "VALUES": 32},
    "scan_forward": {"num_stages": 2},
    "scan_backward": {"num_stages": 2},
    "gradient": {"num_warps": 8, "num_stages": 1},
}
"""Overrides for keys of more than 256 bytes on a GPU that is not roomy: fit into 99 KiB of shared memory, untuned."""


def positions_of_chunk(key_width: int, value_width: int, dtype: torch.dtype) -> int:
    """Return C: 32 for narrow heads, and in float32 up to 64 key channels, where chunks of 64 run out of registers."""
    is_narrow = min(key_width, value_width & -value_width) < NARROW
    return 32 if is_narrow or (dtype == torch.float32 and key_width <= 64) else 64


def values_of_walk(channels: int, narrowest: int, num_values: int, device: torch.device) -> int:
    """Return the value channels of a walk's block: `channels`, halved while there are no more walks than
    multiprocessors. `num_values` counts value channels of all sequences and heads."""
    while channels > narrowest and 2 * num_values // channels <= num_multiprocessors(device):
        channels //= 2
    return channels


@dataclass(frozen=True, slots=True)
class DeltaRule(Chunked):
    """Contiguous inputs of one call, and the sizes that follow from their shapes.

    Args:
        parallel: all chunks in parallel around a scan, instead of a walk per head; None for `choose_parallel`.
    """

    mixed: Tensor
    log_decay: Tensor
    beta: Tensor
    num_heads: int
    num_key_heads: int
    key_width: int
    unit_length: bool
    parallel: bool | None = None

    @property
    def value_width(self) -> int:
        return (self.mixed.shape[2] - 2 * self.num_key_heads * self.key_width) // self.num_heads

    @property
    def scale(self) -> float:
        return self.key_width**-0.5

    @property
    def heads(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "GROUPS": self.num_key_heads}

    @property
    def chunk(self) -> int:
        """C, at most the power of 2 that holds the whole sequence."""
        if self.length <= (SHORT if self.key_width < NARROW else LEAST):
            return LEAST
        if self.length <= 2 * LEAST:
            return 2 * LEAST
        return positions_of_chunk(self.key_width, self.value_width, self.mixed.dtype)

    @property
    def values(self) -> int:
        return min(128 if self.chunk == 64 else NARROW_VALUES, self.value_width & -self.value_width)

    def launch_of(self, kernel: str) -> dict[str, int]:
        launch = (LAUNCH if self.key_width >= NARROW else NARROW_LAUNCH)[kernel]
        is_float32 = self.mixed.dtype == torch.float32
        if kernel == "gradient":
            keys_of_four_warps = 32 if is_float32 else 64
        else:
            keys_of_four_warps = 64 if is_float32 and self.chunk < 64 else WIDE
        if self.key_width > WIDE:
            launch = launch | WIDE_LAUNCH.get(kernel, {})
            if kernel == "gradient" and self.value_width > 256:
                # With it a shorter loop runs out of registers: docs/kernels.md has the times.
                launch = launch | {"num_stages": 3}
        elif self.key_width > keys_of_four_warps:
            # Four run out of registers; in float32 the assembler then takes 30 s and more.
            launch = launch | {"num_warps": 8}
        elif kernel == "pairs" and self.chunk < 64 <= self.key_width:
            launch = launch | {"num_warps": 2}
        if self.key_width * self.mixed.itemsize > 256 and self.chunk == 64 and not is_roomy(self.mixed.device):
            launch = launch | CRAMPED_LAUNCH.get(kernel, {})
        if "VALUES" not in launch:
            return launch
        channels = min(launch["VALUES"], self.values)
        if kernel.startswith("walk") and self.can_walk_narrow:
            channels = values_of_walk(channels, NARROWEST, self.sequences * self.value_width, self.mixed.device)
        return launch | {"VALUES": channels}

    @property
    def can_walk_narrow(self) -> bool:
        """True for heads and lengths for which narrower walks have been timed."""
        is_timed = self.mixed.itemsize == 2 and self.chunk == 64 and self.key_width <= WIDE
        return is_timed and self.num_chunks >= MANY_CHUNKS

    def num_blocks(self, kernel: str) -> int:
        return self.value_width // self.launch_of(kernel)["VALUES"]

    def empty(self, *shape: int) -> Tensor:
        return self.mixed.new_empty(self.sequences, self.num_chunks, *shape)

    def options(self, kernel: str, **more: Any) -> dict[str, Any]:
        precision = product_precision(self.mixed.dtype)
        options = {"C": self.chunk, "K": self.key_width, "V": self.value_width, "PRECISION": precision}
        return options | more | self.launch_of(kernel)

    def goes_parallel(self) -> bool:
        return choose_parallel(self) if self.parallel is None else self.parallel


def choose_parallel(rule: DeltaRule) -> bool:
    """Return whether walking would leave most of the device idle for long: fewer walks than multiprocessors, of
    MANY_CHUNKS each; or with narrow walks, whose time hardly depends on their number, fewer sequences × heads than a
    fifth of the multiprocessors (see `NARROWEST`)."""
    idle_from = num_multiprocessors(rule.mixed.device)
    if rule.can_walk_narrow:
        few = 5 * rule.sequences < idle_from
    else:
        few = rule.sequences * rule.num_blocks("walk_forward") < idle_from
    return few and rule.num_chunks >= MANY_CHUNKS
