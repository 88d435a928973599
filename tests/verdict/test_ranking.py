"""Families of pairs and their verdicts."""

import dataclasses
import json
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from made_rows import row, rows_of
from simulate_verdicts import ACCURACY, NATS, pairs_with_reference

from attnbench.report.inputs import read_inputs
from attnbench.report.sections import words
from attnbench.report.sections.verdicts import verdict_lines
from attnbench.settings.errors import UserError
from attnbench.settings.schema import LOOKS
from attnbench.verdict.control import control_of, control_sentence, judge_control
from attnbench.verdict.family import Pair, family
from attnbench.verdict.ranking import holm, judge, noise_floor
from attnbench.verdict.seeds import figures
from attnbench.verdict.statistics import STUDENT, student_interval
from attnbench.verdict.summary import verdicts_of

PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
ACCURACY_OF_COPY = dataclasses.replace(ACCURACY, metric="symbol_accuracy")
SETTINGS = {"length": 50, "beyond_training": False, "chance": 1 / 26}


def pair(differences, primary=ACCURACY, **others):
    return Pair(
        **{"evaluation": "copy", "primary": primary, "settings": {}, "first": "a", "second": "b", **others},
        differences=tuple(differences),
    )


def one(*pairs) -> Any:
    return judge(pairs)[0]


def copied(**variants):
    """Rows of copy at its primary setting, a value a seed; None diverged."""
    diverged = {"status": "diverged", "reason": "at step 7"}
    return [
        row(name, seed, value=value, settings=SETTINGS, of=diverged if value is None else None)
        for name, values in variants.items()
        for seed, value in enumerate(values)
    ]


def judged(rows, rank, reference="softmax") -> Any:
    return verdicts_of(figures(rows), rank=rank, reference=reference)


def test_ten_seeds_at_one_and_ten_at_chance_are_better_in_the_family_of_a_comparison():
    rest = [pair(np.random.default_rng(index).normal(0, 0.02, 10)) for index in range(8)]
    solved = np.random.default_rng(9).uniform(0.93, 0.97, 10)
    verdict = one(pair(solved), *rest)
    assert (verdict.outcome, verdict.exceeds_margin, verdict.adjusted_p_value) == (
        "better",
        True,
        pytest.approx(9 / 512),
    )
    assert verdict.low > 0.9
    with_two = one(pair([*solved[:8], -0.01, -0.02]), *rest)
    assert with_two.outcome == "undecided"
    assert 10 < with_two.seeds_needed <= 20


def test_five_seeds_of_an_accuracy_separate_nothing_and_the_seeds_that_can_are_named():
    verdict = one(pair([0.9] * 5), *[pair([0.0, 0.1, -0.1, 0.0, 0.05])] * 5)
    assert (verdict.outcome, verdict.seeds_needed) == ("undecided", 8)
    assert (verdict.low, verdict.high) == (-1.0, 1.0)


def test_equal_variants_are_equivalent_where_the_seeds_suffice():
    assert one(pair([0.001, -0.001] * 6)).is_equivalent
    assert not one(pair([0.03, -0.03] * 6)).is_equivalent
    barely = one(pair([0.004, 0.0041, 0.0039, 0.004], NATS))
    assert (barely.outcome, barely.is_equivalent, barely.is_decided) == ("worse", True, True)
    assert "by less than matters" in words.verdict_sentence(barely)


def solving(**variants):
    """Rows of copy, an accuracy a seed, with the seeds that solve it, which are those of at least 0.95."""
    rows = copied(**variants)
    solved = [dataclasses.replace(it.measurement, metric="solved", settings={"chance": 0.0}) for it in rows]
    solved = [dataclasses.replace(it, value=int((it.value or 0) >= 0.95)) for it in solved]
    return [*rows, *(dataclasses.replace(it, measurement=of) for it, of in zip(rows, solved, strict=True))]


