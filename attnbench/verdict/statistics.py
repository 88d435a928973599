"""Intervals over seeds and items, and when two variants may be called separated. Numbers in, numbers out.

What is assumed: the scores of several seeds are independent draws, about normal around the variant's mean; a seed
fixes data order, test set and the initialisation of equal parts, so that scores of one seed are pairs. With three to
five seeds neither can be checked, which is why a difference must also be large enough to matter.

scipy and statsmodels are loaded where they are used: every command has this module, and loading the two takes longer
than refusing a bad setting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
MIN_SEEDS = 3
"""Fewer are exploratory: shown, never ranked."""

ROUNDING = 1e-12
"""Differences that spread by less than this share of the scores are equal: floating point, not variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float | None
    """None for a single value, which has no interval."""
    high: float | None
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two variants on the seeds that both have."""

    first: str
    second: str
    num_seeds: int
    difference: float | None
    """Mean of first minus second, seed by seed; None without a common seed."""
    low: float | None
    high: float | None
    """95 % interval of the mean difference, not adjusted for the number of pairs."""
    p_value: float | None
    """Two-sided, of the paired t-test; None where it says nothing: too few seeds, or no variance."""
    adjusted_p_value: float | None
    """p-value after Holm's adjustment over the family."""
    is_separated: bool
    verdict: str
    """Reason, as a fragment of a sentence."""


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean and Student's 95 % interval; assumes independent, about normal values.

    Equal values have an interval of no width, which says that they do not vary here, not that they never would.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values have no mean")
    first, num = values[0], len(values)
    if num == 1:
        return Interval(mean=first, low=None, high=None, num=1)
    if all(value == first for value in values):
        return Interval(mean=first, low=first, high=first, num=num)
    from scipy import stats

    mean = float(np.mean(values))
    low, high = stats.t.interval(CONFIDENCE, num - 1, loc=mean, scale=stats.sem(values))
    return Interval(mean=mean, low=float(low), high=float(high), num=num)


