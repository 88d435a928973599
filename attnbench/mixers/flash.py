"""Softmax attention through a fused kernel that never writes the T × T weights (Dao et al., 2022; Dao, 2023)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from attnbench.errors import UserError
from attnbench.mixers.softmax import Softmax


class Flash(Softmax):
    """The function that Softmax computes, with the same parameters, in memory that grows with the length alone.

    Args:
        num_heads, num_key_value_heads, rotary_theta, conv_size, output_gate, qk_norm: as in Softmax.
        backend: `sdpa`, the flash kernel of torch's scaled_dot_product_attention, on a CPU and on CUDA; `flash_attn`,
            the package of that name, on CUDA. On CUDA both are for bfloat16 and head widths that are multiples of 8 up
            to 256. `auto` is sdpa, and flash_attn where a window is set. The choice changes the speed, not the result
            beyond rounding.
        window: a position sees itself and the window - 1 before it; null for all before it. flash_attn alone has one.

    Raises:
        UserError: as Softmax; a window that is below 1 or given to sdpa.
    """

    backends: ClassVar[tuple[str, ...]] = ("sdpa", "flash_attn")
    auto_rule: ClassVar[str] = "sdpa needs no package; flash_attn where a window is set, which it alone has"

    without_vmap: ClassVar[frozenset[str]] = frozenset({"sdpa", "flash_attn"})

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
        output_gate: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            output_gate=output_gate,
            qk_norm=qk_norm,
        )
        self.window = window
        self.backend = _resolve(backend, window)

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """See Mixer; refuses what the kernel of that name cannot do."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        window = options.get("window")
        backend = _resolve(options.get("backend", "auto"), window)
        if backend == "flash_attn":
            if device_type != "cuda":
                asked = f"attn.backend={backend}" if window is None else f"attn.window={window}"
                raise UserError(
                    f"{asked}: the flash_attn package runs on CUDA alone, not on device={device_type}; "
                    "choose attn.backend=sdpa attn.window=null"
                )
            load_flash_attn()
        if device_type == "cuda":
            _check_cuda(backend, options.get("head_width"), precision)
        return backend

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        if self.backend == "sdpa":
            return sdpa_flash(query_BTHK, key_BSHK, value_BSHK)
        window = (-1, -1) if self.window is None else (self.window - 1, 0)
        # With fewer queries than keys its causal mask is aligned to the last of both, as `mix` asks.
        return load_flash_attn()(query_BTHK, key_BSHK, value_BSHK, causal=True, window_size=window)

    def mixing_flops(self, length: int) -> int:
        """2 K for the score and 2 V for the weighted sum, for each head and each pair of positions that see each
        other: the half square, less what lies before the window."""
        unseen = max(0, length - self.window) if self.window is not None else 0
        pairs = length * (length + 1) // 2 - unseen * (unseen + 1) // 2
        return pairs * self.num_heads * 4 * self.head_width


def sdpa_flash(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
    """Queries of the last T of S positions through torch's flash kernel, or an error: no other kernel is allowed."""
    query_BHTK, key_BHSK, value_BHSK = (x.transpose(1, 2) for x in (query_BTHK, key_BSHK, value_BSHK))
    length, source = query_BHTK.shape[2], key_BHSK.shape[2]
    mask, is_causal = None, length == source
    if 1 < length < source:
        # `is_causal` would let the first query see the first key alone. On CUDA the kernel takes no mask but can align
        # its causal one to the last position, on a CPU it is the other way round. A single query sees everything.
        if query_BHTK.device.type == "cuda":
            mask = causal_lower_right(length, source)
        else:
            position_S = torch.arange(source, device=query_BHTK.device)
            mask = position_S <= position_S[-length:, None]
    grouped = query_BHTK.shape[1] != key_BHSK.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
        )
    return mixed_BHTK.transpose(1, 2)


def load_flash_attn() -> Callable[..., Tensor]:
    """The kernel of the flash_attn package (Dao, 2023), for (B, T, H, K) in bfloat16 or float16.

    Raises:
        UserError: it is not installed, or its build does not fit this torch.
    """
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"attn.backend=flash_attn: the package cannot be imported ({error}); it is built from source by "
            "`pip install flash-attn --no-build-isolation`; attn.backend=sdpa needs no package"
        ) from error
    return flash_attn_func


def _resolve(backend: str, window: int | None) -> str:
    if window is not None and window < 1:
        raise UserError(f"attn.window={window}: must be at least 1, or null for none")
    if window is not None and backend == "sdpa":
        raise UserError(
            f"attn.window={window}: attn.backend=sdpa has no sliding window; "
            "choose attn.backend=flash_attn or attn.window=null"
        )
    if backend == "auto":
        return "sdpa" if window is None else "flash_attn"
    return backend


def _check_cuda(backend: str, head_width: int | None, precision: str) -> None:
    if precision != "bfloat16":
        raise UserError(
            f"train.precision={precision}: attn.backend={backend} needs half precision on CUDA; "
            "choose train.precision=bfloat16 or attn=softmax"
        )
    if head_width is not None and (head_width % 8 or head_width > 256):
        raise UserError(
            f"head_width={head_width}: attn.backend={backend} needs a multiple of 8 up to 256 on CUDA; "
            "choose such a width or attn=softmax"
        )
