"""Tests of a published claim: a figure over seeds with one-sided 95 % bounds, held against a threshold.

PASS: the bound lies on the stated side. FAIL: the opposite bound excludes it. UNDECIDED otherwise. Numbers in, numbers
out; which rows they come from stands in claims.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.results.numbers import ROUNDING, reaches
from attnbench.verdict.power import MAX_SEEDS, POWER, difference_power
from attnbench.verdict.statistics import SIGN_FLIP, subset_sums

PASS, FAIL, UNDECIDED, NOT_RUN = "PASS", "FAIL", "UNDECIDED", "not run"

LEVEL = 0.05
"""Error of each bound, one-sided."""

REACHES, MISSES = 0.7, 0.6
"""Share of seeds that a variant which reaches a threshold has at least, and one that does not has at most."""

NUM_RESAMPLES = 2_000
"""Resamples of the seeds behind the bounds of a figure that has no test of its own."""

Limits = tuple[float, float]
"""Closed range that a claim puts its figure in; infinite where it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure over seeds and its two one-sided bounds."""

    value: float
    low: float
    high: float
    num_seeds: int


def judge(estimate: Estimate, limits: Limits, *, outside: bool = False) -> str:
    """Return PASS, FAIL or UNDECIDED.

    Args:
        outside: the claim is that the figure lies beyond the limits, on either side.
    """
    least, most = limits
    within = reaches(estimate.low, least) and reaches(most, estimate.high)
    beyond = not reaches(estimate.high, least) or not reaches(most, estimate.low)
    holds, fails = (beyond, within) if outside else (within, beyond)
    return PASS if holds else FAIL if fails else UNDECIDED


def judge_all(verdicts: Sequence[str]) -> str:
    """Return the verdict of a finding of several contrasts: all must pass, and one FAIL is FAIL."""
    for verdict in (NOT_RUN, FAIL, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return PASS


def share_of_seeds(scores: Sequence[float], threshold: float) -> Estimate:
    """Share of seeds whose score reaches a threshold, with Clopper and Pearson's bounds."""
    num, count = len(scores), sum(reaches(score, threshold) for score in scores)
    low, high = _share_bounds(count, num)
    return Estimate(value=count / num, low=low, high=high, num_seeds=num)


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean difference of paired accuracies, with the bounds that the sign-flip permutation test does not reject."""
    differences = np.subtract(first, second).tolist()
    low, high = SIGN_FLIP.interval(differences, 1 - 2 * LEVEL, resolution=0.0)
    return Estimate(value=float(np.mean(differences)), low=low, high=high, num_seeds=len(differences))


def ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Ratio of two means of positive numbers, paired.

    A ratio r is rejected where the sign-flip test rejects that first - r second lies about 0. A sum of such differences
    over a subset of the seeds is negative where the ratio of the subset's sums is below r, so the ordered ratios of
    subsets are the interval's ends, as the ordered means are a difference's.
    """
    above, _ = subset_sums(first)
    below, _ = subset_sums(second)
    ratios = np.sort(above[1:] / below[1:])
    rank = math.floor(LEVEL * len(above) * (1 + 1e-12))
    low, high = (float(ratios[rank - 1]), float(ratios[-rank])) if rank else (0.0, math.inf)
    return Estimate(value=float(np.sum(first) / np.sum(second)), low=low, high=high, num_seeds=len(first))


def window(scores: Mapping[float, Sequence[float]], threshold: float) -> Estimate:
    """Decades of learning rates with a mean score of at least `threshold`, gaps left out, by resampling seeds.

    Straight lines over the logarithm of the rate join the means.

    Args:
        scores: of each rate the scores of the same seeds, in order.
    """
    rates = sorted(scores)
    return _resampled(
        np.array([scores[rate] for rate in rates], dtype=float),
        lambda means: _decades(np.log10(rates), means, threshold),
    )


