"""Relative errors |a - b| / |b| of a backend, a, against the definition, b.

Each may take the rounded definition, r: a difference of up to ROUNDING_FACTOR |r - b| then counts as none.
"""

import math
from collections.abc import Iterable

from torch import Tensor

SMALLEST_MATRIX, SMALLEST_VECTOR = 0.1, 0.01
"""Smallest scale of a parameter's gradient, as a share of `possible_norm`: a smaller gradient is mostly rounding. Terms
of a vector cancel more. At a single position a norm or a softmax leaves nothing of query and key, so that matrices take
the whole of it."""

ROUNDING_FACTOR = 3.0
"""Multiple of the definition's rounding that is no error: rounding is a random draw, and a backend rounds at more
places."""


def position_error(actual_BTD: Tensor, expected_BTD: Tensor, rounded_BTD: Tensor | None = None) -> float:
    difference_BT = difference(actual_BTD, expected_BTD, rounded_BTD, -1)
    error_BT = difference_BT / expected_BTD.double().norm(dim=-1)
    return float(error_BT.where(difference_BT != 0, 0.0).max())


def difference(actual: Tensor, expected: Tensor, rounded: Tensor | None = None, dim: int | None = None) -> Tensor:
    """Return |a - b| in float64, over all axes or one; 0 up to ROUNDING_FACTOR |r - b|."""
    apart = (actual.double() - expected.double()).norm(dim=dim)
    if rounded is None:
        return apart
    # A NaN excuses nothing.
    rounding = (rounded.double() - expected.double()).norm(dim=dim).nan_to_num(0.0, 0.0)
    return apart.where(~(apart <= ROUNDING_FACTOR * rounding), 0.0)


def possible_norm(size: int, gradients: Iterable[Tensor]) -> float:
    """Return the norm of `size` numbers as large as those of the largest of these gradients."""
    norm, largest = max((float(gradient.double().norm()), gradient.numel()) for gradient in gradients)
    return norm * math.sqrt(size / largest)


def parameter_error(
    actual: Tensor,
    expected: Tensor,
    terms: float,
    possible: float,
    head_width: int,
    least: float = SMALLEST_MATRIX,
    rounded: Tensor | None = None,
) -> float:
    """Return the worst relative error of a gradient, a matrix split into the rows of each head: query, key and value
    often share one matrix, and an error in a small part would not show in the whole.

    Args:
        terms: see Computed.parameter_terms; scale of a vector's error: two sequences may cancel to rounding.
        possible: see `possible_norm`; scale of a gradient that is 0 by definition, as a decay's at one position.
        least: smallest scale of a matrix, as a share of `possible`.
    """
    if not expected.any():
        return relative_error(actual, expected, possible, rounded)
    if expected.dim() < 2:
        return relative_error(actual, expected, max(terms, SMALLEST_VECTOR * possible), rounded)
    smallest = max(SMALLEST_MATRIX * float(expected.double().norm()), least * possible)
    gradients = (actual, expected) if rounded is None else (actual, expected, rounded)
    parts = zip(*(gradient.split(head_width) for gradient in gradients), strict=True)
    return worst([relative_error(part, other, smallest, *excuse) for part, other, *excuse in parts])


def relative_error(actual: Tensor, expected: Tensor, smallest: float = 0.0, rounded: Tensor | None = None) -> float:
    apart = float(difference(actual, expected, rounded))
    scale = max(float(expected.double().norm()), smallest)
    if scale == 0 and apart > 0:
        return math.inf
    return apart / (scale or 1.0)


def worst(errors: Iterable[float]) -> float:
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values)
