"""The rule of docs/ladder.md for levels and steps, on made-up rows: each clause decides otherwise in one case."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import choose_levels
import pytest
import yaml
from choose_levels import ANCHORS, AXES, PRICED, REFERENCES, STEPS, Decision, Pilot, decide, pilots, price, read_rows
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from made_rows import row
from pages import blocks

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.comparison.transfer import export_cells
from attnbench.evals.ladder_copy import LadderCopy
from attnbench.evals.ladder_range import LadderRange
from attnbench.evals.ladder_recall import LadderRecall
from attnbench.evals.ladder_state import LadderState
from attnbench.results.row_files import ResultsWriter
from attnbench.results.rows import EVALUATION_OPTIONS, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED

SEEDS = (590, 591, 592)
LEVELS = (8, 16, 32, 64, 128)
ALL = (1.0, 1.0, 1.0, 1.0, 1.0)
FADING = (1.0, 0.96, 0.6, 0.1, 0.0)
AT_2000 = (500, 2000, 8000)


def score(variant: str, steps: int, level: int, value: float | None, seed: int, rule: str = "", **of: Any) -> ResultRow:
    probe = of.get("probe", "ladder_recall")
    settings = {AXES[probe]: level, "split": "test", "chance": 0.0, "chance_among": of.get("chance", 0.0)}
    settings |= {"rule": rule} if rule else {}
    options = {"num_steps": steps, "dim": of.get("width", 64), "vocabulary_size": len(rule), "batch_size": 32}
    failed = {"status": "diverged", "reason": "loss nan"} if value is None else {}
    settings[EVALUATION_OPTIONS] = options
    return row(variant, seed, "accuracy", value, settings=settings, of=failed, evaluation=probe)


def scores(by: dict[int, dict[str, Sequence[float | None]]], levels: Sequence[int] = LEVELS, **of: Any) -> list:
    return [
        score(variant, steps, level, value, seed, **of)
        for steps, variants in by.items()
        for variant, values in variants.items()
        for level, value in zip(levels, values, strict=True)
        for seed in SEEDS
    ]


def anchors(others: Sequence[float | None] = FADING, softmax: Sequence[float | None] = ALL) -> dict:
    return {variant: softmax if variant == "softmax" else others for variant in ANCHORS}


def decided(rows: list[ResultRow]) -> Decision:
    [pilot] = pilots(rows)
    return decide(pilot)


def pilot_of(by: dict[int, dict], **of: Any) -> Pilot:
    [pilot] = pilots(scores(by, **of))
    return pilot


def usual(steps: Sequence[int] = AT_2000) -> dict[int, dict]:
    return {at: anchors() for at in steps}


def with_change(at: int, variant: str, values: Sequence[float | None], steps: Sequence[int] = AT_2000) -> dict:
    by = usual(steps)
    by[at] = {**by[at], variant: values}
    return by


TWO = (*AT_2000, 1250, 5000, 20_000)
"""Steps at which 2,000 and 5,000 can be judged."""


def test_the_smallest_number_of_steps_that_has_converged_is_taken():
    made = decided(scores(usual(TWO)))
    assert (made.steps, made.is_converged, made.outcome) == (2000, True, "a ladder")
    assert made.against[10_000] == [
        "no scores of softmax at 2,500 steps",
        "no scores of softmax, linear, mamba2, gated_deltanet at 10,000 steps",
        "no scores of softmax, linear, mamba2, gated_deltanet at 40,000 steps",
    ]


@pytest.mark.parametrize(
    ("after", "steps"),
    [
        pytest.param((1.0, 0.96, 0.63, 0.1, 0.0), 5000, id="an anchor rises by 0.03"),
        pytest.param((1.0, 0.96, 0.62, 0.1, 0.0), 5000, id="by 0.02"),
        pytest.param((1.0, 0.96, 0.619, 0.1, 0.0), 2000, id="by 0.019"),
        pytest.param((1.0, 1.0, 0.6, 0.1, 0.0), 2000, id="by 0.04 from 0.96, which is solved"),
        pytest.param((1.0, 0.96, 0.3, 0.1, 0.0), 2000, id="it falls"),
    ],
)
def test_steps_are_too_few_while_an_anchor_rises(after, steps):
    assert decided(scores(with_change(8000, "mamba2", after, TWO))).steps == steps


def test_steps_are_too_few_unless_the_reference_solved_every_level_in_a_quarter():
    late = (1.0, 1.0, 1.0, 1.0, 0.94)
    made = decided(scores(with_change(500, "softmax", late, TWO)))
    assert made.steps == 5000
    assert made.against[2000] == ["128: no reference has solved it at 500 steps"]
    # A plateau at chance is no convergence.
    flat = decided(scores({at: anchors((0.0,) * 5, (0.0,) * 5) for at in TWO}))
    assert not flat.is_converged
    assert flat.against[2000] == ["no reference holds a level"]


def test_a_level_that_the_reference_never_holds_decides_nothing_about_steps():
    by = {at: anchors((1.0, 0.9, 0.5, 0.2, at / 10_000), (1.0, 1.0, 1.0, 1.0, at / 10_000)) for at in AT_2000}
    made = decided(scores(by))
    assert (made.steps, made.is_converged) == (2000, True)
    assert ("", 128) not in made.kept


def test_without_convergence_the_most_steps_are_taken_and_it_is_said():
    by = {at: anchors((1.0, 0.5, 0.4, 0.3, at / 100_000)) for at in TWO}
    made = decided(scores(by))
    assert (made.steps, made.is_converged, made.outcome) == (5000, False, "a ladder, not converged")
    assert made.against[5000] == [f"128: {name} rises from 0.050 to 0.200 at 20,000" for name in ANCHORS[1:]]
    assert decided(scores(usual((500,)))).outcome == "no number of steps can be judged"


def test_a_seed_that_is_missing_is_no_score_and_one_that_diverged_is_zero():
    rows = scores(usual())
    fewer = [it for it in rows if (it.identity.variant, it.identity.seed) != ("linear", 592)]
    assert decided(fewer).against[2000] == ["no scores of linear at 2,000 steps", "no scores of linear at 8,000 steps"]
    by = with_change(2000, "linear", (None, None, None, None, None))
    assert "8: linear rises from 0.000 to 1.000 at 8,000" in decided(scores(by)).against[2000]


def test_a_level_is_kept_if_a_reference_solves_it_in_every_seed():
    rows = scores(usual())
    for it in rows:
        settings = it.measurement.settings
        if it.identity.seed == 591 and settings["num_pairs"] == 128 and it.identity.variant == "softmax":
            it.measurement.value = 0.94
    made = decided(rows)
    assert made.kept == [("", level) for level in LEVELS[:-1]]
    assert made.dropped["128"] == "no reference has 0.95 in 3 of 3 seeds"


def test_one_of_two_references_suffices_for_a_level():
    nope, window = (1.0, 1.0, 1.0, 0.5, 1.0), (1.0, 1.0, 1.0, 1.0, 0.5)
    by = {at: anchors(FADING, FADING) | {"softmax_nope": nope, "window": window} for at in AT_2000}
    assert len(decided(scores(by, probe="ladder_range")).kept) == 5
    assert len(decided(scores({at: {**it, "window": nope} for at, it in by.items()}, probe="ladder_range")).kept) == 3


def test_levels_beyond_one_that_is_not_kept_are_not_kept():
    made = decided(scores({at: anchors(softmax=(1.0, 1.0, 1.0, 0.9, 1.0)) for at in AT_2000}))
    assert made.kept == [("", 8), ("", 16), ("", 32)]
    assert made.dropped["128"] == "it is beyond a level, or beside a length of a group, that is not kept"


@pytest.mark.parametrize(
    ("linear", "others", "chance", "expected"),
    [
        pytest.param(0.5, 0.5, 0.0, True, id="between"),
        pytest.param(0.9, 0.9, 0.0, False, id="all at 0.9"),
        pytest.param(0.09, 0.09, 0.0, False, id="near chance"),
        pytest.param(0.15, 0.15, 0.1, False, id="near the chance of an informed guess"),
        pytest.param(0.95, 0.95, 0.0, False, id="solved"),
    ],
)
def test_a_level_is_informative_between_chance_and_the_threshold(linear, others, chance, expected):
    by = {2000: {"linear": [linear], **{name: [others] for name in ANCHORS if name != "linear"}}}
    assert pilot_of(by, levels=[8], chance=chance).is_informative(2000, ("", 8)) == expected


@pytest.mark.parametrize(("high", "expected"), [(0.08, True), (0.07, True), (0.06, False)])
def test_a_level_is_informative_if_two_anchors_are_apart(high, expected):
    # None lies between chance and the threshold.
    by = {2000: {name: [high if name == "softmax" else -0.08] for name in ANCHORS}}
    assert pilot_of(by, levels=[8]).is_informative(2000, ("", 8)) == expected


L = [("", level) for level in (8, 16, 32, 64, 128, 256)]


@pytest.mark.parametrize(
    ("informative", "from_first", "expected"),
    [
        ([2, 3], False, L[1:5]),
        ([0, 1], False, L[:3]),
        ([4, 5], False, L[3:]),
        ([1, 4], False, L),
        ([3, 4], True, L),
        ([2], True, L[:4]),
        ([5], False, L[3:]),
        ([0], False, L[:3]),
        ([], False, []),
    ],
)
def test_the_window_has_the_informative_levels_and_one_on_each_side(informative, from_first, expected):
    assert choose_levels.window(L, [L[index] for index in informative], from_first=from_first) == expected


def test_a_group_is_kept_with_all_its_lengths_or_not_at_all():
    def state(a5: float) -> list:
        found = []
        for rule, far in (("parity", 1.0), ("s3", 1.0), ("a5", a5)):
            by = {at: anchors((0.7, 0.3), (0.5, 0.0)) | {"lstm": (1.0, far)} for at in AT_2000}
            found += scores(by, [1, 4], rule=rule, probe="ladder_state")
        return found

    made = decided(state(0.5))
    assert made.window == [("parity", 1), ("parity", 4), ("s3", 1), ("s3", 4)]
    assert list(made.dropped) == ["a5 x1", "a5 x4"]
    assert len(decided(state(1.0)).window) == 6


def test_too_few_informative_or_kept_levels_are_no_ladder():
    made = decided(scores({at: anchors((1.0, 1.0, 1.0, 1.0, 0.5)) for at in AT_2000}))
    assert (made.window, made.informative) == ([], [("", 128)])
    assert made.outcome.startswith("1 informative levels, of 2: halve the width")
    made = decided(scores({at: anchors(softmax=(1.0, 1.0, 0.5, 0.5, 0.5)) for at in AT_2000}))
    assert (made.window, made.outcome) == ([], "a table without a score: 2 levels are kept, and a ladder has 3")
    made = decided(scores({at: anchors(softmax=(1.0, 0.5, 1.0, 1.0, 1.0)) for at in AT_2000}))
    assert (made.window, made.outcome) == ([], "left out: no reference holds the first two levels")


def timed(variant: str, seconds: float, seed: int, **settings: Any) -> ResultRow:
    options = {"num_steps": 2000, "dim": 64, "vocabulary_size": 0, "batch_size": 32}
    given, speed = {EVALUATION_OPTIONS: options, **settings}, 2000 * 32 * 1024 / seconds
    of: dict[str, Any] = {"evaluation": "ladder_recall", "seq_len": 1024}
    return row(variant, seed, "tokens_per_second", speed, settings=given, **of)


def test_the_price_is_of_six_search_and_eight_scored_trainings_and_a_stack_shares_its_seconds():
    rows = [timed("softmax", 12.0, SELECTION_SEED, shared_device=True, stack=6)]
    rows += [timed("softmax", 9.0, seed, shared_device=True, stack=3) for seed in SEEDS]
    rows.append(timed("softmax", 1000.0, 590, shared_device=True))
    [pilot] = pilots(rows)
    assert price(pilot, "softmax", 2000) == pytest.approx(6 * 2 + 8 * 3)
    assert price(pilot, "softmax", 500) is price(pilot, "linear", 2000) is None


def test_the_price_of_a_ladder_is_that_of_its_probes_at_their_steps():
    def told(steps: int, seconds: float, window: list[str]) -> dict[str, Any]:
        return {"window": window, "steps": steps, "price": {it: {steps: seconds} for it in choose_levels.PRICED}}

    probes = [told(2000, 100.0, ["8"]), told(5000, 200.0, ["8"]), told(2000, 400.0, [])]
    assert choose_levels.totals(probes) == {"softmax": 300.0, "gated_deltanet": 300.0}
    lines = choose_levels.markdown([], 8).splitlines()
    assert lines[-1] == "- gated_deltanet: not measured at the steps of every ladder."


def test_two_widths_are_two_pilots_and_contradicting_trainings_are_refused():
    rows = [*scores(usual()), *scores(usual(), width=32)]
    assert [pilot.options["dim"] for pilot in pilots(rows)] == [64, 32]
    with pytest.raises(UserError, match="ladder_recall 8, softmax, seed 590: two trainings of 2000 steps differ"):
        pilots([*rows, score("softmax", 2000, 8, 0.5, 590)])


def test_folders_and_exported_cells_are_read_and_printed(tmp_path, capsys):
    folder = tmp_path / "outputs" / "ladder_pilot"
    for index, it in enumerate([*scores(usual()), timed("softmax", 3.0, 590)]):
        cell = folder / "cells" / f"cell{index}-{index:08x}"
        cell.mkdir(parents=True)
        (cell / "environment.json").write_text("{}")
        (cell / "config.yaml").write_text("{}")
        with ResultsWriter(cell / "results" / f"ladder_recall-{index:08x}.jsonl", it.identity) as writer:
            writer.write(it.measurement)
    cells = tmp_path / "cells.jsonl.gz"
    export_cells(folder, cells)
    assert [it.measurement for it in read_rows(cells)] == [it.measurement for it in read_rows(folder)]
    choose_levels.main([str(cells), "--json"])
    told = json.loads(capsys.readouterr().out)
    [pilot] = told["pilots"]
    assert (pilot["steps"], pilot["window"]) == (2000, ["16", "32", "64", "128"])
    assert pilot["dropped"] == {"8": "kept, and not beside an informative level"}
    assert told["seconds"] == {"softmax": None, "gated_deltanet": None}
    choose_levels.main([str(folder)])
    page = capsys.readouterr().out
    assert "| 32 | 0.000 | 2,000 | 1.000 (3/3) | 0.600 | 0.600 | 0.600 |" in page
    assert "- Steps: 2000." in page


def test_the_rule_names_what_the_probes_and_the_plan_have():
    probes = (LadderRecall, LadderCopy, LadderState, LadderRange)
    assert {probe.name: probe.axis for probe in probes} == AXES
    variants = yaml.safe_load(Path(CONF, "plan", "ladder_pilot.yaml").read_text())["variants"]
    assert {*ANCHORS, *(it for names in REFERENCES.values() for it in names)} == {
        name for name, words in variants.items() if words
    }
    page = " ".join(Path(CONF, "..", "docs", "ladder.md").read_text().split())
    assert f"the smallest of {', '.join(f'{it:,}' for it in STEPS[:-1])} and {STEPS[-1]:,} at which" in page


def test_the_commands_of_the_page_run_each_probe_with_its_anchors_and_references():
    [script] = blocks("docs/ladder.md", "sh")
    stubs = "python() { :; }; attnbench() { printf '%s\\037' \"$@\"; echo; }\n"
    ran = subprocess.run(["bash", "-c", stubs + script], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in ran.splitlines()[:-1]:
        command, *words = line.split("\037")[:-1]
        assert command == "compare"
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose_hydra("compare", words, return_hydra_config=True)
            own = read_comparison(config, config.hydra).plan
        [probe] = own.evaluations if own.only is None else own.only
        [(steps, rates)] = {
            (it.options["num_steps"], tuple(it.options["learning_rates"]))
            for variant in own.variants.values()
            for it in compose([f"eval=[{probe}]", "device=cpu", *own.overrides, *variant]).evaluations
        }
        assert rates == (1e-3, 3e-3, 1e-2)
        found[probe, steps] = {*own.variants}
    assert found == {
        (probe, steps): {*(PRICED if steps == 500 else ANCHORS), *REFERENCES[probe]}
        for probe in AXES
        for steps in AT_2000
    }


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_published_pilots_give_the_tables_of_their_page(machine, capsys):
    page = Path(CONF, "..", "docs", "results", f"ladder_pilot-{machine}")
    choose_levels.main([str(page / "pilots.jsonl.gz")])
    assert (page / "README.md").read_text().endswith(capsys.readouterr().out)
