"""Tests of the difference of two means whose scores are not paired: a permutation test and Welch's, and both."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, combinations

import numpy as np

from attnbench.verdict.power import TIE

MAX_SPLITS = 100_000
"""Most splits of the scores that are all counted; of more, a fixed random sample of this size."""


def unpaired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the larger one of the one-sided p-values of the permutation test and of Welch's.

    The permutation test is exact if both groups have one distribution, but rejects too often if only their means are
    equal and one spread is larger. Welch's test allows for that, but assumes about normal means. Both must reject.
    """
    return max(permutation_p_value(first, second), welch_p_value(first, second))


def welch_p_value(first: Sequence[float], second: Sequence[float], centre: float = 0.0) -> float:
    """Return Welch's one-sided p-value of the hypothesis that the difference of the means is at most `centre`."""
    from scipy.special import stdtr

    difference, error, freedom = welch(first, second)
    # Scores without a spread are left to the permutation test.
    return float(stdtr(freedom, (centre - difference) / error)) if error else 0.0


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of the means, its standard error, and Welch's degrees of freedom (1 without an error)."""
    parts = [float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else math.inf for scores in (first, second)]
    squares = sum(part**2 / max(len(scores) - 1, 1) for part, scores in zip(parts, (first, second), strict=True))
    freedom = sum(parts) ** 2 / squares if squares and math.isfinite(squares) else 1.0
    return float(np.mean(first) - np.mean(second)), math.sqrt(sum(parts)), freedom


def permutation_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the one-sided p-value of the hypothesis that the mean of `first` is not larger than that of `second`.

    The scores are not paired. The p-value is the share of the splits of all scores into two groups of these sizes whose
    difference of means is at least the observed one; differences that are equal apart from rounding count. A sample of
    the splits includes the observed one, so that the test keeps its level.

    Raises:
        ValueError: a group is empty.
    """
    if not len(first) or not len(second):
        raise ValueError("a permutation test needs scores of both groups")
    scores, num = np.array([*first, *second], dtype=float), len(first)
    # The scores' sum is the same in every split: the first group's sum orders splits as the difference does.
    least = scores[:num].sum() - TIE * np.abs(scores).sum()
    return float(np.mean(splits(num, len(second)) @ scores >= least))


@lru_cache(maxsize=4)
def splits(num_first: int, num_second: int) -> np.ndarray:
    """Return the first group of each split of so many scores, (splits, scores) bool; the observed split comes first."""
    total = num_first + num_second
    if (number := math.comb(total, num_first)) > MAX_SPLITS:
        observed = np.tile(np.arange(total) < num_first, (MAX_SPLITS, 1))
        observed[1:] = np.random.default_rng(0).permuted(observed[1:], axis=1)
        return observed
    chosen = np.fromiter(chain.from_iterable(combinations(range(total), num_first)), int, number * num_first)
    groups = np.zeros((number, total), dtype=bool)
    np.put_along_axis(groups, chosen.reshape(number, num_first), True, axis=1)
    return groups
