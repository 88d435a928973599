"""Attention by everybody who computes it: textbook, compiled, torch's fused kernels, flash_attn, our own.

Each is called by the name that settings and tables have for it, and by no other: what cannot run refuses.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.kernels.cuda_flash_attention import STEPS, WIDTHS, load_cuda_attention
from attnbench.machine.kernel_support import require_triton
from attnbench.ops.attention_kernels import load_flash_attn
from attnbench.settings.errors import UserError

HALVES = ("bfloat16", "float16")
OURS = ("triton", *STEPS)
"""Whose share of the roofline stands in the tables."""

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(slots=True, kw_only=True, frozen=True)
class Implementation:
    """Attention as a function of query, key, value and whether it is causal."""

    name: str
    make: Callable[[], Attention]
    """Imports what it needs, or raises a UserError that says what is missing."""
    heads_first: bool
    """Whether its tensors are (B, H, T, K) in memory or (B, T, H, K): each gets what it is made for."""
    refuse: Callable[[str, str, int], str | None]
    """Why it cannot run on a device type, in a precision, at a head width; None where it can."""
    is_plain: bool = False
    """It has a forward pass alone, in which every position sees all."""


def textbook(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, causal: bool) -> Tensor:
    """Two matrix products with a softmax between them, every weight in memory, in the dtype of the inputs."""
    score_BHTT = query_BHTK @ key_BHTK.mT * query_BHTK.shape[-1] ** -0.5
    if causal:
        T = score_BHTT.shape[-1]
        unseen_TT = torch.ones(T, T, dtype=torch.bool, device=score_BHTT.device).triu(1)
        score_BHTT = score_BHTT.masked_fill(unseen_TT, float("-inf"))
    return score_BHTT.softmax(-1) @ value_BHTK


@functools.cache
def _compiled() -> Attention:
    """A graph for each shape, and none of it uncompiled: past its limit of versions the compiler raises.

    Without the compiler's pattern matching, which would exchange the textbook for SDPA, that has columns of its own.
    """
    return torch.compile(textbook, dynamic=False, fullgraph=True, options={"pattern_matcher": False})


def _sdpa(kernel: SDPBackend) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attend


def _flash_attn() -> Attention:
    function = load_flash_attn()
    return lambda query, key, value, causal: function(query, key, value, causal=causal)


def _triton() -> Attention:
    from attnbench.kernels.flash_attention import flash_attention

    return lambda query, key, value, causal: flash_attention(query, key, value, causal=causal)


def _cuda(name: str) -> Attention:
    function = load_cuda_attention(name)
    return lambda query, key, value, causal: function(query, key, value)


def _refuse_cuda(device_type: str, precision: str, width: int) -> str | None:
    if width not in WIDTHS:
        return f"our CUDA kernels: {' or '.join(map(str, WIDTHS))} channels a head alone, and here are {width}"
    return _with_cuda("our CUDA kernels", HALVES, max(WIDTHS))(device_type, precision, width)


def _anywhere(device_type: str, precision: str, width: int) -> str | None:
    return None


def _with_cuda(name: str, precisions: Sequence[str], widest: int) -> Callable[[str, str, int], str | None]:
    def refuse(device_type: str, precision: str, width: int) -> str | None:
        if device_type != "cuda":
            return f"{name}: CUDA alone, and device={device_type}"
        if precision not in precisions:
            return f"{name}: {' and '.join(precisions)} alone, and precision={precision}"
        if width > widest or width % 8:
            return f"{name}: multiples of 8 channels a head up to {widest} alone, and here are {width}"
        return None

    return refuse


def _refuse_sdpa_flash(device_type: str, precision: str, width: int) -> str | None:
    # There it has a kernel of the same kind for all of them.
    return (
        None if device_type == "cpu" else _with_cuda("SDPA's flash kernel", HALVES, 256)(device_type, precision, width)
    )


def _refuse_triton(device_type: str, precision: str, width: int) -> str | None:
    try:
        require_triton("implementation triton", device_type)
    except UserError as refusal:
        return str(refusal)
    if device_type == "cpu" and precision == "bfloat16":
        return "Triton's interpreter computes no products in bfloat16"
    return None if width <= 128 else f"our Triton kernel takes up to 128 channels a head, and here are {width}"


# Its products of float32 are always made of three of TF32 and as exact as float32's own: a column of it in tf32 would
# stand beside others that compute less.
_EFFICIENT = ("float32", *HALVES)

IMPLEMENTATIONS = {
    one.name: one
    for one in (
        Implementation(name="textbook", make=lambda: textbook, heads_first=True, refuse=_anywhere),
        Implementation(name="compiled", make=_compiled, heads_first=True, refuse=_anywhere),
        Implementation(
            name="sdpa_math", make=functools.partial(_sdpa, SDPBackend.MATH), heads_first=True, refuse=_anywhere
        ),
        Implementation(
            name="sdpa_flash",
            make=functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
            heads_first=True,
            refuse=_refuse_sdpa_flash,
        ),
        Implementation(
            name="sdpa_efficient",
            make=functools.partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
            heads_first=True,
            refuse=_with_cuda("SDPA's memory-efficient kernel", _EFFICIENT, 256),
        ),
        Implementation(
            name="sdpa_cudnn",
            make=functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
            heads_first=True,
            refuse=_with_cuda("cuDNN's kernel", HALVES, 128),
        ),
        Implementation(
            name="flash_attn", make=_flash_attn, heads_first=False, refuse=_with_cuda("flash_attn", HALVES, 256)
        ),
        Implementation(name="triton", make=_triton, heads_first=False, refuse=_refuse_triton),
        *(
            Implementation(
                name=name, make=functools.partial(_cuda, name), heads_first=True, refuse=_refuse_cuda, is_plain=True
            )
            for name in STEPS
        ),
    )
}


def check_implementations(names: object, setting: str = "bench.implementations") -> None:
    """Raises UserError for a list that names none, one twice, or one that there is not."""
    if not isinstance(names, list) or not names:
        raise UserError(f"{setting}={names}: must be a list of {', '.join(IMPLEMENTATIONS)}")
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise UserError(f"{setting}: {name} is none of {', '.join(IMPLEMENTATIONS)}")
    if len(set(names)) < len(names):
        raise UserError(f"{setting}={names}: names one of them twice")