def capacity_correlation(
    scores: Mapping[str, Mapping[int, Sequence[float]]], sizes: Mapping[str, float], threshold: float
) -> Estimate:
    """Rank correlation of size with capacity, the largest load whose mean score is at least `threshold`.

    Args:
        scores: by model and load (number of pairs) the scores of the same seeds, in order; every model has every load.
        sizes: of each model, in bytes of state.
    """
    from scipy.stats import spearmanr

    names, loads = list(scores), sorted(next(iter(scores.values())))
    values = np.array([[scores[name][load] for load in loads] for name in names], dtype=float)

    def correlation(means: np.ndarray) -> float:
        held = [
            max((load for load, ok in zip(loads, row, strict=True) if ok), default=0)
            for row in means >= threshold - ROUNDING
        ]
        # Models that all hold as much say nothing about size.
        constant = len(set(held)) == 1
        return 0.0 if constant else float(spearmanr([sizes[name] for name in names], held)[0])  # pyright: ignore[reportArgumentType]

    return _resampled(values, correlation)


def seeds_needed(estimate: Estimate, limits: Limits, *, is_share: bool) -> int | None:
    """Number of seeds that decide with a probability of 0.8 if the figure is what it seems; None: more than 100.

    Args:
        is_share: the figure is a share of seeds; otherwise Student's power for the distance to the nearer limit, at
            the spread from seed to seed that the width of the bounds says.
    """
    num_seeds = range(estimate.num_seeds + 1, MAX_SEEDS + 1)
    if is_share:
        return next((num for num in num_seeds if _share_power(estimate, limits, num) >= POWER), None)
    effect = min(abs(estimate.value - limit) for limit in limits if math.isfinite(limit))
    width = estimate.high - estimate.low
    if not effect or not 0 < width < math.inf:
        return None
    spread = width / (2 * 1.645) * math.sqrt(estimate.num_seeds)
    # Of fewer than five pairs a permutation test rejects nothing at this level.
    return next((n for n in num_seeds if n >= 5 and difference_power(effect, spread, 2 * LEVEL, n) >= POWER), None)


def _share_power(estimate: Estimate, limits: Limits, num: int) -> float:
    """Probability that as many seeds in all decide, if those to come reach the threshold as often as those before."""
    from scipy.stats import binom

    # Half a seed on either side: a share of 0 or 1 among a few seeds is none among all.
    share = (estimate.value * estimate.num_seeds + 0.5) / (estimate.num_seeds + 1)
    there, more = round(estimate.value * estimate.num_seeds), num - estimate.num_seeds
    decided = 0.0
    for count in range(more + 1):
        low, high = _share_bounds(there + count, num)
        guess = Estimate(value=(there + count) / num, low=low, high=high, num_seeds=num)
        if judge(guess, limits) != UNDECIDED:
            decided += float(binom.pmf(count, more, share))
    return decided


def _share_bounds(count: int, num: int) -> tuple[float, float]:
    from scipy.stats import beta

    low = float(beta.ppf(LEVEL, count, num - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - LEVEL, count + 1, num - count)) if count < num else 1.0
    return low, high


def _decades(places: np.ndarray, means: np.ndarray, threshold: float) -> float:
    total = 0.0
    for index in range(len(places) - 1):
        (left, right), width = means[index : index + 2], places[index + 1] - places[index]
        if reaches(min(left, right), threshold):
            total += width
        elif reaches(max(left, right), threshold):
            total += width * (max(left, right) - threshold) / abs(right - left)
    return float(total)


def _resampled(values: np.ndarray, figure) -> Estimate:
    """Figure of means over the last axis, the seeds, with the percentiles of its resamples for bounds."""
    rng, num_seeds = np.random.default_rng(0), values.shape[-1]
    chosen = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    resamples = [figure(values[..., indices].mean(-1)) for indices in chosen]
    low, high = np.quantile(resamples, [LEVEL, 1 - LEVEL])
    return Estimate(value=figure(values.mean(-1)), low=float(low), high=float(high), num_seeds=num_seeds)
