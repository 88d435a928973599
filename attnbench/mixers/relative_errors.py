"""Relative errors |a - b| / |b| of what a backend computed, a, against the definition, b: the whole, the worst single
position, the gradient of a parameter.

Each takes r as well, what rounding makes of the definition: a difference of up to ROUNDING_FACTOR |r - b| is then none.
"""

import math
from collections.abc import Iterable

from torch import Tensor

SMALLEST_MATRIX, SMALLEST_VECTOR = 0.1, 0.01
"""Smallest norms that a parameter's gradient is measured by, as shares of `possible_norm`: a smaller gradient is mostly
rounding. Terms of a vector cancel more. At a single position, where a norm or a softmax leaves nothing of query and
key, matrices are measured by the whole of it."""

ROUNDING_FACTOR = 3.0
"""Multiple of what rounding makes of the definition that is no error: that is one draw, and a backend rounds at more
places."""


def position_error(actual_BTD: Tensor, expected_BTD: Tensor, rounded_BTD: Tensor | None = None) -> float:
    """Return the worst relative error of a single position."""
    difference_BT = difference(actual_BTD, expected_BTD, rounded_BTD, -1)
    error_BT = difference_BT / expected_BTD.double().norm(dim=-1)
    return float(error_BT.where(difference_BT != 0, 0.0).max())


def difference(actual: Tensor, expected: Tensor, rounded: Tensor | None = None, dim: int | None = None) -> Tensor:
    """Return |a - b| in float64, over all axes or one; 0 up to ROUNDING_FACTOR |r - b| where there is an r."""
    apart = (actual.double() - expected.double()).norm(dim=dim)
    if rounded is None:
        return apart
    # One that is no number excuses nothing.
    rounding = (rounded.double() - expected.double()).norm(dim=dim).nan_to_num(0.0, 0.0)
    return apart.where(~(apart <= ROUNDING_FACTOR * rounding), 0.0)


def possible_norm(size: int, gradients: Iterable[Tensor]) -> float:
    """Return the norm of a gradient of `size` numbers as large as those of the largest of these gradients."""
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
    """Return the worst relative error of a gradient, a matrix taken apart into the rows of each head.

    Query, key and value often share one matrix, and an error in a small part of it would not show in the whole.

    Args:
        terms: see Computed.parameter_terms; the scale of a vector's error. The gradients of two sequences may cancel
            and leave no more than the rounding of either.
        possible: see `possible_norm`; the scale where the gradient is 0 by definition, as a decay's at a single
            position, and a share of it where it is nearly 0: a sum that comes to 0 leaves some rounding.
        least: that share, of a matrix.
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
    """Return |a - b| / |b| in float64; nothing from nothing, as a decay's gradient at a single position, is 0.

    Args:
        smallest: least value of |b|.
        rounded: see `difference`.
    """
    apart = float(difference(actual, expected, rounded))
    scale = max(float(expected.double().norm()), smallest)
    if scale == 0 and apart > 0:
        return math.inf
    return apart / (scale or 1.0)


def worst(errors: Iterable[float]) -> float:
    """Return the largest; a NaN, which compares as no larger than anything, is the worst of all."""
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values)
