"""Tests of a claim by kind, from scores alone, and the number of seeds that would decide it.

Scores are in the order of seeds, chance-scaled where the claim says so; those of two variants are not paired. Tests are
one-sided at LEVEL, their p-values adjusted by Holm's procedure over the claim in verdict/claims.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.results.numbers import reaches
from attnbench.verdict.levels import UNPAIRED, welch, welch_interval
from attnbench.verdict.power import MAX_SEEDS, POWER, difference_power
from attnbench.verdict.statistics import share_interval, student_interval

LEVEL = 0.05

HOLDS, FAILS, OPPOSITE, UNDECIDED = "holds", "fails", "opposite", "undecided"

ENOUGH = 2
"""Seeds that show that a variant can learn a task; one may be an accident."""

MANY = 10
"""Seeds from which on none or one of them shows that it is not learned; none of ten bounds the share by 0.31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    value: float
    low: float
    """Two-sided 95 % interval of the value."""
    high: float
    outcome: str = UNDECIDED
    p_value: float | None = None
    opposite_p_value: float | None = None
    """One-sided p-values of the claim and of its opposite, which decide in the place of `outcome`."""
    seeds_needed: int | None = None
    """Seeds of each variant that would decide with a probability of 0.8; None: more than MAX_SEEDS."""
    words: str = ""
    """Numbers behind the value."""


def num_solved(scores: Sequence[float], threshold: float) -> int:
    return sum(reaches(score, threshold) for score in scores)


def existence(scores: Sequence[float], threshold: float, *, claimed: bool = True) -> Found:
    """Ask if two seeds reach a threshold; the share of seeds is shown, and not judged."""
    count, num = num_solved(scores, threshold), len(scores)
    low, high = share_interval(count, num)
    if claimed:
        outcome = HOLDS if count >= ENOUGH else FAILS if num >= MANY else UNDECIDED
    else:
        outcome = OPPOSITE if count >= ENOUGH else UNDECIDED if count else HOLDS
    # One seed has solved it: more seeds until a second is likely to.
    more = num + math.ceil(math.log(1 - POWER) / math.log1p(-1 / num)) if count and num > 1 else MANY
    words = f"{count} of {num} seeds"
    return Found(
        value=count / num, low=low, high=high, outcome=outcome, words=words, seeds_needed=MANY if claimed else more
    )


def difference(first: Sequence[float], second: Sequence[float], threshold: float) -> Found:
    """Compare numbers of solved seeds by Fisher's exact test; the interval is Newcombe's."""
    from scipy.stats import fisher_exact
    from statsmodels.stats.proportion import confint_proportions_2indep

    (a, n), (b, m) = ((num_solved(scores, threshold), len(scores)) for scores in (first, second))
    table = [[a, n - a], [b, m - b]]
    low, high = confint_proportions_2indep(a, n, b, m, method="newcomb")
    # Shrunk by half a seed on either side: a few seeds do not show a share of 0 or 1.
    shares = (a + 0.5) / (n + 1), (b + 0.5) / (m + 1)
    return Found(
        value=a / n - b / m,
        low=float(low),
        high=float(high),
        outcome=FAILS if a < ENOUGH and n >= MANY else UNDECIDED,
        p_value=float(fisher_exact(table, alternative="greater")[1]),  # pyright: ignore[reportArgumentType]
        opposite_p_value=float(fisher_exact(table, alternative="less")[1]),  # pyright: ignore[reportArgumentType]
        seeds_needed=_fewest(n, lambda num: shares[0] > shares[1] and _fisher_power(*shares, num) >= POWER),
        words=f"{a} of {n} and {b} of {m} seeds",
    )


def best_of(scores: Sequence[float], threshold: float, best: int) -> Found:
    """Estimate the probability that the best of `best` seeds reaches a threshold. From 1/2 on, a paper that reports its
    best seed is more likely than not to report a success."""
    count, num, best = num_solved(scores, threshold), len(scores), min(best, len(scores))
    probability = 1 - math.comb(num - count, best) / math.comb(num, best)
    low, high = (1 - (1 - share) ** best for share in share_interval(count, num))
    outcome = HOLDS if reaches(probability, 0.5) else FAILS if num >= MANY else UNDECIDED
    words = f"best of {best} on average {mean_of_best(scores, best):.3f}, {count} of {num} seeds"
    return Found(value=probability, low=low, high=high, outcome=outcome, seeds_needed=MANY, words=words)


def mean_of_best(scores: Sequence[float], best: int) -> float:
    """Return the largest of `best` scores, averaged over all subsets of this size."""
    number = math.comb(len(scores), best)
    return math.fsum(score * math.comb(rank, best - 1) / number for rank, score in enumerate(sorted(scores)))


def value(scores: Sequence[float], published: float, margin: float) -> Found:
    """Compare a mean with the published one, if Student's interval is at most twice the margin to either side.

    Then a mean within the margin shows, with an error of at most 5 %, that the gap is below three margins. Student's
    interval and not a bootstrap's: of five to ten seeds, resamples vary less than new seeds do.
    """
    interval, num = student_interval(scores), len(scores)
    low, high = interval.low, interval.high
    spread = float(np.std(scores, ddof=1)) if num > 1 else math.inf
    is_narrow = low is not None and high is not None and reaches(2 * margin, (high - low) / 2)
    is_near = reaches(margin, abs(interval.mean - published))
    return Found(
        value=interval.mean,
        low=interval.mean if low is None else low,
        high=interval.mean if high is None else high,
        outcome=UNDECIDED if not is_narrow else HOLDS if is_near else FAILS,
        seeds_needed=_fewest(num, lambda more: _half_width(spread, more) <= 2 * margin),
        words=f"published {published:g}, margin {margin:g}",
    )


def order(first: Sequence[float], second: Sequence[float]) -> Found:
    """Compare means by the tests of `UNPAIRED`; the interval is Welch's."""
    difference, half = welch_interval(first, second, 0.95)
    spread = welch(first, second)[1] * math.sqrt(len(first))
    p_value, opposite = UNPAIRED.one_sided((first, second), 0.0)
    found = difference > 0 and spread > 0
    return Found(
        value=difference,
        low=difference - half,
        high=difference + half,
        p_value=p_value,
        opposite_p_value=opposite,
        seeds_needed=_fewest(
            len(first), lambda num: found and difference_power(difference, spread, 2 * LEVEL, num) >= POWER
        ),
        words=f"means {np.mean(first):.3f} and {np.mean(second):.3f}",
    )


def _fewest(num: int, decides: Callable[[int], bool]) -> int | None:
    return next((more for more in range(num + 1, MAX_SEEDS + 1) if decides(more)), None)


def _half_width(spread: float, num: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(num - 1, 0.975)) * spread / math.sqrt(num)


def _fisher_power(first: float, second: float, num: int) -> float:
    from scipy.stats import binom, hypergeom

    a, b = np.arange(num + 1)[:, None], np.arange(num + 1)
    p_value = hypergeom.sf(a - 1, 2 * num, a + b, num)
    probability = binom.pmf(a, num, first) * binom.pmf(b, num, second)
    return float(probability[p_value <= LEVEL].sum())
