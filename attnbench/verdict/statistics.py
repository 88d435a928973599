"""Intervals of scores, and paired tests, from numbers alone.

Scores of several seeds are independent; scores of two variants at one seed are a pair, because a seed fixes the order
of the data, the test set and the initial weights of equal parts. The interval of a test contains exactly the
differences that the test does not reject.

scipy and statsmodels are imported in functions: they load slower than a setting is refused, and scipy.stats slower than
scipy.special, which has the same quantiles.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from attnbench.results.protocol import TEST_NAMES
from attnbench.verdict.power import (
    MAX_DRAWN,
    MAX_SEEDS,
    POWER,
    TIE,
    difference_power,
    equivalence_power,
    flips_power,
)

CONFIDENCE = 0.95
MAX_EXACT = 20
"""Seeds up to which all 2^n sign flips are enumerated; beyond, a fixed random million."""

MOST_SPREADS = 30.0
"""Differences of this many standard deviations have a power of 1 if any difference is detectable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    mean: float
    low: float | None
    high: float | None


def student_interval(values: Sequence[float]) -> Interval:
    mean = _mean(values)
    if len(values) == 1:
        return Interval(mean=mean, low=None, high=None)
    low, high = STUDENT.interval(values, CONFIDENCE, resolution=0)
    return Interval(mean=mean, low=low, high=high)


def bounded_interval(values: Sequence[float]) -> Interval:
    """Return the mean of scores in 0..1 and Clopper and Pearson's 95 % interval, with their sum as number of successes.

    It is exact for scores of 0 or 1, which vary most for a given mean, and conservative for others.
    """
    mean = _mean(values)
    if min(values) < 0 or max(values) > 1:
        raise ValueError(f"scores {list(values)} are not in 0..1")
    low, high = share_interval(math.fsum(values), len(values))
    return Interval(mean=mean, low=low, high=high)


