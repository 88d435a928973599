"""Recurrence over positions: one step, which defines it, and the forms that compute it fast."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


def outer(key: Tensor, value: Tensor) -> Tensor:
    """Return k v^T, (..., K, V)."""
    return key[..., None] @ value[..., None, :]


def read(memory: Tensor, query: Tensor) -> Tensor:
    """Return S^T q, (..., V)."""
    return (query[..., None, :] @ memory).squeeze(-2)


def by_position(step: Callable[..., Any], memory: Any, *inputs: Tensor | None) -> tuple[Tensor, Any]:
    """Compute y, (B, T, ...), and the last memory, position by position, in the memory's dtype.

    Args:
        step: of the memory and the inputs of one position, (B, ...) each; returns the memory after it and y.
        inputs: (B, T, ...); None for an input that is left out.
    """
    dtype, mixed = (memory if isinstance(memory, Tensor) else memory[0]).dtype, []
    for position in zip(*(repeat(None) if x is None else x.to(dtype).unbind(1) for x in inputs), strict=False):
        memory, y = step(memory, *position)
        mixed.append(y)
    return (torch.stack(mixed, dim=1) if len(mixed) > 1 else mixed[0][:, None]), memory


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Forms of one recurrence. Inputs are query, key, value and the signals that a mixer computes, (B, T, ...) each."""

    step: Callable[..., tuple[Any, Tensor]]
    """Definition: from a memory and the inputs of one position to the memory after it and y."""
    scan: Callable[..., tuple[Tensor, Any]]
    """From the inputs, the memory before them (None for zeros) and the backend's name to y and the last memory; None
    where there is none, or where the given one has become it."""
    prepare: Callable[..., tuple[Tensor | None, ...]] = lambda *inputs: inputs
    """From the inputs to those of the steps, (B, T, ...) too."""
    is_wide: bool = False
    """True where y stays in the memory's dtype, instead of the value's."""
    packed: Callable[..., tuple[Tensor, Any]] | None = None
    """From a mixer, query, key and value side by side, the signals and the memory to the same, by our kernels."""
    backends: Any = None
    """Table of its `Backends`."""

    def define(self, *inputs: Any) -> tuple[Tensor, Any]:
        """Compute y and the last memory by the definition, from the inputs and the memory before them."""
        *inputs_BT, memory = inputs
        y, memory = by_position(self.step, memory, *self.prepare(*inputs_BT))
        return (y if self.is_wide else y.to(inputs_BT[2].dtype)), memory
