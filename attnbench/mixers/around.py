"""Parts around the mixing, each an option of `Shell`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.layers import LowRank, Projection, RMSNorm, ShortConvolution
from attnbench.ops.layers.rotary import rotation
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError

Gate = Literal["none", "silu", "sigmoid"]

PARTS = ("q", "k", "v")
"""Query, key and value."""


class QueryKeyValue(nn.Module):
    """One projection to query, key and value of the given total widths, a short convolution, and SiLU.

    Args:
        conv_on: which of them the convolution acts on, "q", "k" and "v"; None: all three.
    """

    def __init__(
        self,
        dim: int,
        query_width: int,
        key_width: int,
        value_width: int,
        *,
        conv_size: int,
        activation: bool = False,
        conv_on: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.widths = [query_width, key_width, value_width]
        self.projection = Projection(dim, sum(self.widths))
        self.is_convolved = [conv_on is None or name in conv_on for name in PARTS]
        channels = sum(width for width, is_on in zip(self.widths, self.is_convolved, strict=True) if is_on)
        self.convolution = ShortConvolution(channels, conv_size) if conv_size else None
        self.activation = activation

    def forward(
        self, x_BTD: Tensor | Sequence[Tensor], history_BWC: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (B, T, width) each, from one input or from one for each."""
        query, key, value = self.packed(x_BTD, history_BWC).split(self.widths, dim=-1)
        return query, key, value

    def packed(self, x_BTD: Tensor | Sequence[Tensor], history_BWC: Tensor | None = None) -> Tensor:
        if isinstance(x_BTD, Tensor):
            mixed = self.projection(x_BTD)
        else:
            pairs = zip(x_BTD, self.projection.weight.split(self.widths), strict=True)
            mixed = torch.cat([F.linear(part_BTD, weight) for part_BTD, weight in pairs], dim=-1)
        if self.convolution is None:
            return F.silu(mixed) if self.activation else mixed
        if all(self.is_convolved):
            return self.convolution(mixed, history_BWC, activation=self.activation)
        parts = list(mixed.split(self.widths, dim=-1))
        chosen = [index for index, is_on in enumerate(self.is_convolved) if is_on]
        convolved = self.convolution(torch.cat([parts[index] for index in chosen], dim=-1), history_BWC)
        for index, part in zip(chosen, convolved.split([self.widths[it] for it in chosen], dim=-1), strict=True):
            parts[index] = part
        mixed = torch.cat(parts, dim=-1)
        return F.silu(mixed) if self.activation else mixed

    def init_history(self, batch_size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, (B, W, C); W = 0 without a convolution."""
        taps = self.convolution.size - 1 if self.convolution is not None else 0
        channels = len(self.convolution.weight) if self.convolution is not None else sum(self.widths)
        return torch.zeros(batch_size, taps, channels, dtype=dtype, device=self.projection.weight.device)


def head_norm(width: int, is_on: bool, eps: float = 1e-6) -> nn.Module:
    return RMSNorm(width, eps) if is_on else nn.Identity()


class RotaryPositions(nn.Module):
    """Angles of rotary positions (Su et al., 2021) for heads of `width` channels; theta=None: no positions."""

    def __init__(self, width: int, theta: float | None) -> None:
        super().__init__()
        self.width, self.theta = width, theta
        if theta is not None and (theta <= 0 or width % 2):
            raise UserError(
                f"attn.rotary_theta={theta}, head_width={width}: rotary positions need a base above 0 and an even head "
                "width; attn.rotary_theta=null leaves them out"
            )

    def forward(self, x_BTD: Tensor, position: Tensor | int) -> Tensor | None:
        """Return cos and sin of T positions from `position` on, (2, T, K/2)."""
        if self.theta is None:
            return None
        return rotation(x_BTD.shape[1], self.width, position, self.theta, x_BTD.device)

    def init_position(self, device: torch.device) -> Tensor:
        """Return zero, int64; of length zero without rotary positions."""
        return torch.zeros(() if self.theta is not None else 0, dtype=torch.int64, device=device)


class GatedOutput(nn.Module):
    """An optional gate, y × silu(gate(x)) or y × sigmoid(gate(x)), of rank `gate_rank`, and the projection to D."""

    def __init__(self, dim: int, width: int, *, gate: Gate, gate_rank: int | None = None) -> None:
        super().__init__()
        check_value("attn.output_gate", gate, choices=get_args(Gate))
        self.activation = torch.sigmoid if gate == "sigmoid" else F.silu
        self.gate: nn.Module | None = None
        if gate != "none":
            is_full = gate_rank is None
            self.gate = Projection(dim, width) if is_full else LowRank(dim, gate_rank, width, setting="gate_rank")
        self.projection = Projection(width, dim, residual=True)

    def forward(self, y_BTC: Tensor, x_BTD: Tensor) -> Tensor:
        if self.gate is not None:
            y_BTC = y_BTC * self.activation(self.gate(x_BTD))
        return self.projection(y_BTC)


def by_heads(parts: Iterable[Tensor], width: int) -> list[Tensor]:
    """Split channels (B, T, H × width) into heads, (B, T, H, width)."""
    return [part.unflatten(-1, (-1, width)) for part in parts]
