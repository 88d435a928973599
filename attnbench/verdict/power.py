"""Power of Student's paired tests: what so many seeds find. Numbers in, numbers out.

scipy and statsmodels are loaded where they are used, as in statistics.py.
"""

import math

import numpy as np

POWER = 0.8
"""Probability with which the number of seeds that a report names decides a test."""

MAX_SEEDS = 100
"""More seeds than this are not named: the difference is then too small for a bench of small models."""


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
