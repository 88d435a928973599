"""Operators, a package per family: definition, chunked form in torch, FLOPs and choice of the backend; in `triton/`
beside them our Triton kernels, bound as custom operators with fake, autograd and vmap rules; in `cuda/` CUDA C++.

The functions below are the public interface; they need torch, and Triton on CUDA, but no other library of attnbench.
An operator takes query, key, value and what decays or writes, as tensors (B, T, H, K), and knows no module, no
parameter and no configuration: turning a model's hidden states into these inputs is a mixer's part. Modules in
`triton/` are imported in the functions that use them, because Triton is there on CUDA machines alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.ops.functions import (
        diagonal_decay,
        gated_delta_rule,
        linear_attention,
        linear_cross_entropy,
        mlstm,
        rms_norm,
        rotary,
        scalar_decay,
        short_convolution,
        softmax_attention,
        swiglu,
    )

__all__ = [
    "diagonal_decay",
    "gated_delta_rule",
    "linear_attention",
    "linear_cross_entropy",
    "mlstm",
    "rms_norm",
    "rotary",
    "scalar_decay",
    "short_convolution",
    "softmax_attention",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the operators load Triton where it is installed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("attnbench.ops.functions"), name)
