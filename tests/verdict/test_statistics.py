"""Intervals and comparisons: against worked numbers, against what definitions demand, and on any scores at all."""

import gc
import importlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attnbench.verdict.statistics import best, compare_pairs, mean_interval, proportion_interval

SEEDS = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection():
    """statsmodels' multipletests collects garbage at every call, which takes long where much is imported."""
    importlib.import_module("statsmodels.stats.multitest")
    gc.freeze()
    yield
    gc.unfreeze()


def by_seed(*values):
    return dict(enumerate(values))


def accuracies(scores, **changes):
    return compare_pairs(scores, **{"smallest_difference": 0.01, "relative": False, **changes})


def pair(comparisons, first, second):
    (found,) = [entry for entry in comparisons if (entry.first, entry.second) == (first, second)]
    return found


values = st.floats(0, 1, allow_subnormal=False).map(lambda value: round(value, 3))
scores_of_some = st.dictionaries(
    st.sampled_from("abcde"), st.dictionaries(st.sampled_from(SEEDS), values, max_size=5), min_size=2, max_size=5
)


def test_the_mean_interval_is_students():
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.num) == (2.0, 3)
    # t(0.975, 2) = 4.302653 times the standard error 1 / sqrt(3).
    assert interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)


def test_one_value_has_no_interval_and_equal_values_one_of_no_width():
    one, equal = mean_interval([0.1]), mean_interval([0.1, 0.1, 0.1])
    assert (one.mean, one.low, one.high, one.num) == (0.1, None, None, 1)
    assert (equal.mean, equal.low, equal.high, equal.num) == (0.1, 0.1, 0.1, 3)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_the_proportion_interval_is_wilsons_and_stays_inside():
    low, high = proportion_interval(0.9, 10)
    # Newcombe (1998) by hand: centre (9 + z^2 / 2) / (10 + z^2), z = 1.959964.
    assert (low, high) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert proportion_interval(1.0, 50)[1] == 1.0
    assert [proportion_interval(0.0, num)[0] for num in (50, 1000)] == [0.0, 0.0]
    for rate, num_items in ((1.1, 10), (-0.1, 10), (0.5, 0)):
        with pytest.raises(ValueError, match="no proportion"):
            proportion_interval(rate, num_items)


def test_a_clear_difference_is_separated_by_the_paired_test():
    scores = {"a": by_seed(0.90, 0.80, 0.70), "b": by_seed(0.85, 0.74, 0.66)}
    (result,) = accuracies(scores)
    assert result.difference == pytest.approx(0.05)
    assert result.p_value == pytest.approx(stats.ttest_1samp([0.05, 0.06, 0.04], 0).pvalue)
    assert result.adjusted_p_value == result.p_value
    assert (result.is_separated, result.verdict, result.num_seeds) == (True, "separated", 3)
    # Seeds that move both scores alike do not hide it: unpaired, these are far from separated.
    assert stats.ttest_ind(list(scores["a"].values()), list(scores["b"].values())).pvalue > 0.5


def test_seeds_are_paired_by_number_not_by_order():
    first = {2: 0.70, 0: 0.90, 1: 0.80, 7: 0.1}
    (result,) = accuracies({"a": first, "b": by_seed(0.85, 0.74, 0.66)})
    assert (result.num_seeds, result.difference) == (3, pytest.approx(0.05))


def test_holm_multiplies_the_smallest_p_by_the_number_of_pairs():
    scores = {"a": by_seed(0.90, 0.80, 0.70), "b": by_seed(0.85, 0.74, 0.66), "c": by_seed(0.5, 0.9, 0.1)}
    alone, family = accuracies({name: scores[name] for name in "ab"})[0], accuracies(scores)
    assert pair(family, "a", "b").p_value == alone.p_value
    assert pair(family, "a", "b").adjusted_p_value == pytest.approx(3 * alone.p_value)
    assert pair(family, "a", "b").is_separated
    assert pair(family, "b", "c").verdict == "not separated: p = 0.57"
    # A variant that was not measured counts all the same.
    unmeasured = accuracies({"a": scores["a"], "b": scores["b"], "c": {}})
    assert pair(unmeasured, "a", "b").adjusted_p_value == pytest.approx(3 * alone.p_value)


def test_a_small_difference_does_not_matter_however_sure():
    (result,) = accuracies({"a": by_seed(0.9050, 0.9052, 0.9051), "b": by_seed(0.9, 0.9, 0.9)})
    assert result.adjusted_p_value < 0.05
    assert (result.is_separated, result.verdict) == (False, "difference below 0.01, the smallest that matters")
    (result,) = compare_pairs(
        {"a": by_seed(3.000, 3.001, 3.002), "b": by_seed(3.02, 3.0215, 3.022)}, smallest_difference=0.01, relative=True
    )
    assert (result.is_separated, result.verdict) == (False, "difference below 1 %, the smallest that matters")


def test_a_relative_difference_is_a_share_of_the_pairs_mean():
    scores = {"a": by_seed(300.0, 301.0, 302.0), "b": by_seed(303.5, 304.4, 305.5)}
    (relative,) = compare_pairs(scores, smallest_difference=0.01, relative=True)
    (absolute,) = compare_pairs(scores, smallest_difference=0.01, relative=False)
    assert (relative.is_separated, absolute.is_separated) == (True, True)
    (coarser,) = compare_pairs(scores, smallest_difference=0.012, relative=True)
    assert not coarser.is_separated


