"""Permutation test of the difference of two means."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, combinations

import numpy as np

from attnbench.verdict.power import TIE

MAX_SPLITS = 100_000
"""Most splits of the scores that are all counted; of more, a fixed random sample of this size."""


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
