"""Findings: bounds, verdicts and the number of seeds that would decide."""

import math
from itertools import product

import numpy as np
import pytest

from attnbench.verdict.bounds import (
    FAIL,
    MISSES,
    NOT_RUN,
    PASS,
    REACHES,
    UNDECIDED,
    Estimate,
    capacity_correlation,
    difference,
    judge,
    judge_all,
    ratio,
    seeds_needed,
    share_of_seeds,
    window,
)

AT_LEAST, AT_MOST = (REACHES, math.inf), (-math.inf, MISSES)


def shares(count: int, num: int = 10):
    return share_of_seeds([1.0] * count + [0.0] * (num - count), 0.95)


def test_the_bounds_of_a_share_are_those_of_clopper_and_pearson():
    assert shares(10).low == pytest.approx(0.741, abs=5e-4)
    assert shares(0).high == pytest.approx(0.259, abs=5e-4)
    assert (shares(0).low, shares(10).high) == (0, 1)


@pytest.mark.parametrize(
    ("count", "limits", "verdict"),
    [(10, AT_LEAST, PASS), (9, AT_LEAST, UNDECIDED), (3, AT_LEAST, FAIL), (0, AT_LEAST, FAIL), (0, AT_MOST, PASS),
     (2, AT_MOST, PASS), (3, AT_MOST, UNDECIDED), (9, AT_MOST, FAIL)],
)  # fmt: skip
def test_a_share_is_judged_by_the_bound_of_the_stated_side(count, limits, verdict):
    assert judge(shares(count), limits) == verdict


def test_a_bound_that_equals_a_limit_but_for_rounding_lies_inside_it():
    found = difference([0.1, 0.2, 0.3] * 4, [0.0] * 12)
    at_limit = Estimate(value=0.2, low=1.0 - 0.9, high=0.1 + 0.2, num_seeds=12)
    assert at_limit.low < 0.1 < 0.3 < at_limit.high
    assert judge(at_limit, (0.1, 0.3)) == PASS
    assert judge(at_limit, (0.3, math.inf)) == judge(at_limit, (-math.inf, 0.1)) == UNDECIDED
    assert judge(found, (found.low + 1e-12, found.high - 1e-12)) == PASS
    # A seed of exactly the threshold reaches it, and so do the means of a rate and of a load.
    below = 0.95 - 1e-16
    assert below < 0.95
    assert share_of_seeds([below] * 4, 0.95).value == 1
    assert window({1e-3: [below] * 3, 1e-2: [below] * 3}, 0.95).value == pytest.approx(1)
    held = {name: {8: [below if has else 0.0] * 4} for name, has in (("a", 0), ("b", 1), ("c", 1))}
    assert capacity_correlation(held, {"a": 1, "b": 2, "c": 3}, 0.95).value > 0.8


def test_a_difference_has_the_bounds_that_its_permutation_test_does_not_reject():
    first, second = [0.9, 0.95, 0.99, 0.97, 0.93, 0.9, 0.96, 0.98, 0.94, 0.92], [0.5] * 10
    found = difference(first, second)
    signs = np.array(list(product([-1, 1], repeat=10)))

    def p(centre: float) -> float:
        left = np.subtract(first, second) - centre
        return float(np.mean((signs * left).sum(1) >= left.sum() - 1e-12))

    assert p(found.low - 1e-6) <= 0.05 < p(found.low + 1e-3)
    assert judge(found, (0.3, math.inf)) == PASS
    assert judge(found, (0.5, math.inf)) == FAIL
    assert judge(found, (0.44, math.inf)) == UNDECIDED


def test_a_ratio_has_the_bounds_at_which_its_differences_lie_about_zero():
    first, second = [120.0, 150, 140, 180, 130, 160, 125, 145], [100.0, 110, 90, 130, 100, 120, 105, 95]
    found = ratio(first, second)
    for end, side in ((found.low, 1), (found.high, -1)):
        rest = np.subtract(first, np.multiply(end * (1 - side * 1e-6), second))
        assert difference((side * rest).tolist(), [0.0] * 8).low > 0
        rest = np.subtract(first, np.multiply(end * (1 + side * 1e-2), second))
        assert difference((side * rest).tolist(), [0.0] * 8).low <= 0
    assert judge(found, (0.67, 1.5)) == PASS
    assert judge(found, (0.67, 1.5), outside=True) == FAIL
    assert judge(ratio(np.multiply(first, 2).tolist(), second), (0.67, 1.5), outside=True) == PASS


def test_decades_of_rates_leave_gaps_out():
    found = window({1e-4: [0.0] * 3, 1e-3: [1.0] * 3, 1e-2: [0.0] * 3, 1e-1: [1.0] * 3}, 0.9)
    assert found.value == pytest.approx(0.3)
    assert found.low == found.high == pytest.approx(0.3)


def test_capacity_that_follows_size_correlates_and_equal_capacities_do_not():
    grows = {name: {8: [1.0] * 4, 16: [ok] * 4, 32: [best] * 4} for name, ok, best in
             (("small", 0, 0), ("middle", 1, 0), ("large", 1, 1))}  # fmt: skip
    sizes = {"small": 10, "middle": 20, "large": 30}
    assert capacity_correlation(grows, sizes, 0.9).low == 1
    assert capacity_correlation(grows, {"small": 30, "middle": 20, "large": 10}, 0.9).high == -1
    assert capacity_correlation(dict.fromkeys(sizes, grows["large"]), sizes, 0.9).value == 0


def test_of_several_contrasts_all_must_pass():
    assert judge_all([PASS, PASS]) == PASS
    assert judge_all([PASS, UNDECIDED]) == UNDECIDED
    assert judge_all([PASS, UNDECIDED, FAIL]) == FAIL
    assert judge_all([PASS, NOT_RUN]) == NOT_RUN


def test_undecided_names_the_seeds_that_would_decide():
    needed = seeds_needed(shares(9), AT_LEAST, is_share=True)
    assert needed is not None
    assert 10 < needed <= 40
    assert seeds_needed(shares(14, 20), AT_LEAST, is_share=True) is None
    found = difference([0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.42, 0.44, 0.5, 0.6], [0.0] * 10)
    assert judge(found, (0.405, math.inf)) == UNDECIDED
    needed = seeds_needed(found, (0.405, math.inf), is_share=False)
    assert needed is not None
    assert 10 < needed <= 30


@pytest.mark.parametrize("seed", range(20))
def test_shuffled_variants_never_pass(seed):
    rng = np.random.default_rng(seed)
    with_it, without = rng.uniform(0.97, 1, 10), rng.uniform(0.1, 0.4, 10)
    swapped = rng.permutation([True] * 5 + [False] * 5)
    first, second = np.where(swapped, without, with_it).tolist(), np.where(swapped, with_it, without).tolist()
    assert judge(share_of_seeds(first, 0.95), AT_LEAST) != PASS
    assert judge(difference(first, second), (0.1, math.inf)) != PASS
    assert judge(difference(with_it.tolist(), without.tolist()), (0.1, math.inf)) == PASS
