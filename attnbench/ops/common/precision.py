from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable autocast. If it is off anyway, enter nothing: traces that leave its context cannot be cached."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
