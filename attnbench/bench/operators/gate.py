"""The gate before every timing: attention and its gradients compared with float64. Beyond the precision a cell is
failed."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnbench.correctness.checks import build_mixer
from attnbench.mixers.definition import PART_FACTOR, TOLERANCES, Case, deviation
from attnbench.mixers.relative_errors import relative_error, worst
from attnbench.settings.schema import MixerSettings

MAX_WEIGHTS = 2**30
"""Attention weights of all compared heads; one or two heads may have more."""

MAX_WEIGHTS_AT_A_TIME = 2**25

PARTS = ("output", "query's gradient", "key's gradient", "value's gradient")


def affordable_heads(length: int) -> int:
    """Return the number of heads of this many positions that can be compared."""
    return max(2, MAX_WEIGHTS // length**2)


def compared_heads(num_heads: int, most: int) -> list[int]:
    """Choose at most so many heads over all sequences, the first and the last among them."""
    count = min(num_heads, most)
    return sorted({round(index * (num_heads - 1) / max(1, count - 1)) for index in range(count)})


def reference(
    query_BTK: Tensor, key_BTK: Tensor, value_BTK: Tensor, gradient_BTK: Tensor | None, causal: bool
) -> list[Tensor]:
    """Compute output and gradients in float64, B counting heads, a few queries at a time."""
    B, T, K = query_BTK.shape
    has_gradient = gradient_BTK is not None
    inputs = [x.detach().double().requires_grad_(has_gradient) for x in (query_BTK, key_BTK, value_BTK)]
    query_BTK, key_BTK, value_BTK = inputs
    outputs, gradients = [], [torch.zeros_like(x) for x in inputs] if has_gradient else []
    step = max(1, MAX_WEIGHTS_AT_A_TIME // (B * T))
    for first in range(0, T, step):
        rows = slice(first, min(T, first + step))
        score_BTS = query_BTK[:, rows] @ key_BTK.mT * K**-0.5
        if causal:
            position_T = torch.arange(rows.start, rows.stop, device=query_BTK.device)
            unseen_TS = torch.arange(T, device=query_BTK.device) > position_T[:, None]
            score_BTS = score_BTS.masked_fill(unseen_TS, -math.inf)
        output_BTK = score_BTS.softmax(-1) @ value_BTK
        outputs.append(output_BTK.detach())
        if gradient_BTK is not None:
            parts = torch.autograd.grad(output_BTK, inputs, gradient_BTK[:, rows].double())
            for whole, part in zip(gradients, parts, strict=True):
                whole += part
    return [torch.cat(outputs, dim=1), *gradients]


class GateError(Exception): ...


def largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor], precision: str) -> float:
    """Return the largest of the relative errors of an output and its gradients, each (B, T, K). Raises GateError if one
    of them, or that of a single position, is beyond the precision."""
    tolerance, largest = TOLERANCES[precision], 0.0
    for part, computed, exact in zip(PARTS, actual, expected, strict=False):
        whole, row = relative_error(computed, exact), _row_error(computed, exact)
        # Written so that a NaN fails.
        if not whole <= tolerance:
            raise GateError(f"{part} is off by {whole:.2g}, and {precision} explains {tolerance:g}")
        if not row <= PART_FACTOR * tolerance:
            allowed = f"{precision} explains {PART_FACTOR * tolerance:g}"
            raise GateError(f"{part} is off by {row:.2g} at one position, and {allowed}")
        largest = max(largest, whole)
    return largest


def _row_error(actual_BTK: Tensor, expected_BTK: Tensor) -> float:
    """Return the worst error of a position of a head, relative to the typical size or its own, whichever is larger."""
    if not expected_BTK.any():
        return relative_error(actual_BTK, expected_BTK)
    size_BT = expected_BTK.double().norm(dim=-1)
    typical = size_BT.square().mean().sqrt()
    difference_BT = (actual_BTK.double() - expected_BTK.double()).norm(dim=-1)
    error_BT = difference_BT / size_BT.clamp_min(typical)
    return worst([float(error_BT.max())])


MIXER_LENGTH = 133
"""Positions of the layer that is compared with its definition: past two chunks, with a ragged end."""


def mixer_error(mixer: MixerSettings, head_width: int, device: torch.device, precision: str) -> float:
    """Return the larger relative error of a small layer's output and input gradient; raise GateError if beyond the
    precision.

    At another head width than the timed model's other kernels may run.
    """
    case = Case(name="as timed", head_width=head_width)
    layer = build_mixer(mixer, device, case)
    held = deviation(layer, MIXER_LENGTH, precision, case)
    if not held.is_within(TOLERANCES[precision] * case.slack):
        raise GateError(f"its layer is not its definition: {held}")
    return max(held.output, held.input_gradient)
