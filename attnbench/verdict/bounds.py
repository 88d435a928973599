"""Tests of a published claim: a figure over seeds with one-sided 95 % bounds, compared with a threshold.

PASS: the bound is on the claimed side. FAIL: the opposite bound excludes the claim. UNDECIDED otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.results.numbers import ROUNDING, reaches
from attnbench.verdict.power import MAX_SEEDS, POWER, difference_power
from attnbench.verdict.statistics import SIGN_FLIP, share_interval, subset_sums

PASS, FAIL, UNDECIDED, NOT_RUN = "PASS", "FAIL", "UNDECIDED", "not run"

LEVEL = 0.05

REACHES, MISSES = 0.7, 0.6
"""Least share of seeds of a variant that reaches a threshold, and largest share of one that does not."""

NUM_RESAMPLES = 2_000
"""Resamples of the seeds for bounds of figures without a test."""

Limits = tuple[float, float]
"""Closed range of the claim; infinite on an open side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    value: float
    low: float
    high: float
    num_seeds: int


def judge(estimate: Estimate, limits: Limits, *, outside: bool = False) -> str:
    """Return PASS, FAIL or UNDECIDED; `outside`: the claim is that the figure is outside the limits, on either side."""
    least, most = limits
    within = reaches(estimate.low, least) and reaches(most, estimate.high)
    beyond = not reaches(estimate.high, least) or not reaches(most, estimate.low)
    holds, fails = (beyond, within) if outside else (within, beyond)
    return PASS if holds else FAIL if fails else UNDECIDED


def judge_all(verdicts: Sequence[str]) -> str:
    for verdict in (NOT_RUN, FAIL, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return PASS


def share_of_seeds(scores: Sequence[float], threshold: float) -> Estimate:
    """Return the share of scores >= threshold, with Clopper-Pearson bounds."""
    num, count = len(scores), sum(reaches(score, threshold) for score in scores)
    low, high = share_interval(count, num, LEVEL)
    return Estimate(value=count / num, low=low, high=high, num_seeds=num)


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean paired difference, with the bounds of the sign-flip permutation test."""
    differences = np.subtract(first, second).tolist()
    low, high = SIGN_FLIP.interval(differences, 1 - 2 * LEVEL, resolution=0.0)
    return Estimate(value=float(np.mean(differences)), low=low, high=high, num_seeds=len(differences))


def ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the ratio of the means of paired positive numbers, with bounds of the sign-flip test.

    The test of first - r second rejects r by subsets of seeds with a negative sum, that is, whose ratio of sums is
    below r: the ordered ratios of subsets are the possible ends of the interval.
    """
    above, _ = subset_sums(tuple(first))
    below, _ = subset_sums(tuple(second))
    ratios = np.sort(above[1:] / below[1:])
    rank = math.floor(LEVEL * len(above) * (1 + 1e-12))
    low, high = (float(ratios[rank - 1]), float(ratios[-rank])) if rank else (0.0, math.inf)
    return Estimate(value=float(np.sum(first) / np.sum(second)), low=low, high=high, num_seeds=len(first))


def window(scores: Mapping[float, Sequence[float]], threshold: float) -> Estimate:
    """Return the decades of learning rates with a mean score >= threshold, interpolated, with bounds from resampled
    seeds.

    `scores` are by rate, of the same seeds in the same order.
    """
    rates = sorted(scores)
    return _resampled(
        np.array([scores[rate] for rate in rates], dtype=float),
        lambda means: _decades(np.log10(rates), means, threshold),
    )


def capacity_correlation(
    scores: Mapping[str, Mapping[int, Sequence[float]]], sizes: Mapping[str, float], threshold: float
) -> Estimate:
    """Return the rank correlation of size with capacity, the largest load whose mean score is >= threshold.

    Args:
        scores: by model and load, of the same seeds in the same order.
        sizes: bytes of state by model.
    """
    from scipy.stats import spearmanr

    names, loads = list(scores), sorted(next(iter(scores.values())))
    values = np.array([[scores[name][load] for load in loads] for name in names], dtype=float)

    def correlation(means: np.ndarray) -> float:
        held = [
            max((load for load, ok in zip(loads, row, strict=True) if ok), default=0)
            for row in means >= threshold - ROUNDING
        ]
        # Equal capacities show no correlation with size.
        constant = len(set(held)) == 1
        return 0.0 if constant else float(spearmanr([sizes[name] for name in names], held)[0])  # pyright: ignore[reportArgumentType]

    return _resampled(values, correlation)


def seeds_needed(estimate: Estimate, limits: Limits, *, is_share: bool) -> int | None:
    """Return the number of seeds that would decide with probability 0.8 if the estimate is true; None: over 100.

    Uses Student's power for the distance to the nearer limit, or the binomial distribution for a share of seeds.
    """
    num_seeds = range(estimate.num_seeds + 1, MAX_SEEDS + 1)
    if is_share:
        return next((num for num in num_seeds if _share_power(estimate, limits, num) >= POWER), None)
    effect = min(abs(estimate.value - limit) for limit in limits if math.isfinite(limit))
    width = estimate.high - estimate.low
    if not effect or not 0 < width < math.inf:
        return None
    spread = width / (2 * 1.645) * math.sqrt(estimate.num_seeds)
    # With fewer than five pairs a permutation test rejects nothing at this level.
    return next((n for n in num_seeds if n >= 5 and difference_power(effect, spread, 2 * LEVEL, n) >= POWER), None)


def _share_power(estimate: Estimate, limits: Limits, num: int) -> float:
    """Return the probability that `num` seeds decide, if new seeds reach the threshold as often as the seeds so far."""
    from scipy.stats import binom

    # Shrunk by half a seed on either side: a few seeds do not show a share of 0 or 1.
    share = (estimate.value * estimate.num_seeds + 0.5) / (estimate.num_seeds + 1)
    there, more = round(estimate.value * estimate.num_seeds), num - estimate.num_seeds
    decided = 0.0
    for count in range(more + 1):
        low, high = share_interval(there + count, num, LEVEL)
        guess = Estimate(value=(there + count) / num, low=low, high=high, num_seeds=num)
        if judge(guess, limits) != UNDECIDED:
            decided += float(binom.pmf(count, more, share))
    return decided


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
    """Apply `figure` to means over the last axis (seeds); bounds are percentiles over resampled seeds."""
    rng, num_seeds = np.random.default_rng(0), values.shape[-1]
    chosen = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    resamples = [figure(values[..., indices].mean(-1)) for indices in chosen]
    low, high = np.quantile(resamples, [LEVEL, 1 - LEVEL])
    return Estimate(value=figure(values.mean(-1)), low=float(low), high=float(high), num_seeds=num_seeds)
