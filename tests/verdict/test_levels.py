"""Verdicts on ladders: the unpaired test beside scipy's, ladders that do not separate, and totals over rules."""

import math
from typing import Any

import numpy as np
import pytest
from made_rows import inputs_of, row, rows_of
from scipy import stats
from simulate_ladder import SHAPES, rejected

from attnbench.report.sections.answer import answer
from attnbench.report.sections.scores import score_table
from attnbench.results.metrics import Primary
from attnbench.results.protocol import protocol_of, rules
from attnbench.results.tables import TableCell
from attnbench.settings.errors import UserError
from attnbench.verdict.family import check_family, fewest_seeds
from attnbench.verdict.levels import UNPAIRED, limit, totals, welch_p_value
from attnbench.verdict.seeds import figures
from attnbench.verdict.statistics import Permutation
from attnbench.verdict.summary import summary

LEVEL = Primary(metric="doublings", kind="level", margin=0.5, hardest=["levels"])
PLACE = {"split": "test", "levels": 6, "chance": 0.0}


def doublings(variant: str, *values: float, evaluation: str = "ladder_recall", **settings: Any) -> list:
    return rows_of(variant, *values, metric="doublings", evaluation=evaluation, settings={**PLACE, **settings})


def samples(num_first: int = 8, num_second: int = 8, effect: float = 0.0, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(effect, 1, num_first)), tuple(rng.normal(0, 2, num_second))


@pytest.mark.parametrize("effect", [0.0, 1.0, 3.0])
def test_the_interval_has_the_differences_that_the_test_does_not_reject(effect):
    first, second = samples(6, 6, effect)
    low, high = UNPAIRED.interval((first, second), 0.95, resolution=0)
    assert low < np.mean(first) - np.mean(second) < high
    for shift, is_inside in ((low + 1e-6, True), (high - 1e-6, True), (low - 1e-6, False), (high + 1e-6, False)):
        moved = tuple(value - shift for value in first)
        assert (UNPAIRED.p_value((moved, second), resolution=0) > 0.05) == is_inside


def test_more_splits_than_are_counted_keep_the_level_and_agree_with_the_interval():
    first, second = samples(12, 12, 1.6)
    p_value = UNPAIRED.p_value((first, second), resolution=0)
    for alpha, excludes_zero in ((p_value * 1.001, True), (p_value * 0.99, False)):
        low, high = UNPAIRED.interval((first, second), 1 - alpha, resolution=0)
        assert (low > 0 or high < 0) == excludes_zero


def test_equal_scores_are_no_difference_and_few_seeds_have_no_ends():
    same = ((0.5,) * 8, (0.5,) * 8)
    assert UNPAIRED.p_value(same, resolution=0) == 1
    assert UNPAIRED.interval(same, 0.95, resolution=0.01) == (-0.01, 0.01)
    assert UNPAIRED.equivalence_p_value(same, 0.1, resolution=0) == pytest.approx(1 / math.comb(16, 8))
    assert UNPAIRED.interval(((1.0, 2.0), (5.0, 6.0)), 0.95, resolution=0) == (-math.inf, math.inf)


def test_a_family_with_too_few_seeds_is_refused():
    assert (fewest_seeds(UNPAIRED, 0.05), fewest_seeds(UNPAIRED, 0.05 / 60)) == (4, 7)
    names = [("ladder_recall", "a", "b")] * 60
    check_family(names, {"ladder_recall": LEVEL}, {"ladder_recall": 8}, {"ladder_recall": "plan.probe_seeds"})
    with pytest.raises(UserError, match=r"plan.probe_seeds: 6 seeds can decide nothing .* it takes 7 seeds"):
        check_family(names, {"ladder_recall": LEVEL}, {"ladder_recall": 6}, {"ladder_recall": "plan.probe_seeds"})


def test_power_is_students_of_two_samples_and_0_with_too_few_seeds():
    rng, alpha = np.random.default_rng(3), 0.05
    found = [
        UNPAIRED.p_value((rng.normal(1, 0.7, 8), rng.normal(0, 0.7, 8)), resolution=0) <= alpha for _ in range(400)
    ]
    assert UNPAIRED.power(1.0, 0.7 * math.sqrt(2), alpha, 8) == pytest.approx(np.mean(found), abs=0.07)
    assert UNPAIRED.power(9.0, 1.0, alpha, 3) == 0
    assert UNPAIRED.equivalence_power(0.0, 0.1, 0.5, alpha, 8) > 0.99


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


