import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 32
"""Positions per scan. torch 2.11 splits longer scans over programs if there are fewer than 64 sums per multiprocessor,
and fails: `list indices must be integers or slices, not NoneType`."""


def cumulative_sum(x_BTE: Tensor) -> Tensor:
    """Return x_1 + ... + x_t for every position t, (B, T, ...), in pieces that torch's compiler supports on a GPU."""
    length = x_BTE.shape[1]
    if length <= PIECE:
        return x_BTE.cumsum(1)
    missing = -length % PIECE
    padded = pad(x_BTE, (0, 0) * (x_BTE.dim() - 2) + (0, missing)) if missing else x_BTE
    within_BNPE = padded.unflatten(1, (-1, PIECE)).cumsum(2)
    after_BNE = cumulative_sum(within_BNPE[:, :, -1])
    before_BNE = torch.cat([torch.zeros_like(after_BNE[:, :1]), after_BNE[:, :-1]], dim=1)
    return (within_BNPE + before_BNE[:, :, None]).flatten(1, 2)[:, :length]
