"""Two unpaired samples: Welch's test of their means, and the splits of a permutation test."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, combinations

import numpy as np

MAX_SPLITS = 100_000
"""Most splits of the scores that are all counted; of more, a fixed random sample of this size."""


def welch_p_value(first: Sequence[float], second: Sequence[float], centre: float = 0.0) -> float:
    """One-sided, of the hypothesis that the difference of the means is at most `centre`."""
    from scipy.special import stdtr

    difference, error, freedom = welch(first, second)
    # Scores without a spread are left to the permutation test.
    return float(stdtr(freedom, (centre - difference) / error)) if error else 0.0


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of the means, its standard error, and the degrees of freedom (1 without an error)."""
    parts = [float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else math.inf for scores in (first, second)]
    squares = sum(part**2 / max(len(scores) - 1, 1) for part, scores in zip(parts, (first, second), strict=True))
    freedom = sum(parts) ** 2 / squares if squares and math.isfinite(squares) else 1.0
    return float(np.mean(first) - np.mean(second)), math.sqrt(sum(parts)), freedom


def welch_interval(first: Sequence[float], second: Sequence[float], level: float) -> tuple[float, float]:
    """Return the difference of the means, and half the width of the interval."""
    from scipy.special import stdtrit

    difference, error, freedom = welch(first, second)
    return difference, float(stdtrit(freedom, (1 + level) / 2)) * error


@lru_cache(maxsize=4)
def splits(num_first: int, num_second: int) -> np.ndarray:
    """Return the first group of each split, (splits, scores) bool; the observed split comes first."""
    total = num_first + num_second
    if (number := math.comb(total, num_first)) > MAX_SPLITS:
        observed = np.tile(np.arange(total) < num_first, (MAX_SPLITS, 1))
        observed[1:] = np.random.default_rng(0).permuted(observed[1:], axis=1)
        return observed
    chosen = np.fromiter(chain.from_iterable(combinations(range(total), num_first)), int, number * num_first)
    groups = np.zeros((number, total), dtype=bool)
    np.put_along_axis(groups, chosen.reshape(number, num_first), True, axis=1)
    return groups