UNEQUAL_SHAPES = ("two-peaked against normal", "one failing seed in twelve against none")
"""Few seeds look unlike their mean; docs/ladder.md has the error."""


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in UNEQUAL_SHAPES])
def test_the_error_is_at_most_its_level_but_for_simulation_error(shape):
    number = 600
    for level, error in zip((0.05, 0.2), rejected(shape, 0.0, (0.05, 0.2), number), strict=True):
        assert error <= level + 3 * math.sqrt(level * (1 - level) / number)


def told(*rows: list, **protocol: Any) -> dict[str, list[str]]:
    variants = list(dict.fromkeys(it.identity.variant for of in rows for it in of))
    return answer(inputs_of([it for of in rows for it in of], variants, rank=variants, **protocol))


SPREAD = (0.0, 0.1, -0.1, 0.2, -0.2, 0.05, -0.05, 0.15)


def test_verdicts_on_levels_are_unpaired_and_in_doublings():
    high, low = ([5 + it for it in SPREAD], [3 + it for it in SPREAD])
    lines = told(doublings("a", *high), doublings("b", *reversed(low)), doublings("c", *low))
    (better,) = lines["Better"]
    assert better.startswith("a holds 2.00 [")
    assert " more doublings of recall than b, " in better
    assert better.endswith(" than c, more than 0.5 doublings.")
    assert lines["Equivalent"][0].startswith("b and c: ladder_recall ")
    assert lines["Equivalent"][0].endswith(", within 0.5 doublings.")
    assert lines["Detectable"][0].endswith(" doublings.")


@pytest.mark.parametrize(("mean", "where"), [(5.95, "ceiling"), (0.05, "floor")])
def test_two_at_the_ceiling_or_the_floor_are_not_separated(mean, where):
    there = [mean + it / 10 for it in SPREAD]
    rows = [doublings("a", *there), doublings("b", *[it + 0.01 for it in there])]
    rows.append(doublings("c", *[3 + it for it in SPREAD]))
    lines = told(*rows)
    assert lines["Not separated"] == [f"Both are at the {where}: a and b in ladder_recall."]
    assert "Equivalent" not in lines
    assert len(lines["Better"]) == 2 - (where == "floor")
    inputs = inputs_of([it for of in rows for it in of], ["a", "b", "c"], rank=["a", "b", "c"], reference="b")
    [first, *_] = score_table(summary(inputs.figures, inputs.verdicts)).lines
    assert isinstance(first[1], TableCell)
    assert first[1].notes == (f"at the {where}, not separated",)


def test_limits_are_of_both_means():
    assert limit(([5.9, 5.9], [5.88, 5.88]), 6) == "ceiling"
    assert limit(([5.9, 5.9], [5.8, 5.9]), 6) == ""
    assert limit(([0.1, -0.1], [0.11, 0.1]), 6) == "floor"
    assert limit(([0.1, 0.1], [0.12, 0.12]), 6) == ""
    assert limit((), 6) == limit(([1.0], [1.0]), None) == ""


def test_the_doublings_of_rules_are_summed_for_seeds_that_have_them_all():
    def of_rule(rule: str, *values: float | None, variant: str = "a") -> list:
        settings = {"rule": rule, "split": "test", "levels": 2, "chance": 0.0, "learning_rate": 0.01}
        return [
            row(variant, seed, "doublings", value, settings=settings, evaluation="ladder_state", of=of)
            for seed, value in enumerate(values)
            for of in [{"status": "diverged", "reason": "nan"} if value is None else None]
        ]

    rows = [*of_rule("parity", 2.0, 1.5, 1.0), *of_rule("s3", 1.0, None), *of_rule("a5", 0.25, 0.5)]
    found = totals(rows)
    assert [(it.identity.seed, it.measurement.value) for it in found] == [(0, 3.25), (1, 2.0)]
    assert found[0].measurement.settings == {"split": "test", "levels": 6, "chance": 0.0}
    total = next(it for it in figures(rows) if "rule" not in it.settings)
    assert (total.values, total.settings["levels"], LEVEL.hardness(total.settings)) == ({0: 3.25, 1: 2.0}, 6, (6,))
    assert totals(of_rule("parity", 1.0)) == []


def test_only_protocols_of_levels_name_their_test():
    accuracy = Primary(metric="accuracy", kind="accuracy", margin=0.01)
    assert "level" not in rules()["tests"]
    assert protocol_of(accuracy)["rules"] == protocol_of(None)["rules"] == rules()
    assert protocol_of(LEVEL)["rules"]["tests"]["level"] == UNPAIRED.name