@pytest.mark.parametrize(("other", "is_separated"), [(1.0, False), (0.995, False), (0.99, True), (0.5, True)])
def test_without_variance_the_smallest_difference_alone_decides(other, is_separated):
    (result,) = accuracies({"a": by_seed(1.0, 1.0, 1.0), "b": by_seed(other, other, other)})
    assert result.is_separated is is_separated
    assert result.verdict == "no variance: decided by the smallest difference alone"
    assert (result.p_value, result.adjusted_p_value) == (None, None)
    assert result.low == result.high == result.difference
    # 0.3 - 0.2 and 0.8 - 0.7 differ in their last bits.
    (result,) = accuracies({"a": by_seed(0.3, 0.8, 0.5), "b": by_seed(0.2, 0.7, 0.4)})
    assert (result.p_value, result.is_separated) == (None, True)


def test_fewer_than_three_common_seeds_are_exploratory():
    scores = {"a": by_seed(0.9, 0.9, 0.8), "b": {0: 0.1, 1: 0.2, 9: 0.1}, "c": {}}
    for result in accuracies(scores):
        assert (result.is_separated, result.p_value) == (False, None)
        assert result.verdict == "exploratory: fewer than 3 seeds"
    assert pair(accuracies(scores), "a", "c").difference is None


def test_with_a_reference_the_family_is_the_pairs_with_it():
    scores = {
        name: by_seed(*(0.1 * index + 0.01 * seed**index for seed in range(3))) for index, name in enumerate("abc")
    }
    results = accuracies(scores, reference="b")
    assert [(entry.first, entry.second) for entry in results] == [("a", "b"), ("c", "b")]
    with pytest.raises(ValueError, match="reference d"):
        accuracies(scores, reference="d")


PERFECT, GOOD, POOR = by_seed(1.0, 1.0, 1.0), by_seed(0.8, 0.81, 0.82), by_seed(0.1, 0.11, 0.1)


@pytest.mark.parametrize(
    ("scores", "reference", "winner"),
    [
        ({"a": GOOD, "b": PERFECT, "c": POOR}, None, "b"),
        ({"a": PERFECT, "b": PERFECT, "c": POOR}, None, None),
        ({"a": PERFECT, "b": {}, "c": POOR}, None, "a"),
        ({"a": PERFECT, "b": {0: 0.1}, "c": POOR}, None, None),
        ({"a": PERFECT, "b": GOOD, "c": POOR}, "c", None),
        ({"a": PERFECT, "b": GOOD, "c": POOR}, "a", "a"),
        ({"a": PERFECT, "b": {}}, None, None),
        ({"a": PERFECT}, None, None),
        ({}, None, None),
    ],
)
def test_the_best_is_separated_from_every_other(scores, reference, winner):
    comparisons = accuracies(scores, reference=reference)
    assert best(scores, comparisons, higher_is_better=True) == winner
    negative = {name: {seed: -value for seed, value in of.items()} for name, of in scores.items()}
    assert best(negative, accuracies(negative, reference=reference), higher_is_better=False) == winner


@settings(max_examples=60, deadline=None)
@given(scores_of_some)
def test_names_and_their_order_decide_nothing(scores):
    forward = {frozenset((entry.first, entry.second)): entry for entry in accuracies(scores)}
    backward = accuracies(dict(reversed(scores.items())))
    assert len(forward) == len(backward)
    for entry in backward:
        other = forward[frozenset((entry.first, entry.second))]
        assert (entry.is_separated, entry.verdict) == (other.is_separated, other.verdict)
        assert entry.adjusted_p_value == pytest.approx(other.adjusted_p_value)
        if entry.difference is not None:
            assert entry.difference == pytest.approx(-other.difference, abs=1e-12)
    for higher_is_better in (True, False):
        winners = {
            best(given, comparisons, higher_is_better=higher_is_better)
            for given, comparisons in ((scores, accuracies(scores)), (dict(reversed(scores.items())), backward))
        }
        assert len(winners) == 1


@settings(max_examples=60, deadline=None)
@given(scores_of_some)
def test_adjustment_only_raises_p_values_and_keeps_their_order(scores):
    tested = [entry for entry in accuracies(scores) if entry.p_value is not None]
    assert all(entry.adjusted_p_value >= entry.p_value for entry in tested)
    ordered = [entry.adjusted_p_value for entry in sorted(tested, key=lambda entry: entry.p_value)]
    assert ordered == sorted(ordered)
    assert all(not entry.is_separated or abs(entry.difference) >= 0.01 * (1 - 1e-9) for entry in tested)


@settings(max_examples=60, deadline=None)
@given(scores_of_some, st.dictionaries(st.sampled_from(SEEDS), values, max_size=5))
def test_one_variant_more_never_makes_another_pair_easier(scores, added):
    before = accuracies(scores)
    after = {(entry.first, entry.second): entry for entry in accuracies({**scores, "z": added})}
    for entry in before:
        other = after[entry.first, entry.second]
        assert other.p_value == entry.p_value
        assert entry.is_separated or not other.is_separated
