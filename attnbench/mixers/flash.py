"""Softmax attention through a fused kernel that never writes the T × T weights (Dao et al., 2022; Dao, 2023)."""

from typing import Any, ClassVar

from torch import Tensor

from attnbench.mixers.around import Gate
from attnbench.mixers.softmax import AttentionState, Softmax
from attnbench.ops.attention.softmax_attention import (
    AUTO_RULE,
    KERNELS,
    attention_flops,
    choose_fused,
    fused,
    fused_packed,
    resolve_fused,
)


class Flash(Softmax):
    """The function that Softmax computes, with the same parameters, in memory that grows with the length alone.

    Args:
        num_heads, num_key_value_heads, rotary_theta, conv_size, qk_norm, output_norm, output_gate: as in Softmax.
        backend: changes the speed, not the result beyond rounding. On CUDA, unless said otherwise, each is for bfloat16
            and for head widths that are multiples of 8.

            - `sdpa`: the flash kernel of torch's scaled_dot_product_attention; widths up to 256. The only one on a CPU.
            - `cudnn`: NVIDIA's kernel behind the same function; widths up to 128.
            - `flash_attn`: the package of that name; widths up to 256.
            - `triton`: our own, for float32 too; any width up to 128. Without qk_norm it trains on what the projection
              made as it is: it rotates and splits query, key and value itself. It alone decodes with a kernel, that of
              ops/attention/triton/flash_decoding.py; the others decode by Softmax's product over the whole cache.
            - `auto`: triton with a window. Without: on a CPU sdpa; on CUDA triton in float32 and tf32, and in bfloat16
              cudnn, the fastest from 1,024 positions on (at 256 triton is, by 4 %), or sdpa for heads wider than 128.
        window: a position sees itself and the window - 1 before it; null for all before it. triton and flash_attn alone
            have one.

    Raises:
        UserError: as Softmax; a window that is below 1 or given to a kernel that has none.
    """

    backends: ClassVar[tuple[str, ...]] = tuple(KERNELS)
    auto_rule: ClassVar[str] = AUTO_RULE

    same_function: ClassVar[str] = "attnbench.mixers.softmax.Softmax"

    without_vmap: ClassVar[frozenset[str]] = frozenset({"sdpa", "cudnn", "flash_attn"})

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        num_key_value_heads: int | None = None,
        backend: str = "auto",
        rotary_theta: float | None = 10000.0,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = False,
        output_gate: Gate = "none",
        window: int | None = None,
    ) -> None:
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )
        self.window = window
        self.backend = resolve_fused(backend, window, head_width, "cpu", "float32")

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what the kernel of that name cannot do."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        return choose_fused(
            options.get("backend", "auto"),
            window=options.get("window"),
            head_width=options.get("head_width"),
            device_type=device_type,
            precision=precision,
        )

    def forward(self, x_BTD: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState | None]:
        if self.backend != "triton" or state is not None or self.qk_norm:
            return super().forward(x_BTD, state)
        packed_BTC, angles = self.query_key_value.packed(x_BTD), self.positions(x_BTD, 0)
        mixed_BTC = fused_packed(packed_BTC, angles, self.num_heads, self.num_key_value_heads, self.window)
        return self.finish(mixed_BTC.unflatten(-1, (-1, self.head_width)), x_BTD), None

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        return fused(query_BTHK, key_BSHK, value_BSHK, self.window, self.backend)

    def mixing_flops(self, length: int) -> int:
        """Count the pairs of positions that see each other, see `attention_flops`."""
        return attention_flops(length, self.num_heads, self.head_width, self.window)
