"""Dropout (Srivastava et al., 2014) whose masks are a function of (seed, step, row, layer, branch, index).

They are equal in a stack, in a resumed training, and however a batch is divided. Without keys of its rows a model drops
nothing.
"""

import torch
from torch import Tensor

from attnbench.data.counters import hashed

STREAM = 0x64726F70
"""First counter of all keys, unlike those of synthetic tasks."""

EMBEDDING, MIXER, FEED_FORWARD = 0, 1, 2
"""Branches."""


def row_keys(seed: int, step: int, row_B: Tensor) -> Tensor:
    """Return the key of each row, (B,) int64, by its index in the whole batch, over ranks and micro-batches."""
    return hashed(STREAM, seed, step, row_B)


def layer_keys(key_B: Tensor | None, layer: int) -> Tensor | None:
    """Return the keys of rows in one layer, (B,)."""
    return None if key_B is None else hashed(key_B, layer)


def drop(x_BTD: Tensor, share: float, key_B: Tensor | None, branch: int) -> Tensor:
    """Return x with a share of its elements 0 and the others divided by 1 - share; x itself without keys."""
    if key_B is None or not share:
        return x_BTD
    index_TD = torch.arange(x_BTD[0].numel(), device=x_BTD.device).view(x_BTD.shape[1:])
    # 62 bits, which are never negative.
    uniform_BTD = hashed(hashed(key_B, branch)[:, None, None], index_TD) & (2**62 - 1)
    return torch.where(uniform_BTD >= round(share * 2**62), x_BTD / (1 - share), 0.0)