def share_interval(count: float, num: int, tail: float = (1 - CONFIDENCE) / 2) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of the share `count` of `num`, with probability `tail` outside each end.

    Raises:
        ValueError: a count outside 0..num, or no items.
    """
    if not 0 <= count <= num or num < 1:
        raise ValueError(f"{count} of {num} is not a share")
    from scipy.special import betaincinv

    # scipy overflows for subnormal sums of scores.
    low = float(betaincinv(count, num - count + 1, tail)) if count > 1e-300 else 0.0
    high = float(betaincinv(count + 1, num - count, 1 - tail)) if count < num else 1.0
    return low, high


class PairedTest(ABC):
    """Takes the differences of pairs of scores; verdict/levels.py has the test that takes both scores, unpaired."""

    name: str

    @abstractmethod
    def smallest_p(self, num: int) -> float:
        """Return the smallest two-sided p-value possible with `num` pairs."""

    @abstractmethod
    def p_value(self, differences: Sequence[Any], *, resolution: float) -> float: ...

    @abstractmethod
    def equivalence_p_value(self, differences: Sequence[Any], margin: float, *, resolution: float) -> float:
        """Return the larger p-value of the one-sided tests against -margin and margin."""

    @abstractmethod
    def interval(self, differences: Sequence[Any], level: float, *, resolution: float) -> tuple[float, float]:
        """Return the differences that the two-sided test at 1 - level does not reject.

        It extends at least `resolution`, the step of the scores, from the mean, but not to a 0 that the test rejects.
        """

    def power(self, effect: float, spread: float, alpha: float, num: int, seen: Sequence[float] = ()) -> float:
        """Power of the test of `num` pairs at level `alpha`; by default Student's.

        Args:
            effect, spread: mean and standard deviation of the differences.
            seen: differences with these, from which a permutation test draws; empty: normal ones.
        """
        return difference_power(effect, spread, alpha, num)

    def equivalence_power(self, effect: float, spread: float, margin: float, alpha: float, num: int) -> float:
        # A one-sided permutation test reaches half of its smallest two-sided p-value.
        can = self.smallest_p(num) / 2 <= alpha
        return equivalence_power(effect, spread, margin, alpha, num) if can else 0.0

    def detectable(self, spread: float, alpha: float, num: int) -> float:
        """The difference that `num` normal pairs find with probability 0.8."""
        from scipy.optimize import bisect

        def excess(effect: float) -> float:
            return self.power(effect, 1.0, alpha, num) - POWER

        return spread * float(bisect(excess, 0.0, MOST_SPREADS, xtol=1e-4)) if spread else 0.0  # pyright: ignore

    def seeds_needed(
        self,
        effect: float,
        spread: float,
        margin: float,
        *,
        alpha: float,
        equivalence_alpha: float,
        more_than: int = 1,
        seen: Sequence[float] = (),
    ) -> int | None:
        """Return the seeds above `more_than` that find a difference or show equivalence with probability 0.8; None:
        over 100."""
        for num in range(more_than + 1, MAX_SEEDS + 1):
            finds = self.power(effect, spread, alpha, num, seen) >= POWER
            if finds or self.equivalence_power(effect, spread, margin, equivalence_alpha, num) >= POWER:
                return num
        return None


class Student(PairedTest):
    """Student's paired t-test; assumes about normal differences."""

    name = TEST_NAMES["nats"]

    def smallest_p(self, num: int) -> float:
        return 0.0 if num > 1 else 1.0

    def p_value(self, differences: Sequence[float], *, resolution: float) -> float:
        from scipy.stats import t

        statistic, num = self._statistic(differences, 0.0, resolution)
        return min(1.0, 2 * float(t.sf(abs(statistic), num - 1)))

    def equivalence_p_value(self, differences: Sequence[float], margin: float, *, resolution: float) -> float:
        from scipy.stats import t

        above, num = self._statistic(differences, -margin, resolution)
        below, _ = self._statistic(differences, margin, resolution)
        return float(max(t.sf(above, num - 1), t.cdf(below, num - 1)))

    def interval(self, differences: Sequence[float], level: float, *, resolution: float) -> tuple[float, float]:
        from scipy.special import stdtrit

        error, mean = self._standard_error(differences, resolution), _mean(differences)
        low, high = (stdtrit(len(differences) - 1, share) for share in ((1 - level) / 2, (1 + level) / 2))
        return float(low * error + mean), float(high * error + mean)

    def _statistic(self, differences: Sequence[float], null: float, resolution: float) -> tuple[float, int]:
        return (_mean(differences) - null) / self._standard_error(differences, resolution), len(differences)

    def _standard_error(self, differences: Sequence[float], resolution: float) -> float:
        # Equal differences in a sample do not imply a variance of 0.
        spread = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
        return max(spread, resolution, math.ulp(max(map(abs, differences))))


class Permutation(PairedTest):
    """The ends of its intervals are differences at which another arrangement of the scores has the observed difference:
    those that it does not reject lie between two of them (Hartigan 1969, JASA 64)."""

    @abstractmethod
    def equal_at(self, differences: Sequence[Any]) -> np.ndarray:
        """Return for each arrangement but the observed one the difference at which the two are equal."""

    def mean(self, differences: Sequence[Any]) -> float:
        return _mean(differences)

    def near(self, differences: Sequence[Any], centre: float = 0.0) -> float:
        """Differences below it are equal apart from rounding."""
        return TIE * max(abs(centre), *map(abs, differences))

    def one_sided(self, differences: Sequence[Any], centre: float) -> tuple[float, float]:
        """Return the p-values of the hypotheses that the difference is at most, and at least, `centre`."""
        equal_at, near = self.equal_at(differences), self.near(differences, centre)
        # The observed arrangement, and those that are equal to it, count on both sides.
        above = 1 + np.count_nonzero(equal_at <= centre + near)
        below = 1 + np.count_nonzero(equal_at >= centre - near)
        return float(above / (len(equal_at) + 1)), float(below / (len(equal_at) + 1))

    def p_value(self, differences: Sequence[Any], *, resolution: float) -> float:
        return min(1.0, 2 * min(self.one_sided(differences, 0.0)))

    def equivalence_p_value(self, differences: Sequence[Any], margin: float, *, resolution: float) -> float:
        return max(self.one_sided(differences, -margin)[0], self.one_sided(differences, margin)[1])

    def ends(self, differences: Sequence[Any], level: float) -> tuple[float, float]:
        """Return the ends of the interval at `level`; infinite where no difference is rejected."""
        equal_at = np.sort(self.equal_at(differences))
        rank = rank_of_end(1 - level, len(equal_at) + 1)
        return (float(equal_at[rank - 1]), float(equal_at[-rank])) if rank else (-math.inf, math.inf)

    def interval(self, differences: Sequence[Any], level: float, *, resolution: float) -> tuple[float, float]:
        # An end of 0 apart from rounding is 0, which the test does not reject.
        near = self.near(differences)
        low, high = (0.0 if abs(end) <= near else end for end in self.ends(differences, level))
        return widened(low, high, self.mean(differences), resolution)


