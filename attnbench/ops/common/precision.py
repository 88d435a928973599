"""Precision of what the operators accumulate."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and sums for inputs in `dtype`: float32, or float64 where the model itself is."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it is already."""
    return x.to(accumulation_dtype(x.dtype))
