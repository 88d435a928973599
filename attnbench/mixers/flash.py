"""Softmax attention through a fused kernel that never writes the T × T weights (Dao et al., 2022; Dao, 2023)."""

from typing import ClassVar

from torch import Tensor

from attnbench.mixers.softmax import AttentionState, Softmax
from attnbench.ops.attention.softmax_attention import (
    AUTO_RULE,
    KERNELS,
    choose_fused,
    fused,
    fused_packed,
    resolve_fused,
)
from attnbench.settings.options import option


class Flash(Softmax):
    """Softmax's function and parameters, in memory that grows linearly with the length.

    `backend` changes the speed, not the result beyond rounding. On CUDA, unless stated otherwise, for bfloat16 and head
    widths that are multiples of 8:

    - `sdpa`: the flash kernel of torch's scaled_dot_product_attention; widths up to 256. The only one on a CPU.
    - `cudnn`: NVIDIA's kernel behind the same function; widths up to 128.
    - `flash_attn`: the package of that name; widths up to 256.
    - `triton`: our own, for float32 too; any width up to 128. It alone decodes with a kernel.
    - `auto`: triton with a window. Without: sdpa on a CPU; on CUDA triton in float32 and tf32, in bfloat16 cudnn, or
      sdpa for wider heads.
    """

    window: int | None = option(
        None, "positions seen, the current one included; null: all before it. triton and flash_attn alone have a window"
    )

    backends: ClassVar[tuple[str, ...]] = tuple(KERNELS)
    auto_rule, choose = AUTO_RULE, staticmethod(choose_fused)
    same_function = "attnbench.mixers.softmax.Softmax"
    without_vmap: ClassVar[frozenset[str]] = frozenset({"sdpa", "cudnn", "flash_attn"})

    def add_parts(self) -> None:
        self.backend = resolve_fused(self.options["backend"], self.window, self.head_width, "cpu", "float32")

    def forward(self, x_BTD: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState | None]:
        if self.backend != "triton" or state is not None or self.qk_norm:
            return super().forward(x_BTD, state)
        packed_BTC, angles = self.query_key_value.packed(x_BTD), self.positions(x_BTD, 0)
        mixed_BTC = fused_packed(packed_BTC, angles, self.heads, self.groups, self.window)
        return self.finish(mixed_BTC.unflatten(-1, (-1, self.head_width)), x_BTD), None

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        return fused(query_BTHK, key_BSHK, value_BSHK, self.window, self.backend)
