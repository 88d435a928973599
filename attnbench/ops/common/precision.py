"""Precision of accumulations."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and sums for inputs in `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged in float64."""
    return x.to(accumulation_dtype(x.dtype))