def proportion_interval(rate: float, num_items: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of items; assumes independent items.

    The labels of one sequence are not independent, so the true interval is at least as wide: this one is a floor.

    Args:
        rate: the share, 0..1.

    Raises:
        ValueError: a rate outside 0..1, or no items.
    """
    if not 0 <= rate <= 1 or num_items < 1:
        raise ValueError(f"rate {rate} of {num_items} items is no proportion")
    from statsmodels.stats.proportion import proportion_confint

    ends = proportion_confint(rate * num_items, num_items, alpha=1 - CONFIDENCE, method="wilson")
    low, high = np.asarray(ends, dtype=float).tolist()
    # Rounding apart, the interval of none and of all ends where rates do.
    return (low if rate else 0.0), (high if rate < 1 else 1.0)


def compare_pairs(
    scores: Mapping[str, Mapping[int, float]],
    *,
    smallest_difference: float,
    relative: bool,
    reference: str | None = None,
) -> list[Comparison]:
    """Compare every pair of variants, or every variant with the reference; these pairs are the family.

    Two variants are separated when the two-sided paired t-test over their common seeds has a Holm-adjusted p < 0.05
    and the mean difference is at least the smallest that matters. It assumes that the differences of a pair are
    independent and about normal; Holm's adjustment assumes nothing of how the pairs depend on each other.

    Where all differences of a pair are equal there is no variance to test with: only the smallest difference that
    matters decides, and the verdict says so. Fewer than 3 common seeds are never separated. Such pairs have no
    p-value but keep their place in the family, as if theirs were 1: the family is named before anything is measured,
    and what was measured must not shrink it and so ease the other pairs' test.

    Args:
        scores: by variant, then by seed; a variant without scores has an empty mapping.
        smallest_difference: that matters; with `relative` as a share of the mean of the pair.
        reference: one of the variants; it comes second in its pairs.

    Raises:
        ValueError: a reference without an entry in `scores`.
    """
    if reference is None:
        pairs = list(combinations(scores, 2))
    elif reference in scores:
        pairs = [(name, reference) for name in scores if name != reference]
    else:
        raise ValueError(f"the reference {reference} has no entry among {', '.join(scores)}")
    family = [_test(first, second, scores) for first, second in pairs]
    if not family:
        return []
    from statsmodels.stats.multitest import multipletests

    p_values = [1.0 if pair.p_value is None else pair.p_value for pair in family]
    adjusted = np.asarray(multipletests(p_values, alpha=SIGNIFICANCE, method="holm")[1])
    return [
        _judge(
            replace(pair, adjusted_p_value=None if pair.p_value is None else float(p)),
            smallest_difference,
            _pair_mean(pair, scores) if relative else None,
        )
        for pair, p in zip(family, adjusted, strict=True)
    ]


def best(
    scores: Mapping[str, Mapping[int, float]], comparisons: Sequence[Comparison], *, higher_is_better: bool
) -> str | None:
    """Find the one variant that is separated from every other and better than it; None where there is none.

    A variant without any score cannot be better, so it stands in nobody's way; one whose scores are too few to compare
    does. Pairs with a reference say nothing of the other variants among themselves: of such a family only the
    reference itself can be best, and otherwise the comparisons tell who differs from the reference.
    """
    scored = {name for name, values in scores.items() if values}
    beaten: dict[str, set[str]] = {name: set() for name in scored}
    for pair in comparisons:
        if pair.is_separated and pair.difference is not None:
            first_wins = (pair.difference > 0) == higher_is_better
            winner, loser = (pair.first, pair.second) if first_wins else (pair.second, pair.first)
            beaten[winner].add(loser)
    return next((name for name in scored if len(scored) > 1 and beaten[name] == scored - {name}), None)


def _test(first: str, second: str, scores: Mapping[str, Mapping[int, float]]) -> Comparison:
    """Test a pair: its difference, interval and p-value, not yet judged."""
    seeds = sorted(scores[first].keys() & scores[second].keys())
    first_scores, second_scores = ([scores[name][seed] for seed in seeds] for name in (first, second))
    differences = [one - other for one, other in zip(first_scores, second_scores, strict=True)]
    p_value, interval = None, None
    if differences:
        if np.ptp(differences) <= ROUNDING * max(map(abs, first_scores + second_scores)):
            differences = [differences[0]] * len(differences)
        elif len(differences) >= MIN_SEEDS:
            from scipy import stats

            p_value = float(stats.ttest_rel(first_scores, second_scores).pvalue)
        interval = mean_interval(differences)
    return Comparison(
        first=first,
        second=second,
        num_seeds=len(seeds),
        difference=interval.mean if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        p_value=p_value,
        adjusted_p_value=None,
        is_separated=False,
        verdict="",
    )


def _judge(pair: Comparison, smallest: float, pair_mean: float | None) -> Comparison:
    """Return the pair with its verdict; `pair_mean` where the smallest difference is a share of it."""
    if pair.difference is None or pair.num_seeds < MIN_SEEDS:
        return replace(pair, verdict=f"exploratory: fewer than {MIN_SEEDS} seeds")
    threshold = smallest if pair_mean is None else smallest * pair_mean
    # A difference of 0.95 and 0.94 is 0.01 but for the last bit.
    matters = pair.difference != 0 and abs(pair.difference) >= threshold * (1 - 1e-9)
    if pair.adjusted_p_value is None:
        verdict = "no variance: decided by the smallest difference alone"
        return replace(pair, is_separated=matters, verdict=verdict)
    if pair.adjusted_p_value >= SIGNIFICANCE:
        return replace(pair, verdict=f"not separated: p = {pair.adjusted_p_value:.2g}")
    if not matters:
        shown = f"{smallest:g}" if pair_mean is None else f"{100 * smallest:g} %"
        return replace(pair, verdict=f"difference below {shown}, the smallest that matters")
    return replace(pair, is_separated=True, verdict="separated")


def _pair_mean(pair: Comparison, scores: Mapping[str, Mapping[int, float]]) -> float:
    """Return the mean score of both over their common seeds; 0 without one."""
    seeds = scores[pair.first].keys() & scores[pair.second].keys()
    values = [scores[name][seed] for name in (pair.first, pair.second) for seed in sorted(seeds)]
    return abs(float(np.mean(values))) if values else 0.0
