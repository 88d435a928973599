"""Rotary positions (Su et al., 2021): each pair of channels of a query and of a key turned by an angle that grows with
the position, so that their product depends on how far apart they are.

    channels (2i, 2i + 1) of position t, turned by t × theta^(-2i/K)
"""

import torch
from torch import Tensor

from attnbench.machine.device import on_kernels
from attnbench.ops.common.precision import at_least_float32


def rotation(length: int, width: int, position: Tensor | int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin of the angles by which `rotate` turns channel pair i of position t, t × theta^(-2i/K): (2, T,
    K/2).

    Args:
        position: that of the first of the T positions; a tensor stays on the device.
    """
    # In float32: in bfloat16 neighbouring positions would fall together.
    position_T = (torch.arange(length, device=device) + position).float()
    # Uncompiled without the operator, whose first call loads the compiler, which takes more than a second.
    return (_rotation if torch.compiler.is_compiling() else _angles)(position_T, width, theta)


def _angles(position_T: Tensor, width: int, theta: float) -> Tensor:
    exponent = torch.arange(0, width, 2, device=position_T.device, dtype=torch.float32) / width
    angle_TK = position_T[:, None] * theta**-exponent
    return torch.stack([angle_TK.cos(), angle_TK.sin()])


_rotation = torch.library.custom_op("attnbench::rotation", _angles, mutates_args=())
"""An operator, because the compiler would otherwise take cosines anew for every head and sequence it rotates."""


@_rotation.register_fake
def _(position_T: Tensor, width: int, theta: float) -> Tensor:
    return position_T.new_empty(2, len(position_T), (width + 1) // 2)


def rotate(x_BTHK: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: turns each pair of channels (2i, 2i + 1) by its angle (Su et al., 2021)."""
    cos, sin = rotation[:, :, None]
    pairs = at_least_float32(x_BTHK).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # Inductor generates no complex arithmetic. Written by flips, not by stacking first and second channels, its
        # kernels read and write neighbouring addresses, backward too.
        sign = torch.arange(-1, 2, 2, device=x_BTHK.device)
        turned = pairs * cos[..., None] + pairs.flip(-1) * (sin[..., None] * sign)
    else:
        # The same as one complex product: a single pass over the memory. Beside values of an odd number of channels
        # pairs lie where no complex number can.
        if any(stride % 2 for stride in pairs.stride()[:-1]):
            pairs = pairs.contiguous()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return turned.flatten(-2).to(x_BTHK.dtype)


def rotate_both(query_BTHK: Tensor, key_BTHK: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn query and key alike; None leaves both as they are."""
    if rotation is None:
        return query_BTHK, key_BTHK
    return rotate(query_BTHK, rotation), rotate(key_BTHK, rotation)


def turn(x_BTHK: Tensor, angle_BTHA: Tensor) -> Tensor:
    """Turn channel pairs (2i, 2i + 1), the first A of a head, each by an angle of its own position, sequence and head,
    and leave the channels after them."""
    cos, sin = angle_BTHA.cos(), angle_BTHA.sin()
    turned, kept = x_BTHK.split([2 * angle_BTHA.shape[-1], x_BTHK.shape[-1] - 2 * angle_BTHA.shape[-1]], dim=-1)
    first, second = at_least_float32(turned).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
    return torch.cat([turned.to(x_BTHK.dtype), kept], dim=-1)


def rotate_packed(packed_BTC: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
    """Turn the first `num_heads` heads of what a projection made, (B, T, C), and leave the channels after them: query
    and key where they lie before the value, for a kernel that reads the three side by side."""
    if on_kernels(packed_BTC):
        from attnbench.ops.layers.triton.rotary_kernels import turn_packed

        return turn_packed(packed_BTC, rotation, num_heads, False)
    width = 2 * num_heads * rotation.shape[-1]
    turned_BTHK = rotate(packed_BTC[..., :width].unflatten(-1, (num_heads, -1)), rotation)
    return torch.cat([turned_BTHK.flatten(2), packed_BTC[..., width:]], dim=-1)
