"""Rotary positions (Su et al., 2021): channel pairs of query and key are rotated by an angle proportional to the
position.

    channels (2i, 2i + 1) of position t, turned by t × theta^(-2i/K)
"""

import torch
from torch import Tensor

from attnbench.machine.device import on_kernels
from attnbench.ops.common.precision import at_least_float32


def rotation(length: int, width: int, position: Tensor | int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin of the angles t × theta^(-2i/K): (2, T, K/2), from `position` on; a tensor stays on the
    device."""
    # In float32: neighbouring positions coincide in bfloat16.
    position_T = (torch.arange(length, device=device) + position).float()
    # Without the operator if uncompiled: its first call loads the compiler, which takes over a second.
    return (_rotation if torch.compiler.is_compiling() else _angles)(position_T, width, theta)


def _angles(position_T: Tensor, width: int, theta: float) -> Tensor:
    exponent = torch.arange(0, width, 2, device=position_T.device, dtype=torch.float32) / width
    angle_TK = position_T[:, None] * theta**-exponent
    return torch.stack([angle_TK.cos(), angle_TK.sin()])


_rotation = torch.library.custom_op("attnbench::rotation", _angles, mutates_args=())
"""An operator, because the compiler would otherwise recompute cosines for every head and sequence."""


@_rotation.register_fake
def _(position_T: Tensor, width: int, theta: float) -> Tensor:
    return position_T.new_empty(2, len(position_T), (width + 1) // 2)


def rotate(x_BTHK: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation[:, :, None]
    pairs = at_least_float32(x_BTHK).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # Inductor has no complex arithmetic. With flips instead of stacked channels its kernels access neighbouring
        # addresses, backward too.
        sign = torch.arange(-1, 2, 2, device=x_BTHK.device)
        turned = pairs * cos[..., None] + pairs.flip(-1) * (sin[..., None] * sign)
    else:
        # One complex product, a single pass over the memory. Behind values with an odd number of channels pairs are not
        # aligned for complex numbers.
        if any(stride % 2 for stride in pairs.stride()[:-1]):
            pairs = pairs.contiguous()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return turned.flatten(-2).to(x_BTHK.dtype)


def rotate_both(query_BTHK: Tensor, key_BTHK: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor]:
    if rotation is None:
        return query_BTHK, key_BTHK
    return rotate(query_BTHK, rotation), rotate(key_BTHK, rotation)


def turn(x_BTHK: Tensor, angle_BTHA: Tensor) -> Tensor:
    """Rotate the first A channel pairs (2i, 2i + 1) of a head, each by an angle per position, sequence and head."""
    cos, sin = angle_BTHA.cos(), angle_BTHA.sin()
    turned, kept = x_BTHK.split([2 * angle_BTHA.shape[-1], x_BTHK.shape[-1] - 2 * angle_BTHA.shape[-1]], dim=-1)
    first, second = at_least_float32(turned).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
    return torch.cat([turned.to(x_BTHK.dtype), kept], dim=-1)


def rotate_packed(packed_BTC: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
    """Rotate the first `num_heads` heads of a packed projection (B, T, C)."""
    if on_kernels(packed_BTC):
        from attnbench.ops.layers.triton.rotary_kernels import turn_packed

        return turn_packed(packed_BTC, rotation, num_heads, False)
    width = 2 * num_heads * rotation.shape[-1]
    turned_BTHK = rotate(packed_BTC[..., :width].unflatten(-1, (num_heads, -1)), rotation)
    return torch.cat([turned_BTHK.flatten(2), packed_BTC[..., width:]], dim=-1)
