"""Implementations of softmax attention by name, for mixers, doctor, benches and tests. One that cannot run raises."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.machine.device import require_triton
from attnbench.ops.attention.cuda.cuda_attention import STEPS, WIDTHS, load_cuda_attention
from attnbench.settings.errors import UserError

HALVES = ("bfloat16", "float16")
PRECISIONS = ("float32", "tf32", *HALVES)

OUR_KERNELS = ("triton", *STEPS)
"""attnbench's implementations, in Triton and in CUDA C++."""

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(query, key, value, causal mask or not) -> output."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Implementation:
    name: str
    label: str = ""
    """Name in messages."""
    make: Callable[[], Attention]
    """Import the function, or raise a UserError that names the missing part."""
    heads_first: bool
    """True for tensors (B, H, T, K) in memory, false for (B, T, H, K)."""
    on_cpu: bool = False
    """True if it also runs on a CPU, where it supports every precision and width."""
    precisions: Sequence[str] = PRECISIONS
    """Precisions on CUDA."""
    widths: Sequence[int] | None = None
    """Channels per head on CUDA; None for any."""
    causal: bool = True
    """False if it only computes attention without causal mask."""
    gradient: bool = True
    """False without backward pass."""
    window: bool = False
    """True with support of a sliding window."""
    refuse: Callable[[str, str, int], str | None] = lambda device_type, precision, width: None
    """Additional refusal, with the signature of `refusal`, which calls it first."""

    @property
    def max_width(self) -> float:
        return max(self.widths) if self.widths is not None else float("inf")

    def refusal(self, device_type: str, precision: str, width: int) -> str | None:
        """Return why it cannot run, or None. It may still be missing, see `make`."""
        refused = self.refuse(device_type, precision, width)
        if refused is not None:
            return refused
        if device_type != "cuda":
            return None if self.on_cpu else f"{self.label}: CUDA alone, and device={device_type}"
        if precision not in self.precisions:
            return f"{self.label}: {' and '.join(self.precisions)} alone, and precision={precision}"
        if self.widths is not None and width not in self.widths:
            few = f"{' or '.join(map(str, self.widths))} channels a head"
            many = f"multiples of {self.widths[0]} channels a head up to {self.widths[-1]}"
            return f"{self.label}: {many if len(self.widths) > 2 else few} alone, and here are {width}"
        return None


def textbook(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, causal: bool) -> Tensor:
    """Two matrix products around a softmax, with all weights in memory, in the dtype of the inputs."""
    score_BHTT = query_BHTK @ key_BHTK.mT * query_BHTK.shape[-1] ** -0.5
    if causal:
        T = score_BHTT.shape[-1]
        unseen_TT = torch.ones(T, T, dtype=torch.bool, device=score_BHTT.device).triu(1)
        score_BHTT = score_BHTT.masked_fill(unseen_TT, float("-inf"))
    return score_BHTT.softmax(-1) @ value_BHTK


@functools.cache
def compiled_textbook() -> Attention:
    """One graph per shape, without pattern matching, which would replace it by SDPA."""
    return torch.compile(textbook, dynamic=False, fullgraph=True, options={"pattern_matcher": False})


def _sdpa(kernel: SDPBackend) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(kernel):
            grouped = key.shape[1] < query.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    return attend


def _flash_attn() -> Attention:
    function = load_flash_attn()
    return lambda query, key, value, causal: function(query, key, value, causal=causal)


def load_flash_attn() -> Callable[..., Tensor]:
    """Import the kernel of the flash_attn package (Dao, 2023), for (B, T, H, K) in bfloat16 or float16. Raises
    UserError if it cannot be imported."""
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"attn.backend=flash_attn: the package cannot be imported ({error}); it is built from source by "
            "`pip install flash-attn --no-build-isolation`; attn.backend=sdpa needs no package"
        ) from error
    return flash_attn_func


def _triton() -> Attention:
    from attnbench.ops.attention.triton.flash_op import flash_attention

    return lambda query, key, value, causal: flash_attention(query, key, value, causal=causal)


def _refuse_triton(device_type: str, precision: str, width: int) -> str | None:
    try:
        require_triton("implementation triton", device_type)
    except UserError as refusal:
        return str(refusal)
    if device_type == "cpu" and precision == "bfloat16":
        return "Triton's interpreter computes no products in bfloat16"
    return None if width <= 128 else f"our Triton kernel takes up to 128 channels a head, and here are {width}"


def _cuda(name: str) -> Attention:
    function = load_cuda_attention(name)
    return lambda query, key, value, causal: function(query, key, value)


def _of_torch(name: str, label: str, kernel: SDPBackend, **supported: Any) -> Implementation:
    supported = {"precisions": HALVES, "widths": range(8, 257, 8)} | supported
    return Implementation(name=name, label=label, make=functools.partial(_sdpa, kernel), heads_first=True, **supported)


_LISTED = (
    Implementation(name="textbook", make=lambda: textbook, heads_first=True, on_cpu=True),
    Implementation(name="compiled", make=compiled_textbook, heads_first=True, on_cpu=True),
    Implementation(name="sdpa_math", make=functools.partial(_sdpa, SDPBackend.MATH), heads_first=True, on_cpu=True),
    # Its CPU kernel supports all precisions and widths.
    _of_torch("sdpa_flash", "SDPA's flash kernel", SDPBackend.FLASH_ATTENTION, on_cpu=True),
    # Its float32 products are always three TF32 products, as exact as float32: a tf32 column would be compared with
    # implementations that compute less.
    _of_torch(
        "sdpa_efficient",
        "SDPA's memory-efficient kernel",
        SDPBackend.EFFICIENT_ATTENTION,
        precisions=("float32", *HALVES),
    ),
    _of_torch("sdpa_cudnn", "cuDNN's kernel", SDPBackend.CUDNN_ATTENTION, widths=range(8, 129, 8)),
    Implementation(
        name="flash_attn",
        label="flash_attn",
        make=_flash_attn,
        heads_first=False,
        precisions=HALVES,
        widths=range(8, 257, 8),
        window=True,
    ),
    Implementation(
        name="triton",
        label="our Triton kernel",
        make=_triton,
        heads_first=False,
        on_cpu=True,
        widths=range(1, 129),
        window=True,
        refuse=_refuse_triton,
    ),
    *(
        Implementation(
            name=name,
            label="our CUDA kernels",
            make=functools.partial(_cuda, name),
            heads_first=True,
            precisions=HALVES,
            widths=WIDTHS,
            causal=False,
            gradient=False,
        )
        for name in STEPS
    ),
)
IMPLEMENTATIONS = {implementation.name: implementation for implementation in _LISTED}
"""The textbook comes first."""
