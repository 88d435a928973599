"""Effects of a factorial on made-up rows, whose effects are known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from made_rows import inputs_of, row

from attnbench.report.sections.effects import factorial_tables
from attnbench.report.terminal import print_comparison
from attnbench.results.rows import ResultRow
from attnbench.results.tables import to_markdown
from attnbench.settings.corners import corner_name, corners, expand
from attnbench.settings.errors import UserError
from attnbench.verdict.factorial import Effects, Factorial, effects_on_nats
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import primary_metrics

PARTS = ["positions", "convolution", "gate", "norm"]
MIXERS = ["softmax", "linear", "gated_deltanet"]
PRIMARY = primary_metrics(["perplexity", "recall"])
FULL_CONTEXT = {"split": "test", "checkpoint": "best", "context": "full", "sequence_length": 256}
CELL = {"sequence_length": 128, "num_pairs": 8, "width": 64}
SIGMA = 0.004

Nats = Callable[[str, Sequence[str]], float]


def variants(fraction: str = "half") -> list[str]:
    return [corner_name(mixer, high) for mixer in MIXERS for high in corners(PARTS, fraction)]


def nats_row(variant: str, seed: int, value: float) -> ResultRow:
    of = {"unit": "nat"}
    return row(
        variant, seed, "nats_per_character", value, settings=FULL_CONTEXT, of=of, evaluation="perplexity", corpus="x"
    )


def rows_where(nats: Nats, fraction: str = "half", num_seeds: int = 5) -> list[ResultRow]:
    """Rows of nats with noise, and a block of its own for each seed, far larger than the noise."""
    noise, blocks = random.Random(3), [0.0, 0.05, -0.08, 0.02, 0.1]
    return [
        nats_row(name, seed, nats(mixer, high) + blocks[seed] + noise.gauss(0, SIGMA))
        for name in variants(fraction)
        for mixer, *high in [name.split("+")]
        for seed in range(num_seeds)
    ]


def measured(rows: Sequence[ResultRow], fraction: str = "half") -> Effects:
    return effects_on_nats(Factorial.of(variants(fraction), PARTS), figures(rows), PRIMARY["perplexity"])


def known(mixer: str, high: Sequence[str]) -> float:
    of_positions = {"softmax": -0.12, "linear": -0.03, "gated_deltanet": 0.0}[mixer]
    return 1.4 + of_positions * ("positions" in high) - 0.08 * ("convolution" in high) + 0.02 * ("norm" in high)


@pytest.mark.parametrize("fraction", ["half", "full"])
def test_planted_effects_of_parts_and_their_differences_between_mixers_are_recovered(fraction):
    found = {(effect.name, effect.mixer): effect for effect in measured(rows_where(known, fraction), fraction).effects}
    truth = dict.fromkeys(found, 0.0)
    truth |= {("positions", ""): -0.05, ("convolution", ""): -0.08, ("norm", ""): 0.02}
    truth |= {("positions", "softmax"): -0.07, ("positions", "linear"): 0.02, ("positions", "gated_deltanet"): 0.05}
    for key, effect in found.items():
        assert effect.nats == pytest.approx(truth[key], abs=4 * SIGMA * (4 / 40) ** 0.5), key
        assert effect.low < effect.nats < effect.high
    # Of 19 or 22 intervals of 95 % one may miss; blocks far larger than the noise are in none of them.
    misses = [key for key, effect in found.items() if not effect.low <= truth[key] <= effect.high]
    assert len(misses) <= 2, misses
    assert max(effect.high - effect.low for effect in found.values()) < 0.02
    assert found["convolution", ""].in_percent()[0] == pytest.approx(-7.7, abs=0.5)


@pytest.mark.parametrize("pair", [("positions", "convolution"), ("gate", "norm")])
def test_an_interaction_shows_in_the_line_that_names_it_and_the_one_it_cannot_be_told_from(pair):
    def nats(mixer: str, high: Sequence[str]) -> float:
        return 1.4 + 0.1 * (set(pair) <= set(high))

    # 0.1 where both are on is 0.05 by either one alone, and half of 0.1 by their interaction.
    effects = {effect.name: effect.nats for effect in measured(rows_where(nats)).effects if not effect.mixer}
    both = "positions × convolution, or gate × norm: not separable"
    assert {name: round(nats, 2) for name, nats in effects.items() if abs(nats) > 0.01} == {
        pair[0]: 0.05,
        pair[1]: 0.05,
        both: 0.05,
    }
    assert len([name for name in effects if "not separable" in name]) == 3
    alone = {effect.name: effect.nats for effect in measured(rows_where(nats, "full"), "full").effects}
    assert not any("not separable" in name for name in alone)
    planted = {name: round(nats, 2) for name, nats in alone.items() if "×" in name and abs(nats) > 0.01}
    assert planted == {" × ".join(pair): 0.05}


def test_a_corner_without_nats_is_named_with_what_cannot_be_estimated_and_the_rest_is():
    rows = rows_where(known)
    gone = ("linear+positions+gate", "gated_deltanet")
    missing = measured([entry for entry in rows if entry.identity.variant not in gone])
    assert missing.mixers == ["softmax"]
    assert missing.gaps == [
        "linear+positions+gate: was not measured.",
        "gated_deltanet: was not measured.",
        "Cannot be estimated: every effect with linear, gated_deltanet; means over mixers are of softmax.",
    ]
    assert {effect.mixer for effect in missing.effects} == {""}
    assert missing.effects[0].nats == pytest.approx(-0.12, abs=0.01)
    # Its nats count as those of a model that knows nothing but the frequencies, which is no effect of a part.
    diverged = {"unit": "nat", "status": "diverged", "reason": "at step 7"}
    with_chance = {**FULL_CONTEXT, "chance": 3.0}
    failed = row("softmax", 0, "nats_per_character", None, settings=with_chance, of=diverged, evaluation="perplexity")
    at_chance = [
        replace(entry, measurement=replace(entry.measurement, settings=with_chance))
        for entry in rows
        if (entry.identity.variant, entry.identity.seed) != ("softmax", 0)
    ]
    one = measured([*at_chance, replace(failed, identity=replace(failed.identity, corpus="x"))])
    assert one.gaps[0] == "softmax: diverged at 1 of 5 seeds."
    assert one.mixers == ["linear", "gated_deltanet"]
    nothing = measured([])
    assert (nothing.effects, len(nothing.gaps)) == ([], 25)


def test_fewer_than_two_seeds_are_one_line_for_each_corner_and_no_effect():
    single = measured(rows_where(known, num_seeds=1))
    assert single.effects == []
    assert single.gaps[0] == "softmax: has 1 seed, and effects need 2."
    assert single.gaps[-1].endswith("no effect is left.")
    # Seeds of which no two are in every corner make no blocks.
    rows = [
        entry for entry in rows_where(known) if (entry.identity.seed in (0, 1)) == ("gate" in entry.identity.variant)
    ]
    assert measured(rows).gaps == ["Cannot be estimated: the corners share 0 seeds, and effects need 2."]


def test_tables_name_every_corner_and_what_each_solved(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = rows_where(known)
    for seed in range(5):
        diverged = {"status": "diverged", "reason": "at step 7"}
        of_score = {"settings": {**CELL, "split": "test"}, "evaluation": "recall"}
        rows.append(row("softmax", seed, "accuracy", 0.5 + seed / 10, **of_score))
        of_solved = {"settings": {**CELL, "split": "test", "chance": 0.0}, "evaluation": "recall"}
        rows.append(row("softmax", seed, "solved", 1 if seed > 2 else 0, **of_solved))
        rows.append(row("linear", seed, "accuracy", None, of=diverged, **of_score))
    factorial = Factorial.of(variants(), PARTS)
    effects, of_nats, of_recall = factorial_tables(factorial, figures(rows), PRIMARY)
    assert (len(effects.lines), len(of_nats.lines), len(of_recall.lines)) == (19, 8, 8)
    assert "| none of the parts | 2 of 5, 0.700 | diverged at 5 of 5 seeds | not measured |" in to_markdown(of_recall)
    assert any("positions with convolution × gate × norm" in note for note in effects.notes)
    print_comparison(inputs_of(rows, variants(), factors=PARTS))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "positions × softmax" in printed


def test_a_half_fraction_keeps_the_corners_whose_product_is_the_identity():
    high = corners(PARTS, "half")
    assert len(high) == 8
    assert {len(parts) for parts in high} == {0, 2, 4}
    # Every part, and every pair of parts, is as often on as off.
    for part in PARTS:
        assert sum(part in parts for parts in high) == 4
    assert len(corners(PARTS, "full")) == 16
    given = expand({"a": ["attn=softmax"]}, {name: [f"{name}=0", f"{name}=1"] for name in PARTS}, "half")
    assert given["a+positions+norm"] == ["attn=softmax", "positions=1", "convolution=0", "gate=0", "norm=1"]


@pytest.mark.parametrize(
    ("variants", "factors", "fraction", "named"),
    [
        ({"a": []}, {"gate": ["x", "y"]}, "full", ["plan.factors", "at least two"]),
        ({"a": []}, {"gate": ["x", "y"], "norm": ["x"]}, "full", ["plan.factors.norm=['x']", "two different words"]),
        ({"a": []}, {"gate": ["x", "y"], "norm": ["x", "x"]}, "full", ["plan.factors.norm", "two different words"]),
        ({"a": []}, {name: ["x", "y"] for name in "abc"}, "half", ["plan.fraction=half", "at least 4", "full"]),
        ({"a": []}, {name: ["x", "y"] for name in "abcd"}, "third", ["plan.fraction=third", "full, half"]),
        ({"a+b": []}, {name: ["x", "y"] for name in "ab"}, "full", ["a+b has a +"]),
    ],
)
def test_factors_that_make_no_corners_are_one_line(variants, factors, fraction, named):
    with pytest.raises(UserError) as error:
        expand(variants, factors, fraction)
    assert all(word in str(error.value) for word in named), error.value
    assert "\n" not in str(error.value)
