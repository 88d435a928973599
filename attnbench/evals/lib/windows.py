"""Windows of full context: each token with at least half a window before it."""

from collections.abc import Callable

import torch
from torch import Tensor


def full_context(all_N: Tensor, nats: Callable[[int], Tensor], length: int) -> Tensor:
    """Return the nats of every token from half a window on, each in the last half of its window: in turn from `all_N`,
    the nats of consecutive windows, and from windows half a window later, by `nats` of the text from an index on."""
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(len(all_N))[half:]
    full_N, is_shifted_N = all_N[half:].clone(), index_N % length < half
    if is_shifted_N.any():
        full_N[is_shifted_N] = nats(shift)[index_N[is_shifted_N] - shift]
    return full_N


def context_starts(number: int, length: int) -> Tensor:
    """Return where the window of each token of `full_context` begins."""
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(number)[half:]
    shift_N = torch.where(index_N % length < half, shift, 0)
    return (index_N - shift_N) // length * length + shift_N