@pytest.mark.parametrize(
    ("others", "solved", "said"),
    [
        # Of seeds that fail none was seen: up to 22 % may.
        (
            [0.99] * 12,
            (12, 12),
            "are equivalent in symbols right of copy at length 50, of seeds that solve it, within",
        ),
        ([0.9] + [0.99] * 11, (11, 12), "(11 and 12 of 12 seeds solved)"),
        ([0.05] + [0.99] * 11, (11, 12), "(11 and 12 of 12 seeds solved)"),
        ([0.05] * 12, (0, 12), "softmax copies 94.0 [93.0, 95.0] more of 100 symbols than mine at length 50"),
    ],
)
def test_a_verdict_on_accuracies_says_which_seeds_it_is_about(others, solved, said):
    rows = solving(softmax=[0.99] * 12, mine=others)
    (verdict,) = judged(rows, ["softmax", "mine"])
    assert verdict.pair.solved == solved
    assert said in words.verdict_sentence(verdict)
    if verdict.winner == "softmax":
        assert "(12 and 0 of 12 seeds solved)" in words.verdict_sentence(verdict)
    lines = verdict_lines([verdict])
    assert ("seeds that solve it" in str(lines)) == (solved == (12, 12))
    assert words.of_seeds(verdict) == (", of seeds that solve it" if solved == (12, 12) else "")


def test_equal_accuracies_are_never_said_to_be_of_all_seeds():
    """Seeds that both fail leave no difference, and where no row says what is solved nobody knows how often they do."""
    accuracies = [0.05, *[0.99] * 11]
    (mixed,) = judged(solving(softmax=accuracies, mine=accuracies), ["softmax", "mine"])
    (unknown,) = judged(copied(softmax=accuracies, mine=accuracies), ["softmax", "mine"])
    (none,) = judged(solving(softmax=[0.05] * 12, mine=[0.05] * 12), ["softmax", "mine"])
    assert (mixed.pair.solved, unknown.pair.solved, none.pair.solved) == ((11, 11), None, (0, 0))
    for verdict, of in ((mixed, "like these"), (unknown, "like these"), (none, "that do not solve it")):
        assert verdict.is_equivalent
        assert f", of seeds {of}, within 0.01" in words.verdict_sentence(verdict)
        assert f"copy (seeds {of})" in verdict_lines([verdict])["Equivalent"][0]


def test_an_interval_that_ends_at_the_margin_but_for_rounding_is_not_beyond_it():
    at_margin = one(pair([0.99 - 0.98] * 12))
    assert at_margin.pair.differences[0] > ACCURACY.margin
    assert not dataclasses.replace(at_margin, low=0.99 - 0.98, high=0.02).exceeds_margin
    assert not dataclasses.replace(at_margin, low=-0.02, high=0.98 - 0.99).exceeds_margin
    assert dataclasses.replace(at_margin, low=0.0101, high=0.02).exceeds_margin


def test_a_sentence_begins_with_the_winner_and_says_by_how_much_it_is_ahead():
    worse = one(pair([-0.3 + 0.001 * seed for seed in range(10)]))
    assert worse.winner == "b"
    assert words.verdict_sentence(worse).startswith("b copies 29.55 [29.32, 29.77] more of 100 symbols than a, by more")
    # 0.05 nats below are 4.88 % of the other's perplexity, whichever of the two is the reference.
    lower = one(pair([0.05, 0.051, 0.049, 0.0502], NATS))
    assert words.verdict_sentence(lower).startswith("b has 4.88 % [4.76, 5.01] lower perplexity in copy than a, by")
    higher = one(pair([-0.05, -0.051, -0.049, -0.0502], NATS))
    assert words.verdict_sentence(higher).startswith("a has 4.88 % [4.76, 5.01] lower perplexity in copy than b, by")
    assert words.difference(higher) == "-4.88 % [-5.01, -4.76]"
    # No winner has more than 100 % less.
    far = one(pair([2.0, 2.01, 1.99, 2.002], NATS))
    assert "b has 86.47 % [86.30, 86.65] lower" in words.verdict_sentence(far)


def test_what_no_seed_number_within_reason_decides_says_so():
    verdict = one(pair(np.random.default_rng(2).permutation([-0.5, 0.5] * 5)))
    assert verdict.seeds_needed is None
    assert "more than 100 would decide" in words.verdict_sentence(verdict)


def test_a_diverged_seed_makes_no_winner():
    rows = copied(softmax=[0.9] * 5, mine=[0.99, 0.99, 0.99, None, None])
    (verdict,) = judged(rows, ["softmax", "mine"])
    assert verdict.pair.differences == pytest.approx([0.09] * 3 + [1 / 26 - 0.9] * 2)
    assert verdict.winner is None
    rows = copied(softmax=[0.1 + 0.001 * seed for seed in range(12)], mine=[*[0.99] * 11, None])
    (verdict,) = judged(rows, ["softmax", "mine"])
    assert verdict.p_value < 0.05
    assert (verdict.outcome, verdict.winner) == ("undecided", None)
    assert "some of its seeds diverged" in words.verdict_sentence(verdict)


