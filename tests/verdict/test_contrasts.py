"""Tests of a claim by kind: what they find, their error by simulation, and the seeds that would decide."""

import math
from itertools import combinations

import numpy as np
import pytest
import simulate_findings
from scipy import stats

from attnbench.verdict.contrasts import (
    FAILS,
    HOLDS,
    LEVEL,
    OPPOSITE,
    UNDECIDED,
    best_of,
    difference,
    existence,
    mean_of_best,
    order,
    value,
)
from attnbench.verdict.statistics import share_interval


def solved(count: int, num: int = 10) -> list[float]:
    return [1.0] * count + [0.0] * (num - count)


@pytest.mark.parametrize(
    ("count", "num", "claimed", "outcome"),
    [(2, 10, True, HOLDS), (2, 5, True, HOLDS), (1, 10, True, FAILS), (0, 10, True, FAILS), (1, 9, True, UNDECIDED),
     (0, 5, True, UNDECIDED), (0, 10, False, HOLDS), (1, 10, False, UNDECIDED), (2, 10, False, OPPOSITE),
     (10, 10, False, OPPOSITE)],
)  # fmt: skip
def test_an_existence_asks_for_two_seeds_and_shows_the_share(count, num, claimed, outcome):
    found = existence(solved(count, num), 0.95, claimed=claimed)
    assert (found.outcome, found.value) == (outcome, count / num)
    assert (found.low, found.high) == share_interval(count, num)
    assert found.words == f"{count} of {num} seeds"


def test_a_seed_of_exactly_the_threshold_reaches_it():
    assert existence([0.95 - 1e-16] * 2, 0.95).outcome == HOLDS


def test_a_difference_is_fishers_exact_test():
    # The numbers of solved seeds that are significant against none.
    for count, num in ((4, 5), (4, 10), (5, 20)):
        found, fewer = (difference(solved(it, num), solved(0, num), 0.95) for it in (count, count - 1))
        assert found.p_value is not None
        assert fewer.p_value is not None
        assert found.p_value <= LEVEL < fewer.p_value
    expected = stats.fisher_exact([[7, 3], [1, 9]], alternative="greater")
    found = difference(solved(7), solved(1), 0.95)
    assert found.p_value == pytest.approx(expected.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
    assert found.opposite_p_value == pytest.approx(difference(solved(1), solved(7), 0.95).p_value)
    assert found.value == pytest.approx(0.6)
    assert found.low < found.value < found.high
    # What nobody learns does not differ; ten seeds of the first have shown that they do not.
    assert difference(solved(1), solved(0), 0.95).outcome == FAILS
    assert difference(solved(1, 5), solved(0, 5), 0.95).outcome == UNDECIDED


def test_the_best_of_k_is_averaged_over_all_subsets():
    scores = [0.3, 0.9, 0.5, 0.7, 0.1]
    expected = np.mean([max(it) for it in combinations(scores, 3)])
    assert mean_of_best(scores, 3) == pytest.approx(expected)
    assert mean_of_best(scores, 1) == pytest.approx(np.mean(scores))
    assert mean_of_best(scores, 5) == 0.9


def test_a_best_of_holds_if_a_laboratory_would_rather_print_it_than_not():
    probabilities = [best_of(solved(count), 0.95, 3).value for count in range(1, 7)]
    assert probabilities == pytest.approx([0.30, 0.53, 0.71, 0.83, 0.92, 0.97], abs=5e-3)
    assert [best_of(solved(count), 0.95, 3).outcome for count in (1, 2)] == [FAILS, HOLDS]
    assert best_of(solved(0, 5), 0.95, 3).outcome == UNDECIDED
    # Fewer seeds than the source: the best of all.
    assert best_of([1.0, 0.0], 0.95, 3).value == 1


def test_a_value_needs_a_narrow_interval():
    near, far = [0.50, 0.52, 0.54, 0.51, 0.53], [0.70, 0.72, 0.74, 0.71, 0.73]
    assert value(near, 0.5, 0.05).outcome == HOLDS
    assert value(far, 0.5, 0.05).outcome == FAILS
    wide = value([0.2, 0.8, 0.5, 0.3, 0.7], 0.5, 0.05)
    assert wide.outcome == UNDECIDED
    assert wide.seeds_needed is not None
    spread = np.std([0.2, 0.8, 0.5, 0.3, 0.7], ddof=1)
    half = stats.t.ppf(0.975, wide.seeds_needed - 1) * spread / math.sqrt(wide.seeds_needed)
    assert half <= 0.1
    assert value([0.5], 0.5, 0.05).outcome == UNDECIDED


def test_an_order_is_the_permutation_test_with_welchs_interval():
    first, second = [0.9, 0.8, 0.85, 0.95, 0.7], [0.5, 0.6, 0.4, 0.55, 0.3]
    found = order(first, second)
    interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.p_value == pytest.approx(1 / 252)
    assert found.opposite_p_value == 1
    same = order([0.5] * 5, [0.5] * 5)
    assert (same.value, same.low, same.high, same.p_value, same.seeds_needed) == (0, 0, 0, 1, None)


def test_the_seeds_that_would_decide_are_more_than_there_are():
    assert existence(solved(0, 5), 0.95).seeds_needed == 10
    one = existence(solved(1), 0.95, claimed=False)
    assert one.seeds_needed is not None
    assert 20 < one.seeds_needed < 30
    needed = difference(solved(3), solved(0), 0.95).seeds_needed
    assert needed is not None
    assert 10 < needed < 40
    assert difference(solved(3), solved(3), 0.95).seeds_needed is None
    rng = np.random.default_rng(0)
    needed = order(rng.normal(0.5, 1, 8).tolist(), rng.normal(0, 1, 8).tolist()).seeds_needed
    assert needed is None or needed > 8


DRAWS = 400
SLACK = 3 * math.sqrt(LEVEL * (1 - LEVEL) / DRAWS)
"""Three standard errors of a simulated error."""


@pytest.mark.parametrize("true", simulate_findings.SHARES[::2])
def test_the_error_of_tests_of_shares(true):
    assert simulate_findings.shares("difference", true, true, 10, DRAWS)[HOLDS] <= LEVEL + SLACK
    assert simulate_findings.shares("difference", true, true, 10, DRAWS)[OPPOSITE] <= LEVEL + SLACK
    # "In none of ten seeds" errs about a share of 0.26 or more with a probability of 5 %.
    assert true < 0.26 or simulate_findings.shares("none", true, 0, 10, DRAWS)[HOLDS] <= LEVEL + SLACK


def test_what_cannot_be_learned_is_never_found_to_be():
    assert simulate_findings.shares("existence", 0, 0, 10, 20)[HOLDS] == 0
    assert simulate_findings.shares("best_of", 0, 0, 10, 20)[HOLDS] == 0
    assert simulate_findings.shares("existence", 0.5, 0, 10, DRAWS)[HOLDS] > 0.95


@pytest.mark.parametrize("kind", simulate_findings.SCORES)
def test_the_error_of_tests_of_means(kind):
    # Exact where both variants have the same scores; with unequal spreads somewhat above.
    level = LEVEL + (0.02 if kind == "three times the spread" else 0)
    assert simulate_findings.order(kind, 0, 5, DRAWS) <= level + SLACK
    assert simulate_findings.order(kind, 3, 5, DRAWS) > 0.5
    # A value within the margin shows that the gap is below three margins.
    assert simulate_findings.value(kind, 3, 1, 5, DRAWS) <= LEVEL + SLACK
