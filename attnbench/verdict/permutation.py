"""Permutation test of the difference of two means."""

import math
from collections.abc import Sequence
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
    if (num_splits := math.comb(len(scores), num)) <= MAX_SPLITS:
        chosen = chain.from_iterable(combinations(range(len(scores)), num))
        sums = scores[np.fromiter(chosen, int, num_splits * num).reshape(num_splits, num)].sum(1)
        return float(np.mean(sums >= least))
    rng = np.random.default_rng(0)
    sums = rng.permuted(np.tile(scores, (MAX_SPLITS - 1, 1)), axis=1)[:, :num].sum(1)
    return float((np.count_nonzero(sums >= least) + 1) / MAX_SPLITS)
