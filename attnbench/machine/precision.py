"""Precisions: names, dtypes, and contexts that compute in them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnbench.settings.errors import UserError
from attnbench.settings.schema import BFLOAT16_WEIGHTS


def resolve_precision(name: str, device_type: str, setting: str = "train.precision") -> str:
    """`auto` is bfloat16 on CUDA and float32 on a CPU; only CUDA has TF32. Messages name `setting`."""
    if name == "tf32" and device_type != "cuda":
        raise UserError(f"{setting}=tf32: only CUDA devices have it; float32 and bfloat16 work on a CPU")
    return name if name != "auto" else ("bfloat16" if device_type == "cuda" else "float32")


def resolve_compile(compiled: bool | None, device_type: str) -> bool:
    return compiled if compiled is not None else device_type == "cuda"


def passes_in(precision: str) -> str:
    """Return the precision of forward and backward passes; BFLOAT16_WEIGHTS is also that of weights and moments."""
    return "bfloat16" if precision == BFLOAT16_WEIGHTS else precision


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of tensors in this precision; TF32 multiplies float32 tensors."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(passes_in(precision), torch.float32)


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Multiply float32 tensors in TF32 if that is the precision, otherwise in float32."""
    before, before_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # cuDNN's, as of an LSTM, are in TF32 unless told otherwise.
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = before_cudnn


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Run forward passes in this precision: autocast for half precisions, TF32 products only if named."""
    dtype = dtype_of(precision)
    is_half = dtype != torch.float32
    with multiplying(precision), torch.autocast(device.type, torch.bfloat16 if not is_half else dtype, enabled=is_half):
        yield