def test_a_number_that_is_chance_because_seeds_diverged_says_so():
    rows = copied(softmax=[1 / 26 + 0.0001 * (-1) ** seed for seed in range(10)], mine=[None] * 10)
    (verdict,) = judged(rows, ["softmax", "mine"])
    assert verdict.is_equivalent
    told = words.verdict_sentence(verdict)
    assert "equivalent" in told
    assert told.endswith("(diverged seeds of mine count as chance).")
    (line,) = verdict_lines([verdict])["Equivalent"]
    assert "(diverged seeds of mine count as chance)" in line


def test_a_diverged_language_model_counts_as_the_unigram():
    place = {"split": "test", "checkpoint": "best", "context": "full", "sequence_length": 256, "chance": 3.1}
    more = {"metric": "nats_per_character", "settings": place, "evaluation": "perplexity"}
    diverged = {"status": "diverged", "reason": "at step 7"}
    rows = [
        row(name, seed, value=value + 0.001 * seed if value else None, of=None if value else diverged, **more)
        for name, values in (("softmax", [1.2] * 5), ("mine", [1.1, 1.1, 1.1, 1.1, None]), ("lost", [None] * 5))
        for seed, value in enumerate(values)
    ]
    mine, lost = judged(rows, ["softmax", "mine", "lost"])
    assert mine.pair.differences[-1] == pytest.approx(3.1 - 1.204)
    assert (mine.outcome, mine.pair.failed) == ("undecided", ("mine",))
    assert (lost.outcome, lost.winner) == ("worse", "softmax")
    assert lost.difference == pytest.approx(3.1 - 1.202)


def test_nats_have_an_interval_over_blocks_of_text_beside_that_over_seeds():
    def of(value):
        return {"low": value - 0.1, "high": value + 0.2, "unit": "nat"}

    test = {"split": "test"}
    rows = [
        row("a", seed, "nats_per_character", value, settings=test, of=of(value))
        for seed, value in enumerate([1.0, 1.1, 1.3])
    ]
    found: list[Any] = figures(rows)
    (figure,) = found
    assert (figure.item_low, figure.item_high) == pytest.approx((figure.mean - 0.1, figure.mean + 0.2))
    assert figure.low == pytest.approx(student_interval([1.0, 1.1, 1.3]).low)


def test_what_a_machine_could_not_run_has_no_verdict_and_keeps_its_place():
    rows = [
        *copied(softmax=[0.5] * 8, linear=[0.4 + 0.01 * seed for seed in range(8)]),
        row("mine", value=None, settings=SETTINGS),
    ]
    linear, mine, absent = judged(rows, ["softmax", "linear", "mine", "absent"])
    assert (mine.outcome, mine.reason) == ("none", "mine ran out of memory at 1 of 1 seeds")
    assert (absent.outcome, absent.reason) == ("none", "absent was not measured")
    assert linear.adjusted_p_value == pytest.approx(3 * linear.p_value)
    assert "No verdict on mine and softmax" in words.verdict_sentence(mine)


def test_an_evaluation_of_which_nothing_was_measured_keeps_its_pairs_in_the_family():
    rows = copied(softmax=[0.5] * 8, linear=[0.4 + 0.01 * seed for seed in range(8)])
    primaries = {"copy": ACCURACY_OF_COPY, "perplexity": NATS}
    verdicts: Any = verdicts_of(figures(rows), rank=["softmax", "linear"], reference="softmax", primaries=primaries)
    alone, lost = verdicts
    assert alone.adjusted_p_value == pytest.approx(2 * alone.p_value)
    assert (lost.outcome, lost.reason) == ("none", "linear was not measured")


def test_seeds_are_paired_by_number():
    rows = copied(softmax=[0.1, 0.5, 0.9], linear=[0.2, 0.6, 1.0])
    (verdict,) = judged([*reversed(rows)], ["softmax", "linear"])
    assert verdict.pair.differences == pytest.approx([0.1] * 3)


def test_the_hardest_setting_is_the_one_that_is_tested():
    cells = [{"sequence_length": length, "num_pairs": pairs, "width": width} for length, pairs, width in
             ((64, 4, 64), (512, 64, 128), (512, 64, 64), (512, 8, 64))]  # fmt: skip
    rows = [r for cell in cells for name in ("softmax", "linear")
            for r in rows_of(name, 0.5, 0.6, metric="accuracy", settings=cell, evaluation="recall")]  # fmt: skip
    (verdict,) = judged(rows, ["softmax", "linear"])
    assert verdict.pair.settings == cells[2]
    # What reaches beyond the training length is no primary setting of copy.
    longer = {"length": 100, "beyond_training": True}
    rows = [*copied(softmax=[0.5], linear=[0.5]), *rows_of("softmax", 0.1, settings=longer)]
    assert judged(rows, ["softmax", "linear"])[0].pair.settings == SETTINGS