def rank_of_end(alpha: float, num: int) -> int:
    """Return the rank, from 1, of an interval's end among `num` arrangements; 0: it has no end."""
    # The factor absorbs rounding: an end rejected at exactly this level is outside.
    return math.floor(alpha / 2 * num * (1 + 1e-12))


class SignFlip(Permutation):
    """Permutation test that flips the signs of differences; assumes symmetry about their centre.

    An arrangement is a subset of flipped differences, equal to the observed one at the subset's mean.
    """

    name = TEST_NAMES["accuracy"]

    def smallest_p(self, num: int) -> float:
        return 2.0 ** (1 - num)

    def power(self, effect: float, spread: float, alpha: float, num: int, seen: Sequence[float] = ()) -> float:
        rank = rank_of_end(alpha, 2**num)
        if not rank:
            return 0.0
        if num > MAX_DRAWN:
            return super().power(effect, spread, alpha, num)
        return flips_power(effect, spread, rank, num, seen)

    def equal_at(self, differences: Sequence[float]) -> np.ndarray:
        sums, sizes = subset_sums(tuple(differences))
        return sums[1:] / sizes[1:]

    def interval(self, differences: Sequence[float], level: float, *, resolution: float) -> tuple[float, float]:
        low, high = super().interval(differences, level, resolution=resolution)
        return max(-1.0, low), min(1.0, high)


def widened(low: float, high: float, mean: float, resolution: float) -> tuple[float, float]:
    """Extend an interval to at least `resolution` from the mean. An end keeps its sign if it would cross 0: a
    difference can be significant although it is less than an item."""
    wide_low, wide_high = min(low, mean - resolution), max(high, mean + resolution)
    return low if wide_low <= 0 < low else wide_low, high if high < 0 <= wide_high else wide_high


STUDENT, SIGN_FLIP = Student(), SignFlip()


@lru_cache(maxsize=4)
def subset_sums(values: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and sizes of all subsets, the empty one first; beyond 20 values, of a fixed random million."""
    array = np.asarray(values, dtype=float)
    if len(array) > MAX_EXACT:
        chosen = np.random.default_rng(0).random((2**MAX_EXACT, len(array)), dtype=np.float32) < 0.5
        chosen[:, 0] |= ~chosen.any(axis=1)
        chosen[0] = False
        return chosen @ array, chosen.sum(axis=1, dtype=float)
    sums, sizes = np.zeros(2 ** len(array)), np.zeros(2 ** len(array))
    for index, value in enumerate(array):
        half = 2**index
        np.add(sums[:half], value, out=sums[half : 2 * half])
        np.add(sizes[:half], 1, out=sizes[half : 2 * half])
    return sums, sizes


def _mean(values: Sequence[float]) -> float:
    if not len(values):
        raise ValueError("no values have no mean")
    # The mean of equal values is exactly that value.
    return float(values[0]) if all(value == values[0] for value in values) else float(np.mean(values))
