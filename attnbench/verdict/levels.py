"""Verdicts on ladders: an unpaired test of levels held, ladders that cannot separate two variants, and totals."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations
from typing import Any

import numpy as np

from attnbench.results.protocol import TEST_NAMES
from attnbench.results.rows import ResultRow
from attnbench.verdict.axes import axes, grouped
from attnbench.verdict.power import difference_power, equivalence_power
from attnbench.verdict.statistics import Permutation

CEILING, FLOOR = 0.98, 0.02
"""Shares of a ladder's levels. Two variants are not separated if both hold at least the ceiling, or both less than the
floor, where an accuracy differs from chance by no more than sampling error and rounding."""

SUMMED = "rule"
"""Setting of rows of doublings that are parts of one score."""


MAX_SPLITS = 100_000
"""Most splits of the scores that are all counted; of more, a fixed random sample of this size."""


class Unpaired(Permutation):
    """Tests of the difference of two means of unpaired scores; a sample is a pair of lists.

    An arrangement is a split of all scores into two groups of these sizes; the test of a difference d moves the first
    scores by -d. The permutation test is exact if both groups have one distribution, but rejects too often if only
    their means are equal and one spread is larger. Welch's test allows for that, but assumes about normal means. Both
    must reject: a p-value is the larger of both, and an interval has both intervals.
    """

    name = TEST_NAMES["level"]

    def smallest_p(self, num: int) -> float:
        return 2 / min(math.comb(2 * num, num), MAX_SPLITS)

    def mean(self, differences: Sequence[Any]) -> float:
        first, second = differences
        return float(np.mean(first) - np.mean(second))

    def near(self, differences: Sequence[Any], centre: float = 0.0) -> float:
        return super().near([value for values in differences for value in values], centre)

    def equal_at(self, differences: Sequence[Any]) -> np.ndarray:
        first, second = differences
        weights, distance = _other_splits(len(first), len(second))
        return (self.mean(differences) - weights @ np.array([*first, *second], dtype=float)) / distance

    def one_sided(self, differences: Sequence[Any], centre: float) -> tuple[float, float]:
        first, second = differences
        above, below = super().one_sided(differences, centre)
        return max(above, welch_p_value(first, second, centre)), max(below, welch_p_value(second, first, -centre))

    def ends(self, differences: Sequence[Any], level: float) -> tuple[float, float]:
        first, second = differences
        low, high = super().ends(differences, level)
        mean, half = welch_interval(first, second, level)
        return min(low, mean - half), max(high, mean + half)

    def power(self, effect: float, spread: float, alpha: float, num: int, seen: Sequence[float] = ()) -> float:
        # Student's, of two samples.
        can = self.smallest_p(num) <= alpha
        return difference_power(effect, spread, alpha, num, 2 * num - 2) if can else 0.0

    def equivalence_power(self, effect: float, spread: float, margin: float, alpha: float, num: int) -> float:
        can = self.smallest_p(num) / 2 <= alpha
        return equivalence_power(effect, spread, margin, alpha, num, 2 * num - 2) if can else 0.0


@lru_cache(maxsize=2)
def _other_splits(num_first: int, num_second: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each split but the observed one the weights of the scores in its difference, and how much less than
    the observed difference it moves with the first scores."""
    weights = splits(num_first, num_second) * (1 / num_first + 1 / num_second) - 1 / num_second
    distance = 1 - weights[:, :num_first].sum(1)
    # A sample of the splits may hold the observed one again.
    is_other = distance > 1e-9
    return weights[is_other], distance[is_other]


UNPAIRED = Unpaired()


def welch_p_value(first: Sequence[float], second: Sequence[float], centre: float = 0.0) -> float:
    """One-sided, of the hypothesis that the difference of the means is at most `centre`."""
    from scipy.special import stdtr

    difference, error, freedom = welch(first, second)
    # Scores without a spread are left to the permutation test.
    return float(stdtr(freedom, (centre - difference) / error)) if error else 0.0


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of the means, its standard error, and the degrees of freedom (1 without an error)."""
    parts = [float(np.var(scores, ddof=1)) / len(scores) if len(scores) > 1 else math.inf for scores in (first, second)]
    squares = sum(part**2 / max(len(scores) - 1, 1) for part, scores in zip(parts, (first, second), strict=True))
    freedom = sum(parts) ** 2 / squares if squares and math.isfinite(squares) else 1.0
    return float(np.mean(first) - np.mean(second)), math.sqrt(sum(parts)), freedom


def welch_interval(first: Sequence[float], second: Sequence[float], level: float) -> tuple[float, float]:
    """Return the difference of the means, and half the width of the interval."""
    from scipy.special import stdtrit

    difference, error, freedom = welch(first, second)
    return difference, float(stdtrit(freedom, (1 + level) / 2)) * error


@lru_cache(maxsize=4)
def splits(num_first: int, num_second: int) -> np.ndarray:
    """Return the first group of each split, (splits, scores) bool; the observed split comes first."""
    total = num_first + num_second
    if (number := math.comb(total, num_first)) > MAX_SPLITS:
        observed = np.tile(np.arange(total) < num_first, (MAX_SPLITS, 1))
        observed[1:] = np.random.default_rng(0).permuted(observed[1:], axis=1)
        return observed
    chosen = np.fromiter(chain.from_iterable(combinations(range(total), num_first)), int, number * num_first)
    groups = np.zeros((number, total), dtype=bool)
    np.put_along_axis(groups, chosen.reshape(number, num_first), True, axis=1)
    return groups


def limit(scores: Sequence[Sequence[float]], levels: int | None) -> str:
    """Return "ceiling" or "floor" if both means are there."""
    if not levels or not scores or not all(scores):
        return ""
    shares = [float(np.mean(values)) / levels for values in scores]
    return "ceiling" if min(shares) >= CEILING else "floor" if max(shares) < FLOOR else ""


def totals(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the sum over the rules of an evaluation's doublings, for each variant and seed that has them all.

    A rule without a number counts as chance; without any number there is no sum.
    """
    parts = [row for row in rows if row.measurement.metric == "doublings" and SUMMED in row.measurement.settings]
    rules: dict[str, set[str]] = {}
    for row in parts:
        rules.setdefault(row.identity.evaluation, set()).add(row.measurement.settings[SUMMED])

    def place(row: ResultRow) -> str:
        return json.dumps(_without_rule(row.measurement.settings), sort_keys=True)

    groups = grouped(parts, lambda row: (row.identity.evaluation, row.identity.variant, row.identity.seed, place(row)))
    return [
        _total(group)
        for (evaluation, *_), group in groups.items()
        if 1 < len(rules[evaluation]) == len({row.measurement.settings[SUMMED] for row in group})
    ]


def _without_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in axes(dict(settings)).items() if name != SUMMED}


def _total(group: Sequence[ResultRow]) -> ResultRow:
    measured = [row.measurement for row in group]
    first = next((it for it in measured if it.status == "ok"), measured[0])
    levels = {"levels": sum(it.settings["levels"] for it in measured)}
    value = sum(it.value or 0.0 for it in measured) if first.status == "ok" else None
    settings = {**_without_rule(first.settings), **levels}
    kept = {name: first.settings[name] for name in ("not_applicable",) if name in first.settings}
    identity = replace(group[0].identity, parameters=None)
    return replace(
        group[0], identity=identity, measurement=replace(first, value=value, settings=settings | kept, num_samples=None)
    )