def test_many_variants_need_a_reference_and_it_must_be_ranked():
    names = [f"variant{index}" for index in range(7)]
    with pytest.raises(UserError, match="has 7 variants, but more than 6 need a reference"):
        family([], rank=names, reference=None, primaries={"copy": ACCURACY})
    pairs = family([], rank=names, reference="variant2", primaries={"copy": ACCURACY})
    assert {entry.second for entry in pairs} == {"variant2"}
    assert len(pairs) == 6
    assert len(family([], rank=names[:4], reference=None, primaries={"copy": ACCURACY, "x": NATS})) == 12
    with pytest.raises(UserError, match="reference=softmax: must be one of the ranked"):
        family([], rank=names[:2], reference="softmax", primaries={})


@pytest.mark.parametrize("seed", range(5))
def test_names_and_their_order_decide_nothing(seed):
    rng = np.random.default_rng(seed)
    scores = {name: rng.uniform(0.4, 0.9, 9).tolist() for name in "abcd"}
    scores["d"] = [0.02 + 0.001 * index for index in range(9)]
    new = dict(zip("abcd", random.Random(seed).sample("wxyz", 4), strict=True))
    renamed = [(new[name], values) for name, values in scores.items()]
    random.Random(seed).shuffle(renamed)

    def outcomes(rows, rank, reference):
        return {
            (verdict.pair.first, verdict.outcome, verdict.is_equivalent, verdict.level)
            for verdict in judged(rows, rank, reference)
        }

    expected = {(new[name], *rest) for name, *rest in outcomes(copied(**scores), list("abcd"), "a")}
    assert outcomes(copied(**dict(renamed)), [name for name, _ in renamed], new["a"]) == expected
    assert any(outcome == "worse" for _, outcome, *_ in expected)


def test_the_interval_of_every_pair_agrees_with_its_verdict():
    rng: Any = np.random.default_rng(0)
    for _ in range(50):
        pairs = [pair(rng.normal(rng.choice([0, 0.02, 0.3]), 0.02, 10), rng.choice([NATS, ACCURACY])) for _ in range(6)]
        verdicts: Any = judge(pairs)
        for verdict in verdicts:
            assert (verdict.winner is not None) == (not verdict.low <= 0 <= verdict.high)


def test_holm_s_levels_are_those_that_the_tests_were_held_to():
    result = holm([0.001, 0.2, 0.012, 0.03])
    assert result.rejected == [True, False, True, False]
    assert result.levels == pytest.approx([0.05 / 4, 0.05 / 2, 0.05 / 3, 0.05 / 2])
    assert holm([]).levels == []


def test_equal_p_values_are_held_to_one_level_in_whatever_order_they_stand():
    """Sign-flip tests of few seeds have many ties; the order in a yaml must not say whose interval is wide."""
    result = holm([0.001, 0.2, 0.001, 0.03, 0.03])
    assert result.rejected == [True, False, True, False, False]
    assert result.levels == pytest.approx([0.05 / 5, 0.05 / 3, 0.05 / 5, 0.05 / 3, 0.05 / 3])

    pairs = [pair([0.1 + 0.01 * i, *[0.2 + 0.03 * i] * 11], first=f"v{i}") for i in range(4)]
    forth, back = judge(pairs), judge(pairs[::-1])[::-1]
    assert [it.winner for it in forth] == [f"v{i}" for i in range(4)]
    assert [(it.low, it.high, it.level) for it in forth] == [(it.low, it.high, it.level) for it in back]


