"""Intervals and paired tests: against scipy, at their edges, and inverted."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from simulate_verdicts import NATS, simulate

from attnbench.verdict.power import NUM_DRAWS
from attnbench.verdict.statistics import (
    SIGN_FLIP,
    STUDENT,
    bounded_interval,
    share_interval,
    student_interval,
)

TESTS = {"student": STUDENT, "sign flip": SIGN_FLIP}
accuracies = st.lists(st.floats(-0.5, 0.5).map(lambda value: round(value, 3)), min_size=2, max_size=11)


def test_the_interval_of_a_mean_is_students():
    interval = student_interval([1.0, 2.0, 3.0])
    low, high = stats.t.interval(0.95, 2, loc=2, scale=1 / math.sqrt(3))
    assert interval.mean == 2.0
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))


def test_one_value_has_no_interval_and_equal_values_have_one_of_some_width():
    one, equal = student_interval([0.1]), student_interval([0.1, 0.1, 0.1])
    assert (one.mean, one.low, one.high) == (0.1, None, None)
    assert equal.mean == 0.1
    assert equal.low < 0.1 < equal.high
    with pytest.raises(ValueError, match="no mean"):
        student_interval([])


@settings(max_examples=60, deadline=None)
@example([0.0, 0.0, 0.0, 0.0, 5e-324])
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_interval_of_an_accuracy_never_leaves_its_bounds_and_is_never_of_no_width(values):
    interval = bounded_interval(values)
    assert 0 <= interval.low < interval.high <= 1
    assert interval.low - 1e-9 <= interval.mean <= interval.high + 1e-9


def test_the_interval_of_a_share_is_clopper_and_pearsons():
    exact = stats.binomtest(8, 10).proportion_ci(0.95, method="exact")
    assert share_interval(8, 10) == (pytest.approx(exact.low), pytest.approx(exact.high))
    assert (share_interval(0, 10)[0], share_interval(10, 10)[1]) == (0.0, 1.0)
    for count, num in ((-1, 10), (11, 10), (0, 0)):
        with pytest.raises(ValueError, match="not a share"):
            share_interval(count, num)


def test_students_test_is_scipys():
    first, second = [0.1, 0.3, 0.2, 0.5], [0.0, 0.1, 0.2, 0.1]
    differences = np.subtract(first, second)
    assert STUDENT.p_value(differences, resolution=0) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    above = stats.ttest_1samp(differences, -0.2, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.2, alternative="less").pvalue
    assert STUDENT.equivalence_p_value(differences, 0.2, resolution=0) == pytest.approx(max(above, below))


@settings(max_examples=40, deadline=None)
@given(accuracies)
@example([0.0, 0.0, 0.467, -0.133, 0.168, -0.133, -0.184, -0.184])
def test_the_sign_flip_test_is_scipys(differences):
    # In thousandths, whose sums are exact: scipy tells sums apart that are equal but for rounding.
    exact = stats.permutation_test(
        (np.round(np.multiply(differences, 1000)),),
        np.sum,
        permutation_type="samples",
        n_resamples=np.inf,
        vectorized=True,
    )
    assert SIGN_FLIP.p_value(differences, resolution=0) == pytest.approx(exact.pvalue)


def test_of_many_seeds_a_fixed_million_of_sign_flips_is_near_students_test():
    differences = np.random.default_rng(0).normal(0.1, 0.2, 24).tolist()
    p_value = SIGN_FLIP.p_value(differences, resolution=0)
    assert p_value == SIGN_FLIP.p_value(list(differences), resolution=0)
    assert p_value == pytest.approx(STUDENT.p_value(differences, resolution=0), rel=0.2)


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 6])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_interval_excludes_zero_exactly_where_its_test_rejects(name, level, data):
    test = TESTS[name]
    differences = data.draw(accuracies)
    low, high = test.interval(differences, level, resolution=1e-9)
    p_value = test.p_value(differences, resolution=1e-9)
    if abs(p_value - (1 - level)) > 1e-9 and any(differences):
        assert (p_value < 1 - level) == (not low <= 0 <= high)
    assert low < high


def test_differences_below_one_item_are_found_and_their_interval_agrees():
    """Nine of twelve seeds have one item more: 0.75 items on average, and no chance of either sign."""
    differences, resolution = [0.01] * 9 + [0.0] * 3, 0.01
    low, high = SIGN_FLIP.interval(differences, 0.95, resolution=resolution)
    assert SIGN_FLIP.p_value(differences, resolution=resolution) < 0.05
    assert 0 < low < high
    assert SIGN_FLIP.interval([-it for it in differences], 0.95, resolution=resolution) == pytest.approx((-high, -low))
    # Where the test does not reject, the interval is an item wide on both sides.
    low, high = SIGN_FLIP.interval([0.01, *[0.0] * 11], 0.95, resolution=resolution)
    assert (low, high) == pytest.approx((0.01 / 12 - 0.01, 0.01 / 12 + 0.01))


def test_permutations_have_a_smallest_p_value():
    assert SIGN_FLIP.p_value([0.9] * 5, resolution=0) == SIGN_FLIP.smallest_p(5) == 2**-4
    assert SIGN_FLIP.smallest_p(8) <= 0.05 / 6 < SIGN_FLIP.smallest_p(7)


def test_the_seeds_that_are_named_grow_with_the_spread_and_end_at_a_hundred():
    def needed(spread, effect=0.0):
        return STUDENT.seeds_needed(effect, spread, NATS.margin, alpha=0.05 / 6, equivalence_alpha=0.05 / 6)

    assert needed(0.0073) == 11
    assert needed(0.005) < needed(0.0073) < needed(0.02)
    assert needed(0.2) is None
    assert needed(0.0073, effect=0.05) < needed(0.0073, effect=0.015)


def test_seeds_are_named_by_the_test_that_they_are_for():
    # Six of ten seeds that one alone solves: with twelve of them, which Student's distribution names, less than 0.8.
    solved = [*[0.95, 0.94, 0.96, 0.95, 0.93, 0.97], *[0.01, -0.01, 0.0, 0.02]]
    effect, spread, alpha = float(np.mean(solved)), float(np.std(solved, ddof=1)), 0.01
    given = {"alpha": alpha, "equivalence_alpha": alpha, "more_than": 10, "seen": solved}
    assert STUDENT.seeds_needed(effect, spread, 0.01, **given) == 12
    assert SIGN_FLIP.seeds_needed(effect, spread, 0.01, **given) == 13
    found = {
        num: np.mean([SIGN_FLIP.p_value(draw.tolist(), resolution=0.0) <= alpha for draw in draws])
        for num in (12, 13)
        for draws in [np.random.default_rng(1).choice(solved, (1_000, num))]
    }
    assert found[12] < 0.8 < found[13]
    # Against the other side the same seeds count as much.
    mirrored = {**given, "seen": [-value for value in solved]}
    assert SIGN_FLIP.seeds_needed(-effect, spread, 0.01, **mirrored) == 13


def test_the_power_of_sign_flips_counts_a_mean_of_zero_as_their_test_does():
    # Half of the draws have subsets whose mean is 0, which the test does not reject, whatever the last bits say.
    seen, num, alpha = [0.3, 0.2, 0.1, -0.1, 0.4, 0.3], 8, 0.05
    effect, spread = float(np.mean(seen)), float(np.std(seen, ddof=1))
    draws = np.random.default_rng(0).choice(seen, (num, NUM_DRAWS)).T.tolist()
    found = [SIGN_FLIP.p_value(draw, resolution=0.0) <= alpha and math.fsum(draw) > 0 for draw in draws]
    assert SIGN_FLIP.power(effect, spread, alpha, num, seen) == np.mean(found)


def test_an_interval_that_ends_at_zero_but_for_rounding_holds_it():
    differences, level = [0.1, 0.2, -0.3, 0.4, 0.5, 0.6], 1 - 8 / 64
    assert 0 < 0.1 + 0.2 - 0.3 < 1e-15
    assert SIGN_FLIP.p_value(differences, resolution=0) == 10 / 64
    assert SIGN_FLIP.interval(differences, level, resolution=0) == (0.0, 0.5)
    opposite = [-value for value in differences]
    assert SIGN_FLIP.interval(opposite, level, resolution=0) == (-0.5, 0.0)


@pytest.mark.slow
def test_errors_power_and_coverage_are_what_the_protocol_says():
    results = list(simulate(2_000))
    assert len(results) == 34
    assert [result.title for result in results if not result.holds] == []
