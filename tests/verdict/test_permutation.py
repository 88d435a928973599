"""The permutation test of two means: against scipy, with ties, with more splits than are counted, and its level."""

import numpy as np
import pytest
from scipy import stats

from attnbench.verdict.levels import UNPAIRED
from attnbench.verdict.permutation import welch_p_value
from attnbench.verdict.statistics import Permutation


def permutation_p_value(first, second) -> float:
    """The permutation test alone."""
    return Permutation.one_sided(UNPAIRED, (first, second), 0.0)[0]


def unpaired_p_value(first, second) -> float:
    return UNPAIRED.one_sided((first, second), 0.0)[0]


def test_it_is_scipys_exact_test():
    rng = np.random.default_rng(1)
    for num_first, num_second in ((5, 5), (5, 8), (2, 7)):
        first, second = rng.normal(0.5, 1, num_first), rng.normal(0, 2, num_second)
        expected = stats.permutation_test(
            (first, second),
            lambda a, b, axis: a.mean(axis) - b.mean(axis),
            vectorized=True,
            n_resamples=10_000,
            alternative="greater",
        )
        assert permutation_p_value(first, second) == pytest.approx(expected.pvalue)


def test_equal_sums_apart_from_rounding_count():
    # 0.1 + 0.2 is not 0.3 in floating point: of six splits two have the observed sum, and one a larger one.
    assert permutation_p_value([0.1, 0.2], [0.3, 0.0]) == permutation_p_value([0.3, 0.0], [0.1, 0.2]) == 4 / 6
    assert permutation_p_value([0.7] * 3, [0.7] * 4) == 1.0


def test_welchs_test_is_scipys_and_both_tests_must_reject():
    rng = np.random.default_rng(4)
    for sizes in ((8, 8), (5, 9)):
        first, second = rng.normal(0.5, 1, sizes[0]), rng.normal(0, 3, sizes[1])
        expected = stats.ttest_ind(first, second, equal_var=False, alternative="greater").pvalue
        assert welch_p_value(first, second) == pytest.approx(expected)
        assert welch_p_value(first, second - 0.3, 0.3) == pytest.approx(expected)
        assert unpaired_p_value(first, second) == max(permutation_p_value(first, second), welch_p_value(first, second))
    assert unpaired_p_value([1, 1, 1], [0, 0, 0]) == pytest.approx(1 / 20)
    assert unpaired_p_value([0, 0, 0], [1, 1, 1]) == 1.0
    assert unpaired_p_value([1.0], [0.0]) == 0.5
