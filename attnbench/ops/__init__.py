"""Operators, one package per family: definition, chunked form in torch, FLOPs and choice of the backend; `triton/` has
Triton kernels, bound as custom operators; `cuda/` has CUDA C++.

The functions below are the public interface. They take tensors (B, T, H, K), no modules or configuration, and need only
torch, and Triton on CUDA. Modules in `triton/` are imported inside functions, because Triton is only installed on CUDA
machines.
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
    # Imported on first use: the operators load Triton where it is installed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("attnbench.ops.functions"), name)