def test_the_noise_floor_is_what_could_have_been_detected():
    pairs = [*pairs_with_reference(NATS, np.random.default_rng(0).normal(1, 0.0073 / 2**0.5, (3, 10)))]
    (floor,) = noise_floor(pairs)
    assert floor.num_seeds == 10
    assert all(0.003 < it < 0.03 for it in floor.detectable)
    assert len(floor.detectable) == len(pairs)
    # Pairs that nobody could tell apart do not hide how well the others are.
    loud = dataclasses.replace(pairs[0], differences=tuple(10 * it for it in pairs[0].differences))
    (floor,) = noise_floor([*pairs, loud])
    assert max(floor.detectable) > 5 * median(floor.detectable)
    told = re.fullmatch(
        r"nats_per_character (\S+) and (\S+) % of perplexity",
        words.noise_sentence(floor),
    )
    assert told is not None
    assert float(told[2]) > 5 * float(told[1])
    (nothing,) = noise_floor([pair([0.1, 0.2, 0.3])])
    assert nothing.detectable == ()
    assert words.noise_sentence(nothing) == "copy none (3 seeds are too few, 6 would do)"
    (single,) = noise_floor([pair([0.1])])
    assert words.noise_sentence(single) == "copy none (1 seed is too few, 6 would do)"
    (some,) = noise_floor([pair([0.01, -0.01] * 5), pair([0.1, 0.2, 0.3])])
    assert words.noise_sentence(some).endswith(" in accuracy (1 of 2 pairs have too few seeds for any)")


def test_differences_from_chance_are_no_noise():
    pairs = [pair([0.01, -0.01] * 5), pair([0.9, 0.01] * 5)]
    (quiet,), (loud,) = noise_floor([pairs[0], dataclasses.replace(pairs[1], failed=("mine",))]), noise_floor(pairs)
    assert max(quiet.detectable) < 0.1 < max(loud.detectable)


def test_the_noise_floor_of_looks_is_at_the_error_of_the_look_that_the_seeds_were_for():
    of_five = pair([0.01, -0.012, 0.009, 0.003, -0.005], NATS)
    (once,), (looked) = noise_floor([of_five]), noise_floor([of_five], in_looks=True)
    assert looked[0].detectable[0] == STUDENT.detectable(of_five.spread, LOOKS[5], 5) > once.detectable[0]
    # Five signs have no p-value below 0.005, the error of the first look.
    (signs,) = noise_floor([pair([0.1] * 5)], in_looks=True)
    assert words.noise_sentence(signs) == "copy none (5 seeds are too few, 7 would do)"


RECORDS = sorted(PUBLISHED.glob("*/comparison.json"))
CONTROLLED = [record.parent for record in RECORDS if json.loads(record.read_text()).get("control_seeds")]


@pytest.mark.parametrize(
    "folder",
    [folder if folder.name == "small-cpu" else pytest.param(folder, marks=pytest.mark.slow) for folder in CONTROLLED],
    ids=lambda it: it.name,
)
def test_no_difference_is_found_between_one_model_and_itself_on_published_scores(folder):
    inputs = read_inputs(folder)
    assert [verdict.winner for verdict in inputs.control_verdicts] == [None] * len(inputs.control_verdicts)
    tested = [verdict.pair.evaluation for verdict in inputs.control_verdicts if verdict.outcome != "none"]
    assert tested
    assert set(tested) == {verdict.pair.evaluation for verdict in inputs.verdicts}
    assert any(verdict.winner is not None for verdict in inputs.verdicts)


def test_the_control_is_the_reference_under_other_seeds_paired_in_order():
    def control(*values):
        rows = [
            *copied(softmax=[0.5 + 0.01 * seed for seed in range(8)], linear=[0.4] * 8),
            *(row("softmax", 50 + seed, value=value, settings=SETTINGS) for seed, value in enumerate(values)),
        ]
        scored, again = control_of(rows, range(50, 58))
        assert len(scored) == 16
        return judge_control(scored, again, reference="softmax", primaries={"copy": ACCURACY_OF_COPY, "recall": NATS})

    (same,) = control(*[0.5 + 0.01 * seed + 0.02 * (-1) ** seed for seed in range(8)])
    assert (same.outcome, same.num_seeds) == ("undecided", 8)
    assert "neither better nor worse in copy" in control_sentence([same])
    (few,) = control(*[0.5 + 0.01 * seed + 0.02 * (-1) ** seed for seed in range(4)])
    assert (few.outcome, few.num_seeds) == ("undecided", 4)
    assert control_sentence([few]).endswith("under other seeds could not be tested in copy (4 seeds are too few).")
    failed = dataclasses.replace(same, pair=dataclasses.replace(same.pair, evaluation="recall", failed=("control",)))
    assert control_sentence([same, failed]).endswith(
        "came out neither better nor worse in copy, as it must; it could not be tested in recall (some of its seeds "
        "diverged)."
    )
    (other,) = control(*[0.9 + 0.01 * seed for seed in range(8)])
    assert other.outcome == "better"
    assert other.difference == pytest.approx(0.4)
    assert "finds differences that are none" in control_sentence([other])
    assert control_sentence(judge_control([], [], reference="softmax", primaries={})) == ""
