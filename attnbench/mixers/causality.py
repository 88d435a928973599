"""Search for later positions in a mixer's outputs, before it is trained."""

from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from attnbench.machine.precision import computing, dtype_of
from attnbench.mixers.base import Mixer, ReturnError, checked_return
from attnbench.mixers.definition import example
from attnbench.settings.errors import UserError
from attnbench.settings.registry import class_named, is_own
from attnbench.settings.schema import MixerSettings

POSITIONS = (0, 63, 64, 100)
"""Positions whose outputs are checked for later inputs."""

LONGEST_CHECK = 256
"""Largest number of positions that are checked before a training."""

AVERAGING_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

LEAK = {"float32": 1e-5, "tf32": 1e-2, "bfloat16": 3e-2}
"""Share of a gradient or an output that may leak, by precision, in a mixer from outside attnbench: a convolution by
Fourier transform rounds, as does subtracting a maximum."""


def seen_of_the_future(
    mixer: Mixer, dim: int, length: int, precision: str = "float32", *, is_exact: bool = False
) -> str:
    """Describe the later positions that an output depends on, or return an empty string. Raises ReturnError.

    `is_exact` allows no rounding, such as that of a sum from which a later position is subtracted.
    """
    x_BTD = input_of(mixer, length, dim)
    x_BTD.requires_grad_()
    positions = [position for position in (*POSITIONS, length // 2) if position < length - 1]
    leak = 0.0 if is_exact else LEAK[precision]
    norms = {type(part).__name__ for part in mixer.modules() if isinstance(part, AVERAGING_NORMS)}
    why = f" ({', '.join(sorted(norms))}: averages over positions; nn.LayerNorm and nn.RMSNorm do not)" if norms else ""
    with computing(precision, x_BTD.device):
        y_BTD, _ = checked_return(mixer(_narrowed(x_BTD, precision)), x_BTD)
        if not y_BTD.isfinite().all():
            raise ReturnError("its output for random numbers is not finite; divide by what may be 0 with care")
        if not y_BTD.requires_grad:
            raise ReturnError("its output has no gradient, so that it cannot be trained; remove no_grad or detach")
        if not y_BTD.any():
            mixer = woken(mixer)
            y_BTD, _ = mixer(_narrowed(x_BTD, precision))
        with torch.no_grad():
            apart = largest_difference(mixer(_narrowed(x_BTD, precision))[0], y_BTD)
        if apart > LEAK[precision]:
            raise ReturnError(
                f"two passes over one input differ by {apart:.1e}; remove random numbers such as Dropout from the "
                "layer (model.dropout sets dropout of the model, for all variants alike)"
            )
        for position in positions:
            gradient_BTD = gradient_in(y_BTD[:, position], x_BTD)
            share_T = gradient_BTD.norm(dim=(0, 2)) / gradient_BTD.norm()
            ahead_T = share_T[position + 1 :]
            if ahead_T.norm() > leak:
                most = position + 1 + int(ahead_T.argmax())
                return f"position {position} sees position {most}: {ahead_T.norm():.1e} of its gradient lies ahead{why}"
        with torch.no_grad():
            # An operation without a gradient, as argmax or detach, shows in the output alone.
            for position in positions:
                changed_BTD = torch.cat([x_BTD[:, : position + 1], -3 * x_BTD[:, position + 1 :]], dim=1)
                other_BTD, _ = mixer(_narrowed(changed_BTD, precision))
                error = largest_difference(other_BTD[:, : position + 1], y_BTD[:, : position + 1])
                # Outputs that are not finite say nothing about the future.
                allowed = leak if is_exact else max(leak, torch.finfo(y_BTD.dtype).eps)
                if not error <= allowed and y_BTD.isfinite().all():
                    return f"outputs up to position {position} change by {error:.1e} where only later inputs do{why}"
    return ""


def check_causality(
    mixers: Sequence[MixerSettings], layers: Iterable[Mixer], dim: int, seq_len: int, precision: str
) -> None:
    """Raise UserError if a mixer from outside attnbench sees the future or does not return (y, state)."""
    for settings, mixer in zip(mixers, layers, strict=True):
        if is_own(class_named(settings)):
            continue
        try:
            seen = seen_of_the_future(mixer, dim, min(seq_len, LONGEST_CHECK), precision)
        except ReturnError as error:
            raise UserError(f"attn={settings.name}: {error}") from error
        if seen:
            raise UserError(
                f"attn={settings.name}: {seen}, so that a model reads what it shall predict; it is not trained. "
                f"`attnbench doctor --config-dir ... 'mixers=[{settings.name}]'` runs the whole contract"
            )


def woken(mixer: Mixer) -> Mixer:
    """Return a copy with random numbers for weights that are all 0: nothing is seen through a gate that begins
    closed."""
    mixer, generator = deepcopy(mixer), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return mixer


def input_of(mixer: Mixer, length: int, dim: int) -> Tensor:
    weight = next(mixer.parameters())
    return example(length, dim, weight.device)[0].to(weight.dtype)


def gradient_in(output: Tensor, x_BTD: Tensor) -> Tensor:
    return torch.autograd.grad(output.square().sum(), x_BTD, retain_graph=True, materialize_grads=True)[0]


def differences(actual_BTD: Tensor, expected_BTD: Tensor) -> Tensor:
    """Return the largest difference at each position, as a share of the largest entry."""
    difference_T = (actual_BTD.double() - expected_BTD.double()).abs().amax(dim=(0, 2))
    return torch.where(difference_T == 0, 0.0, difference_T / expected_BTD.double().abs().max())


def largest_difference(actual_BTD: Tensor, expected_BTD: Tensor) -> float:
    return float(differences(actual_BTD.detach(), expected_BTD.detach()).max())


def _narrowed(x_BTD: Tensor, precision: str) -> Tensor:
    dtype = dtype_of(precision)
    return x_BTD if dtype == torch.float32 else x_BTD.to(dtype)
