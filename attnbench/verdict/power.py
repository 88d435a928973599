"""Power of paired tests, from numbers alone. scipy is imported in functions, as in statistics.py."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

POWER = 0.8

MAX_SEEDS = 100
"""Largest recommended number of seeds."""

MAX_DRAWN, NUM_DRAWS, NUM_PARTS = 14, 2_000, 8
"""Most seeds for which the power of sign flips is simulated, the number of draws, and the number of parts in which they
are computed. With more seeds, Student's power differs by at most 0.03."""

TIE = 1e-12
"""Share of the largest difference below which two means of differences count as equal."""


def difference_power(effect: float, spread: float, alpha: float, num: int, freedom: int | None = None) -> float:
    """Power of Student's test of `num` pairs at level `alpha` for the difference `effect`.

    Args:
        freedom: degrees of freedom of the spread; None: those of pairs, num - 1.
    """
    from scipy.stats import nct, t

    shift, freedom = abs(effect) * math.sqrt(num) / spread, freedom or num - 1
    # Beyond 30 the noncentral distribution is inaccurate, and the power is 1.
    return float(nct.sf(t.ppf(1 - alpha / 2, freedom), freedom, shift)) if shift < 30 else 1.0


def equivalence_power(
    effect: float, spread: float, margin: float, alpha: float, num: int, freedom: int | None = None
) -> float:
    """Power of two one-sided tests of `num` pairs, at level `alpha` each."""
    from scipy.stats import chi2, norm, t

    error, freedom = spread / math.sqrt(num), freedom or num - 1
    # The standard error is random: average over 99 quantiles of its distribution.
    errors = np.sqrt(chi2.ppf(np.arange(1, 100) / 100, freedom) / freedom) * error
    width = np.maximum(margin - float(t.ppf(1 - alpha, freedom)) * errors, 0.0)
    inside = norm.cdf((width - effect) / error) - norm.cdf((-width - effect) / error)
    return float(np.mean(inside))


def flips_power(effect: float, spread: float, rank: int, num: int, seen: Sequence[float]) -> float:
    """Power of a sign-flip test of `num` pairs, at most MAX_DRAWN.

    Args:
        rank: of the interval's end among the ordered means of subsets, from 1.
        seen: differences with this mean and spread to draw from; empty: normal ones.
    """
    side = math.copysign(1.0, effect)
    lows = _lower_ends(num, rank, tuple(side * value for value in seen))
    # As in SignFlip, a mean of 0, apart from rounding, is not above 0.
    near = TIE * max(map(abs, seen), default=0.0)
    return float(np.mean(lows > (near if seen else -abs(effect) / spread)))


@lru_cache(maxsize=256)
def _lower_ends(num: int, rank: int, seen: tuple[float, ...]) -> np.ndarray:
    """Draw `num` differences many times; return the lower end of each interval."""
    rng, shape = np.random.default_rng(0), (num, NUM_DRAWS)
    drawn = rng.choice(seen, shape) if seen else rng.normal(size=shape)
    subsets = (np.arange(1, 2**num)[:, None] >> np.arange(num) & 1).astype(float)
    subsets /= subsets.sum(axis=1, keepdims=True)
    # The means of all draws take 260 MB.
    parts = np.array_split(drawn, NUM_PARTS, axis=1)
    return np.concatenate([np.partition(subsets @ part, rank - 1, axis=0)[rank - 1] for part in parts])
