"""Softmax attention through a fused kernel that never writes the T × T weights (Dao et al., 2022; Dao, 2023)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.machine.kernel_support import require_triton
from attnbench.mixers.layers import rotation
from attnbench.mixers.softmax import AttentionState, Softmax
from attnbench.ops.attention_kernels import load_flash_attn
from attnbench.settings.errors import UserError

SDPA_KERNELS = {"sdpa": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WITH_WINDOW = ("triton", "flash_attn")
WIDEST_HEAD = {"sdpa": 256, "flash_attn": 256, "cudnn": 128, "triton": 128}


class Flash(Softmax):
    """The function that Softmax computes, with the same parameters, in memory that grows with the length alone.

    Args:
        num_heads, num_key_value_heads, rotary_theta, conv_size, output_gate, qk_norm: as in Softmax.
        backend: changes the speed, not the result beyond rounding. On CUDA, unless said otherwise, each is for bfloat16
            and for head widths that are multiples of 8.

            - `sdpa`: the flash kernel of torch's scaled_dot_product_attention; widths up to 256. The only one on a CPU.
            - `cudnn`: NVIDIA's kernel behind the same function; widths up to 128.
            - `flash_attn`: the package of that name; widths up to 256.
            - `triton`: our own, for float32 too; any width up to 128. Without qk_norm it trains on what the projection
              made as it is: it rotates and splits query, key and value itself. It alone decodes with a kernel, that of
              flash_decoding.py; the others decode by Softmax's product over the whole cache.
            - `auto`: triton with a window. Without: on a CPU sdpa; on CUDA triton in float32 and tf32, and in bfloat16
              cudnn, the fastest from 1,024 positions on (at 256 triton is, by 4 %), or sdpa for heads wider than 128.
        window: a position sees itself and the window - 1 before it; null for all before it. triton and flash_attn alone
            have one.

    Raises:
        UserError: as Softmax; a window that is below 1 or given to a kernel that has none.
    """

    backends: ClassVar[tuple[str, ...]] = ("sdpa", "cudnn", "flash_attn", "triton")
    auto_rule: ClassVar[str] = "CUDA: cudnn in bfloat16, triton in float32; CPU: sdpa; triton with a window"

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
        self.backend = _resolve(backend, window, head_width, "cpu", "float32")

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """See Mixer; refuses what the kernel of that name cannot do."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        requested, window = options.get("backend", "auto"), options.get("window")
        backend = _resolve(requested, window, options.get("head_width"), device_type, precision)
        if device_type == "cuda":
            _check_cuda(backend, options.get("head_width"), precision)
        elif window is not None and requested == "auto":
            raise UserError(
                f"attn.window={window}: a sliding window needs CUDA, device={device_type} has none; "
                "choose attn.window=null"
            )
        elif backend in ("flash_attn", "cudnn"):
            raise UserError(
                f"attn.backend={backend}: its kernels run on CUDA alone, not on device={device_type}; "
                "choose attn.backend=sdpa attn.window=null"
            )
        if backend == "triton":
            require_triton(f"attn.backend={backend}", device_type)
        if backend == "flash_attn":
            load_flash_attn()
        return backend

    def forward(self, x_BTD: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState | None]:
        if self.backend != "triton" or state is not None or self.query_norm is not None:
            return super().forward(x_BTD, state)
        from attnbench.kernels.flash_attention import packed_flash_attention

        theta = self.rotary_theta
        mixed_BTC = packed_flash_attention(
            self.query_key_value.packed(x_BTD),
            None if theta is None else rotation(x_BTD.shape[1], self.head_width, 0, theta, x_BTD.device),
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            causal=True,
            window=self.window,
        )
        return self.output(mixed_BTC, x_BTD), None

    def mix(self, query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor) -> Tensor:
        if self.backend == "cudnn" and key_BSHK.shape[1] == 1:
            # It refuses a single key, which has all the weight there is.
            return value_BSHK.repeat_interleave(query_BTHK.shape[2] // value_BSHK.shape[2], dim=2)
        if self.backend in SDPA_KERNELS:
            return sdpa(query_BTHK, key_BSHK, value_BSHK, SDPA_KERNELS[self.backend])
        # With fewer queries than keys the causal mask of both is aligned to the last of both, as `mix` asks.
        if self.backend == "flash_attn":
            window = (-1, -1) if self.window is None else (self.window - 1, 0)
            return load_flash_attn()(query_BTHK, key_BSHK, value_BSHK, causal=True, window_size=window)
        from attnbench.kernels.flash_attention import flash_attention

        return flash_attention(query_BTHK, key_BSHK, value_BSHK, causal=True, window=self.window)

    def mix_newest(self, query_BTHK: Tensor, state: AttentionState) -> Tensor:
        """triton by a kernel that reads what is filled of the cache, in parts side by side; the others as Softmax."""
        if self.backend != "triton":
            return super().mix_newest(query_BTHK, state)
        from attnbench.kernels.flash_decoding import flash_decoding

        key_BSHK, value_BSHK, position, _ = state
        return flash_decoding(query_BTHK[:, 0], key_BSHK, value_BSHK, position, window=self.window)[:, None]

    def mixing_flops(self, length: int) -> int:
        """2 K for the score and 2 V for the weighted sum, for each head and each pair of positions that see each
        other: the half square, less what lies before the window."""
        unseen = max(0, length - self.window) if self.window is not None else 0
        pairs = length * (length + 1) // 2 - unseen * (unseen + 1) // 2
        return pairs * self.num_heads * 4 * self.head_width


def sdpa(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHK: Tensor, kernel: SDPBackend) -> Tensor:
    """Queries of the last T of S positions through the kernel of torch that is named, or an error: no other runs."""
    query_BHTK, key_BHSK, value_BHSK = (x.transpose(1, 2) for x in (query_BTHK, key_BSHK, value_BSHK))
    length, source = query_BHTK.shape[2], key_BHSK.shape[2]
    if length in (1, source):
        # A single query sees everything.
        return _unmasked(query_BHTK, key_BHSK, value_BHSK, kernel, is_causal=length == source).transpose(1, 2)
    # `is_causal` would let the first query see the first key alone. The flash kernel for CUDA takes no mask but can
    # align its causal one to the last position; that for CPUs and cuDNN's are the other way round.
    if query_BHTK.device.type == "cuda" and kernel == SDPBackend.FLASH_ATTENTION:
        # Imported here: it loads torch's compiler, which takes more than a second.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(length, source)
    else:
        position_S = torch.arange(source, device=query_BHTK.device)
        mask = position_S <= position_S[-length:, None]
    grouped = query_BHTK.shape[1] != key_BHSK.shape[1]
    with sdpa_kernel(kernel):
        mixed_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, attn_mask=mask, enable_gqa=grouped
        )
    return mixed_BHTK.transpose(1, 2)


