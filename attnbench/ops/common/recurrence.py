"""Recurrence over positions: one step as its definition, and fast forms."""

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
        step: (memory, inputs of one position, (B, ...) each) -> (next memory, y).
        inputs: (B, T, ...); None for an omitted input.
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
    """Definition: (memory, inputs of one position) -> (next memory, y)."""
    scan: Callable[..., tuple[Tensor, Any]]
    """(inputs, memory before them or None for zeros, backend) -> (y, last memory). The last memory is None if none was
    given or if the given one was updated in place."""
    prepare: Callable[..., tuple[Tensor | None, ...]] = lambda *inputs: inputs
    """Convert the inputs to those of the steps, (B, T, ...) too."""
    is_wide: bool = False
    """True if y stays in the memory's dtype instead of the value's."""
    packed: Callable[..., tuple[Tensor, Any]] | None = None
    """`scan` by our kernels, from a mixer, packed query, key and value, the signals and the memory."""
    backends: Any = None
    """Its table, a `Backends`."""

    def define(self, *inputs: Any) -> tuple[Tensor, Any]:
        """Compute y and the last memory by the definition. The last input is the memory before them."""
        *inputs_BT, memory = inputs
        y, memory = by_position(self.step, memory, *self.prepare(*inputs_BT))
        return (y if self.is_wide else y.to(inputs_BT[2].dtype)), memory
