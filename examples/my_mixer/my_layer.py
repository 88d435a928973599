"""A sequence mixer of one's own: a gate times the mean of all positions so far.

Names carry their dimensions: B sequences, T positions, D channels.
"""

import torch
from torch import nn


class MyLayer(nn.Module):
    """Maps (B, T, D) to (B, T, D); position t of the output depends on positions 0 to t of the input alone.

    Args:
        dim: D, the width of the model.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        count_T1 = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)[:, None]
        mean_BTD = self.value(x_BTD).cumsum(1) / count_T1
        return self.out(torch.sigmoid(self.gate(x_BTD)) * mean_BTD)