def _unmasked(
    query_BHTK: Tensor, key_BHSK: Tensor, value_BHSK: Tensor, kernel: SDPBackend, *, is_causal: bool
) -> Tensor:
    """What training takes: the operator of that kernel, which scaled_dot_product_attention would end in.

    Its choice, a setting of the process, in the middle of a graph is what torch's compiler takes no graph from its
    cache for: every start would trace and compile anew.
    """
    device_type = query_BHTK.device.type
    if torch.is_autocast_enabled(device_type):
        # Of this autocast knows the whole function alone.
        dtype = torch.get_autocast_dtype(device_type)
        query_BHTK, key_BHSK, value_BHSK = (
            x.to(dtype) if x.dtype == torch.float32 else x for x in (query_BHTK, key_BHSK, value_BHSK)
        )
    inputs, dropout, aten = (query_BHTK, key_BHSK, value_BHSK), 0.0, torch.ops.aten
    if kernel == SDPBackend.CUDNN_ATTENTION:
        with_sums = torch.is_grad_enabled()
        return aten._scaled_dot_product_cudnn_attention(*inputs, None, with_sums, dropout, is_causal)[0]
    if device_type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(*inputs, dropout, is_causal)[0]
    return aten._scaled_dot_product_flash_attention(*inputs, dropout, is_causal)[0]


def _resolve(backend: str, window: int | None, head_width: int | None, device_type: str, precision: str) -> str:
    """`auto` by name, as the docstring of Flash has it."""
    if window is not None and window < 1:
        raise UserError(f"attn.window={window}: must be at least 1, or null for none")
    if window is not None and backend not in ("auto", *WITH_WINDOW):
        raise UserError(
            f"attn.window={window}: attn.backend={backend} has no sliding window; "
            "choose attn.backend=triton or attn.window=null"
        )
    if backend != "auto":
        return backend
    if window is not None:
        return "triton"
    if device_type != "cuda":
        return "sdpa"
    if precision != "bfloat16":
        return "triton"
    return "cudnn" if head_width is None or head_width <= WIDEST_HEAD["cudnn"] else "sdpa"


def _check_cuda(backend: str, head_width: int | None, precision: str) -> None:
    if precision != "bfloat16" and backend != "triton":
        raise UserError(
            f"train.precision={precision}: attn.backend={backend} needs half precision on CUDA; "
            "choose train.precision=bfloat16 or attn.backend=triton"
        )
    widest, step = WIDEST_HEAD[backend], 1 if backend == "triton" else 8
    if head_width is not None and (head_width % step or head_width > widest):
        allowed = f"a multiple of {step}" if step > 1 else "a width"
        raise UserError(
            f"head_width={head_width}: attn.backend={backend} needs {allowed} up to {widest} on CUDA; "
            "choose such a width or attn=softmax"
        )
