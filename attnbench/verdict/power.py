"""Power of paired tests: what so many seeds find. Numbers in, numbers out.

scipy and statsmodels are loaded where they are used, as in statistics.py.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

POWER = 0.8
"""Probability with which the number of seeds that a report names decides a test."""

MAX_SEEDS = 100
"""More seeds than this are not named: the difference is then too small for a bench of small models."""

MAX_DRAWN, NUM_DRAWS, NUM_PARTS = 14, 2_000, 8
"""Seeds up to which the power of sign flips is drawn, how often, and in how many parts; of more seeds it is Student's
but for 0.03."""

TIE = 1e-12
"""Share of the largest difference by which two means of differences differ by rounding alone."""


def difference_power(effect: float, spread: float, alpha: float, num: int) -> float:
    """Return the probability that Student's test of `num` pairs at level `alpha` finds the difference `effect`."""
    from scipy.stats import nct, t

    shift = abs(effect) * math.sqrt(num) / spread
    # Beyond it the noncentral distribution is not computed well, and the power is 1.
    return float(nct.sf(t.ppf(1 - alpha / 2, num - 1), num - 1, shift)) if shift < 30 else 1.0


def equivalence_power(effect: float, spread: float, margin: float, alpha: float, num: int) -> float:
    """Return the probability that two one-sided tests of `num` pairs at level `alpha` each show equivalence."""
    from scipy.stats import chi2, norm, t

    error = spread / math.sqrt(num)
    # The standard error varies from sample to sample: the mean over 99 quantiles of its distribution.
    errors = np.sqrt(chi2.ppf(np.arange(1, 100) / 100, num - 1) / (num - 1)) * error
    room = np.maximum(margin - float(t.ppf(1 - alpha, num - 1)) * errors, 0.0)
    inside = norm.cdf((room - effect) / error) - norm.cdf((-room - effect) / error)
    return float(np.mean(inside))


def flips_power(effect: float, spread: float, rank: int, num: int, seen: Sequence[float]) -> float:
    """Return the probability that a sign-flip test of `num` pairs, MAX_DRAWN at most, finds a difference.

    Args:
        rank: of the end of its interval among the ordered means of subsets, from 1.
        seen: differences to draw from, with this mean and spread; none: normal ones.
    """
    side = math.copysign(1.0, effect)
    lows = _lower_ends(num, rank, tuple(side * value for value in seen))
    # The test counts a mean of 0 as not above 0 (SignFlip), and so does its power: rounding makes no difference found.
    near = TIE * max(map(abs, seen), default=0.0)
    return float(np.mean(lows > (near if seen else -abs(effect) / spread)))


@lru_cache(maxsize=256)
def _lower_ends(num: int, rank: int, seen: tuple[float, ...]) -> np.ndarray:
    """Draw `num` differences of those seen, or normal ones, many times; return the lower end of each one's interval."""
    rng, shape = np.random.default_rng(0), (num, NUM_DRAWS)
    drawn = rng.choice(seen, shape) if seen else rng.normal(size=shape)
    subsets = (np.arange(1, 2**num)[:, None] >> np.arange(num) & 1).astype(float)
    subsets /= subsets.sum(axis=1, keepdims=True)
    # Some draws at a time: the means of all of them take 260 MB.
    parts = np.array_split(drawn, NUM_PARTS, axis=1)
    return np.concatenate([np.partition(subsets @ part, rank - 1, axis=0)[rank - 1] for part in parts])


def shares_power(effect: float, spread: float, alpha: float, num: int) -> float:
    """Return the probability that McNemar's exact test of `num` seeds at level `alpha` finds a difference of shares."""
    from scipy.stats import binom

    more, fewer = _discordant(effect, spread)
    discordant = np.arange(num + 1)
    # The most seeds of the fewer alone with which so many discordant ones are still significant.
    most = binom.ppf(alpha / 2, discordant, 0.5)
    most -= binom.cdf(most, discordant, 0.5) > alpha / 2
    finds = binom.cdf(most, discordant, fewer / (more + fewer) if more + fewer else 0.5)
    return float(np.sum(binom.pmf(discordant, num, min(1.0, more + fewer)) * finds))


def shares_equivalence_power(effect: float, spread: float, margin: float, alpha: float, num: int) -> float:
    """Return the least probability that `num` seeds show shares to be within the margin, at level `alpha`."""
    from scipy.stats import binom

    most = binom.ppf(alpha, num, margin)
    most -= binom.cdf(most, num, margin) > alpha
    return max(0.0, 1 - float(sum(binom.sf(most, num, share) for share in _discordant(effect, spread))))


def _discordant(effect: float, spread: float) -> tuple[float, float]:
    """Return the shares of seeds that only the better one solves, and only the other, by mean and spread."""
    square = min(1.0, spread**2 + effect**2)
    return (square + abs(effect)) / 2, max(0.0, (square - abs(effect)) / 2)
