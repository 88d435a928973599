"""Frozen plans: what is written down, what is refused, and what a frozen plan may not change."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from probe_settings import smoke_words
from small import comparison_settings, compose_once, in_this_process, little_plan

from attnbench.comparison import compare, workers
from attnbench.comparison import freeze as freezing
from attnbench.comparison.plan import Comparison
from attnbench.comparison.publish import publish_comparison
from attnbench.comparison.transfer import with_ending
from attnbench.evals.lib import solving
from attnbench.report.inputs import read_inputs
from attnbench.results import protocol
from attnbench.results.folder import ROOT
from attnbench.results.metrics import Primary
from attnbench.results.row_tables import table_of
from attnbench.results.rows import is_search
from attnbench.results.seed_blocks import check_blocks, read_blocks
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, ComparisonSettings
from attnbench.verdict.frozen import NOT_FROZEN, frozen_sentence
from attnbench.verdict.rates import Choice

OVERRIDES = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("train.num_epochs=null", "train.num_steps=6", "train.batch_size=4", "train.warmup_steps=2", "data=text"),
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Cells run in this process: processes have tests of their own."""
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)


def settings(text: Path, outputs: Path, **changed) -> ComparisonSettings:
    """A plan of copy alone that may be frozen: six seeds of two variants, one pair."""
    is_frozen_now = changed.pop("freeze", False)
    evaluations = changed.get("evaluations", ["copy"])
    overrides = [*OVERRIDES, f"data.path={text}", *smoke_words(*evaluations)]
    given = {"overrides": overrides, "probe_seeds": [0, 1, 2, 3, 4, 5], "reference": "softmax", **changed}
    return comparison_settings(little_plan(**given), outputs, freeze=is_frozen_now)


def carried_out(given: ComparisonSettings) -> Path:
    return compare.compare(given, compose_once)


def frozen(folder: Path) -> dict:
    return json.loads((folder / "freeze.json").read_text())


@pytest.fixture
def frozen_plan(text, tmp_path) -> Path:
    return carried_out(settings(text, tmp_path, freeze=True))


def comparison_of(folder: Path, text: Path) -> Comparison:
    return Comparison(settings(text, folder.parent), compose_once)


def test_freezing_writes_cells_family_seeds_and_rules_and_trains_nothing(frozen_plan):
    content = frozen(frozen_plan)
    assert [path.name for path in frozen_plan.iterdir()] == ["freeze.json"]
    assert content["family"] == [
        {"evaluation": "copy", "first": "plain", "second": "softmax", "metric": "symbol_accuracy", "kind": "accuracy",
         "margin": 0.01}
    ]  # fmt: skip
    assert (content["probe_seeds"], content["control_seeds"]) == ([*range(6)], [*range(50, 56)])
    assert content["search_seeds"] == [SELECTION_SEED]
    labels = [cell["label"] for cell in content["cells"]]
    assert len(labels) == 18
    assert {f"copy softmax, seed {seed}" for seed in (0, 5, 50, 55)} <= {*labels}
    assert all(cell["hashes"] for cell in content["cells"])
    assert content["variants"]["plain"]["mixers"][0]["target"].endswith("LinearAttention")
    assert content["protocols"]["copy"]["primary"]["margin"] == 0.01
    assert len(content["protocols"]["copy"]["id"]) == 8
    assert content["frozen"]
    assert "commit" in content


def test_a_frozen_plan_is_not_frozen_twice(frozen_plan, text):
    with pytest.raises(UserError, match=r"freeze\.json: this plan was frozen on 20.*; run it without freeze=true"):
        carried_out(settings(text, frozen_plan.parent, freeze=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"probe_seeds": [0, 1, 2, 3, 4]},
         r"^plan\.probe_seeds: 5 seeds can decide nothing about symbol_accuracy of copy, whose p-value is at least "
         r"0\.062 and must be 0\.05 in a family of 1; it takes 6 seeds"),
        ({"probe_seeds": []}, r"^plan\.probe_seeds=\[\]: a plan that is frozen names the seeds of copy"),
        ({"probe_seeds": [*range(100, 106)]},
         r"^plan\.seeds: 100 is booked in docs/results/SEEDS, 100 to 109 for plan=compare and bare;"),
        ({"probe_seeds": [*range(56, 62)]}, r"^plan\.seeds: 106 is booked"),
    ],
    ids=["too few seeds", "no seeds", "booked seeds", "booked seeds of the control"],
)  # fmt: skip
def test_what_cannot_be_frozen_is_refused_in_one_line(changed, message, text, tmp_path):
    with pytest.raises(UserError, match=message) as refused:
        carried_out(settings(text, tmp_path, freeze=True, **changed))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("freeze.json"))


@pytest.mark.parametrize(
    ("name", "seeds", "word"),
    [("compare", [*range(6)], "plan.seeds: 0 is not among"), ("compare", [*range(100, 106)], ""), ("mine", [0], "")],
)
def test_freezing_on_seeds_other_than_those_booked_for_the_plan_says_so(name, seeds, word, text, tmp_path, caplog):
    carried_out(settings(text, tmp_path, freeze=True, name=name, probe_seeds=seeds, rank=[], reference=None))
    assert ("is not among the seeds that docs/results/SEEDS books for plan=" in caplog.text) == bool(word)
    assert word in caplog.text


def test_a_plan_that_only_describes_may_have_few_seeds(text, tmp_path):
    folder = carried_out(settings(text, tmp_path, freeze=True, probe_seeds=[0], rank=[], reference=None))
    assert frozen(folder)["family"] == []


def test_a_margin_of_0_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"margin=0 must be above 0 and finite"):
        Primary(metric="symbol_accuracy", kind="accuracy", margin=0)


@pytest.mark.parametrize(
    ("changed", "words", "difference"),
    [
        ({"probe_seeds": [*range(7)]}, [],
         r"probe_seeds was frozen as \[0, 1, 2, 3, 4, 5\] and is \[0, 1, 2, 3, 4, 5, 6\] now"),
        ({"reference": "plain"}, [], 'reference was frozen as "softmax" and is "plain" now'),
        ({"num_search_seeds": 2}, [], "search_seeds was frozen as"),
        ({}, ["attn=linear", "attn.conv_size=2"], r"variants\.plain\.words was frozen as"),
        ({}, None, r"family was frozen as .* and is \[\] now|reference was frozen as"),
    ],
    ids=["seeds", "reference", "search seeds", "an option", "family"],
)  # fmt: skip
def test_a_frozen_plan_that_is_changed_runs_no_further(changed, words, difference, frozen_plan, text):
    given = settings(text, frozen_plan.parent, **changed)
    if words is None:
        given.plan.rank = []
    elif words:
        given.plan.variants = {**given.plan.variants, "plain": words}
    with pytest.raises(UserError, match=rf"freeze\.json: ({difference}).*another name with seeds of its own"):
        carried_out(given)
    assert [path.name for path in frozen_plan.iterdir()] == ["freeze.json"]


def test_a_setting_that_has_come_since_is_a_change_unless_it_is_null_or_false(frozen_plan, text):
    assert freezing._difference({}, {"new": False}) is None
    assert freezing._difference({}, {"new": 0}) == "new was not there when it was frozen"
    content = frozen(frozen_plan)
    assert content["variants"]["plain"]["train"].pop("patience_validations") is None
    (frozen_plan / "freeze.json").write_text(json.dumps(content))
    assert freezing.check_frozen(comparison_of(frozen_plan, text))
    del content["variants"]["plain"]["train"]["clip_norm"]
    (frozen_plan / "freeze.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"variants\.plain\.train\.clip_norm was not there when it was frozen"):
        freezing.check_frozen(comparison_of(frozen_plan, text))


def test_a_budget_of_another_cell_that_has_come_since_is_no_change_and_another_number_is():
    def content(**budgets: int) -> dict:
        return {"variants": {"softmax": {"evaluations": {"recall": {"budgets": {"zoology": budgets}}}}}}

    then = content(**{"256x16": 1000})
    assert freezing._difference(then, content(**{"256x16": 1000, "256x32": 2400})) is None
    where = r"variants.softmax.evaluations.recall.budgets.zoology.256x16"
    assert freezing._difference(then, content(**{"256x16": 2000})) == f"{where} was frozen as 1000 and is 2000 now"
    assert freezing._difference(then, content()) == f"{where} was there when it was frozen"
    assert freezing._difference({"budgets": {}}, {"budgets": {"zoology": {}}}) is not None


def test_of_probes_alone_the_steps_over_a_text_are_not_frozen(frozen_plan, text):
    path = frozen_plan / freezing.FREEZE
    content = json.loads(path.read_text())
    assert all("num_steps" not in variant for variant in content["variants"].values())
    # As files of before have it.
    content["variants"]["plain"]["num_steps"] = 12345
    path.write_text(json.dumps(content))
    assert freezing.check_frozen(comparison_of(frozen_plan, text))


def test_of_language_models_they_are(text, tmp_path):
    given = {"evaluations": ["perplexity"], "seeds": [0, 1, 2, 3, 4, 5], "learning_rates": [4e-3]}
    folder = carried_out(settings(text, tmp_path, freeze=True, **given))
    path = folder / freezing.FREEZE
    content = json.loads(path.read_text())
    assert content["variants"]["plain"]["num_steps"] == 6
    content["variants"]["plain"]["num_steps"] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"variants.plain.num_steps was frozen as 5 and is 6 now"):
        carried_out(settings(text, tmp_path, **given))


def test_a_plan_frozen_under_the_former_search_of_language_models_goes_on_and_says_so(text, tmp_path, caplog):
    # Two epochs of the text, and a grid: the search has two stages.
    given = {"evaluations": ["perplexity"], "num_search_seeds": 2, "learning_rates": [1e-3, 2e-3, 4e-3]}
    overrides = [*settings(text, tmp_path, **given).plan.overrides, "train.num_steps=null", "train.num_epochs=2"]
    given |= {"overrides": overrides, "seeds": [0, 1, 2, 3, 4, 5]}
    folder = carried_out(settings(text, tmp_path, freeze=True, **given))
    content = frozen(folder)
    assert content["rates_in_full"] == "the best with its neighbours"
    comparison = Comparison(settings(text, tmp_path, **given), compose_once)
    assert freezing.check_frozen(comparison)
    assert "frozen when" not in caplog.text
    del content["rates_in_full"]
    (folder / "freeze.json").write_text(json.dumps(content))
    assert freezing.check_frozen(comparison)
    assert "frozen when a search of a language model's rate trained the best two in full" in caplog.text


def test_a_rate_chosen_by_another_search_than_was_frozen_shows():
    freeze = {"frozen": "2026-01-01T00:00:00+00:00", "commit": None, "family": [], "cells": [], "protocols": {}}
    freeze |= {"seeds": [], "probe_seeds": [], "control_seeds": []}
    first = {"variant": "linear", "evaluation": "training", "settings": {}, "grid": [1, 2, 3, 4], "at_edge": False}
    two, three = (
        Choice(**first, scores=dict.fromkeys(rates, 1.0), after_an_epoch=dict.fromkeys("1234", 1.0), chosen=2)
        for rates in ("12", "123")
    )

    def said(freeze: dict, *rates: Choice) -> str:
        given = {"family": [], "protocols": {}, "first_scored": "2026-01-02T00:00:00+00:00"}
        return frozen_sentence(freeze, [], rates=rates, **given)

    assert said(freeze, two).endswith("before the first score.")
    assert "but the rates of 1 language models were chosen with the neighbours of the best" in said(freeze, two, three)
    assert said({**freeze, "rates_in_full": "any"}, two, three).endswith("before the first score.")


def test_other_words_for_the_same_options_are_no_change(frozen_plan, text):
    given = settings(text, frozen_plan.parent)
    # A probe wishes these four taps.
    given.plan.variants = {**given.plan.variants, "plain": ["attn=linear", "attn.conv_size=4"]}
    assert freezing.check_frozen(Comparison(given, compose_once))
    given.plan.variants["plain"] = ["attn=linear", "attn.conv_size=2"]
    with pytest.raises(UserError, match=r"variants\.plain\.words was frozen as"):
        freezing.check_frozen(Comparison(given, compose_once))


def test_a_rule_that_is_changed_after_freezing_is_refused(frozen_plan, text, monkeypatch):
    monkeypatch.setattr(solving, "STOP_RULE", {**solving.STOP_RULE, "mastered": 0.98})
    with pytest.raises(UserError, match=r"protocols\.copy\.id was frozen as"):
        carried_out(settings(text, frozen_plan.parent))


def test_other_names_freeze_the_same_family(text, tmp_path):
    names = {"softmax": "zeta", "plain": "alpha"}
    first = carried_out(settings(text, tmp_path / "a", freeze=True))
    variants = {"alpha": ["attn=linear"], "zeta": ["attn=softmax"]}
    second = carried_out(settings(text, tmp_path / "b", freeze=True, variants=variants, reference="zeta"))
    renamed = [{**it, "first": names[it["first"]], "second": names[it["second"]]} for it in frozen(first)["family"]]
    assert renamed == frozen(second)["family"]


def cells_of(table: Path) -> Iterator[dict[str, str]]:
    """Rows as they stand in a table: read as results, with every check of them, they take seconds."""
    with (gzip.open if table.suffix == ".gz" else open)(table, "rt", encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def test_the_blocks_of_published_tables_do_not_overlap_and_have_their_rows(tmp_path):
    blocks = read_blocks(ROOT / freezing.BLOCKS)
    booked = [seed for it in blocks for seed in it.seeds]
    assert len(booked) == len({*booked}) > 0
    assert all(it.seeds and it.plans for it in blocks)
    tables = list((ROOT / "docs" / "results").glob("*/freeze.json"))
    for path in tables:
        frozen = json.loads(path.read_text())
        plan, table = frozen["plan"], table_of(path.parent)
        seeds = {*frozen["seeds"], *frozen["probe_seeds"], *frozen["control_seeds"]}
        timed = {label.partition(" ")[0] for label in frozen["timed"]}
        # Committed before the first score, when there are no rows yet. What is timed is no seed's.
        scored = [row["seed"] for row in cells_of(table) if row["evaluation"] not in timed] if table.exists() else []
        seeds |= {int(seed) for seed in scored if seed != "all"}
        inside = {seed for it in blocks if plan in it.plans for seed in it.seeds}
        assert {seed for seed in seeds if not is_search(seed)} <= inside, path
    assert read_blocks(tmp_path / "none") == []
    check_blocks(blocks[0].plans[-1], [blocks[0].seeds[0]], blocks)


@pytest.fixture(scope="module")
def scored_once(text, tmp_path_factory) -> Path:
    """A frozen plan, carried out."""
    outputs = tmp_path_factory.mktemp("scored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_in_processes", in_this_process)
        carried_out(settings(text, outputs, freeze=True))
        return carried_out(settings(text, outputs))


@pytest.fixture
def scored_plan(scored_once, tmp_path) -> Path:
    """A copy of it, to be altered."""
    return Path(shutil.copytree(scored_once, tmp_path / scored_once.name))


def test_what_was_scored_before_freezing_is_refused(scored_plan, text):
    (scored_plan / "freeze.json").unlink()
    with pytest.raises(UserError, match=r"little: 18 runs were scored or timed before it was frozen, copy-plain-"):
        carried_out(settings(text, scored_plan.parent, freeze=True))
    assert not (scored_plan / "freeze.json").exists()


def test_a_frozen_plan_offers_no_further_variant(scored_plan, text, caplog):
    caplog.set_level("INFO", logger="attnbench")
    carried_out(settings(text, scored_plan.parent))
    assert "your layer (class MyLayer" not in caplog.text
    (scored_plan / "freeze.json").unlink()
    carried_out(settings(text, scored_plan.parent))
    assert "your layer (class MyLayer" in caplog.text


def altered(path: Path, **changed) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changed}))


def test_a_plan_that_was_frozen_before_its_first_score_says_so(scored_plan):
    said = read_inputs(scored_plan).frozen
    assert re.fullmatch(
        r"Frozen on 20\S+ at commit \S+ \(freeze\.json in no commit that is known here\), before the first score\.",
        said,
    )
    # The published page and its folder have it too.
    target = scored_plan.parent / "published"
    target.mkdir()
    (target / "results.csv").write_text("of an older publication")
    publish_comparison(scored_plan, target, title="Copy")
    assert [path.name for path in target.glob("results.csv*")] == ["results.csv.gz"]
    published = (target / "README.md").read_text()
    assert said in published
    # The answer stands before the numbers, and with it what it could have found and what came out of the control.
    answer = published.partition("\n|")[0]
    assert "\n- Detectable: " in answer
    assert "\n- Control: softmax against itself under other seeds " in answer
    assert frozen(target) == frozen(scored_plan)
    assert read_inputs(target).frozen == said
    (scored_plan / "freeze.json").unlink()
    assert read_inputs(scored_plan).frozen == NOT_FROZEN


def test_a_rule_changed_after_a_score_shows(scored_plan, text, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "SIGNIFICANCE", 0.1)
        assert "the rules of verdicts have changed since in significance" in read_inputs(scored_plan).frozen
    content = frozen(scored_plan)["protocols"]
    altered(scored_plan / "freeze.json", protocols={"copy": {**content["copy"], "id": "00000000"}})
    rows = f"protocol {content['copy']['id']}; now 00000000"
    assert f", but copy was scored under other rules ({rows})." in read_inputs(scored_plan).frozen
    # Without freezing too: another stop rule, and the same command again, which trains nothing.
    (scored_plan / "freeze.json").unlink()
    monkeypatch.setattr(solving, "STOP_RULE", {**solving.STOP_RULE, "mastered": 0.98})
    carried_out(settings(text, scored_plan.parent))
    assert "Copy was scored under other rules (protocol" in read_inputs(scored_plan).frozen


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"frozen": "2100-01-01T00:00:00+00:00"}, "but its first score is of 20.*, before that"),
        ({"probe_seeds": [0, 1, 2, 3, 4]}, "but seed 5 was scored and not frozen"),
        (
            {"probe_seeds": [*range(8)]},
            "but plain has no score of copy at seeds 6, 7; softmax has no score of copy at seeds 6, 7",
        ),
        ({"family": []}, "but 1 pairs of its family were changed"),
    ],
    ids=["the order", "seeds", "lost seeds", "family"],
)
def test_what_is_not_as_it_was_frozen_shows(changed, message, scored_plan):
    altered(scored_plan / "freeze.json", **changed)
    assert re.search(message, read_inputs(scored_plan).frozen)


@pytest.mark.parametrize(
    ("date", "message"),
    [
        ("2020-01-01T00:00:00+00:00", r"\(freeze\.json in git since [0-9a-f]+\), before the first score"),
        ("2099-01-01T00:00:00+00:00", r"in git since [0-9a-f]+\), but it was committed on 2099-01-01T00:00:00"),
    ],
)
def test_the_commit_of_a_freeze_is_named_and_one_after_the_scores_too(date, message, scored_plan):
    def git(*words: str) -> None:
        names = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "x")
        variables = {**os.environ, **names, "GIT_COMMITTER_DATE": date}
        subprocess.run(["git", "-C", str(scored_plan.parent), *words], check=True, capture_output=True, env=variables)

    git("init", "-q")
    # Under another name, as it lies in a folder of published pages.
    shutil.copy(scored_plan / "freeze.json", scored_plan.parent / "page.json")
    git("add", "page.json")
    git("commit", "-qm", "frozen")
    assert re.search(message, read_inputs(scored_plan).frozen)


def test_results_that_do_not_say_when_they_were_begun_are_a_fault(scored_plan, text):
    path = next(scored_plan.glob("cells/*-seed0-*/results/*.jsonl"))
    *rows, ending = path.read_text().splitlines()
    without = {name: value for name, value in json.loads(ending).items() if name != "started"}
    path.write_text("\n".join([*rows, json.dumps(without)]) + "\n")
    carried_out(settings(text, scored_plan.parent))
    assert "but 1 results do not say when they were begun" in read_inputs(scored_plan).frozen


def test_a_seed_without_the_score_that_is_tested_is_named(scored_plan):
    path = next(scored_plan.glob("cells/copy-plain-*-seed3-*/results/*.jsonl"))
    *rows, ending = map(json.loads, path.read_text().splitlines())
    rows = [row for row in rows if row["metric"] != "symbol_accuracy"]
    ending = json.loads(json.dumps(ending)) | {"num_rows": len(rows)}
    path.write_text(with_ending("".join(json.dumps(row) + "\n" for row in rows), ending))
    assert "but plain has no score of copy at seed 3" in read_inputs(scored_plan).frozen


def test_a_freeze_that_is_none_is_refused_by_its_name(scored_plan):
    (scored_plan / "freeze.json").write_text('{"protocols": 3}')
    with pytest.raises(UserError, match=r"freeze\.json: not what attnbench compare freeze=true writes"):
        read_inputs(scored_plan)


def test_a_frozen_plan_goes_on_frozen_elsewhere(scored_plan, text, tmp_path):
    carried = tmp_path / "cells.jsonl"
    carried_out(replace(settings(text, scored_plan.parent), exported=str(carried)))
    other = carried_out(replace(settings(text, tmp_path / "other"), imported=str(carried)))
    assert frozen(other) == frozen(scored_plan)
    assert read_inputs(other).frozen == read_inputs(scored_plan).frozen
    inputs = read_inputs(other)
    assert re.match(
        r"Imported, not measured here: 18 of 18 results, 18 on 20\S+ from the file of sha256", inputs.imported
    )
    assert json.loads((other / "comparison.json").read_text())["imported"]["cells"] == 18
    publish_comparison(other, tmp_path / "published", title="little")
    assert inputs.imported in (tmp_path / "published" / "README.md").read_text()
    assert read_inputs(tmp_path / "published").imported == inputs.imported


def test_a_freeze_is_not_imported_over_scores_nor_for_another_plan(scored_plan, text, tmp_path, caplog):
    carried, other = tmp_path / "cells.jsonl", tmp_path / "other"
    carried_out(replace(settings(text, scored_plan.parent), exported=str(carried)))
    freeze = [line for line in carried.read_text().splitlines() if '"freeze.json"' in line]
    (tmp_path / "freeze.jsonl").write_text(freeze[0] + "\n")
    # Scored first, and given a freeze of before afterwards.
    without = [line for line in carried.read_text().splitlines(keepends=True) if line.strip() not in freeze]
    (tmp_path / "without.jsonl").write_text("".join(without))
    carried_out(replace(settings(text, other), imported=str(tmp_path / "without.jsonl")))
    folder = carried_out(replace(settings(text, other), imported=str(tmp_path / "freeze.jsonl")))
    assert "its freeze.json is left out, as 18 runs were scored" in caplog.text
    assert not (folder / "freeze.json").exists()
    assert read_inputs(folder).frozen.startswith(NOT_FROZEN)
    # In an empty folder it may be taken, but only by the plan that it is of.
    changed = replace(settings(text, tmp_path / "changed", probe_seeds=[*range(8)]), imported=str(carried))
    with pytest.raises(UserError, match=r"freeze\.json: probe_seeds was frozen as .* another plan"):
        carried_out(changed)
    assert not any((tmp_path / "changed" / "little").glob("*"))


def test_an_import_that_is_cut_off_among_its_cells_has_the_freeze(scored_plan, text, tmp_path, monkeypatch):
    carried, replaced = tmp_path / "cells.jsonl", Path.replace
    carried_out(replace(settings(text, scored_plan.parent), exported=str(carried)))

    def full(path: Path, target: Path) -> Path:
        if path.suffix == ".jsonl" and ".import" in path.parts:
            raise OSError(28, "No space left on device")
        return replaced(path, target)

    other = replace(settings(text, tmp_path / "other"), imported=str(carried))
    with monkeypatch.context() as context:
        context.setattr(Path, "replace", full)
        with pytest.raises(UserError, match="No space left on device"):
            carried_out(other)
    folder = carried_out(other)
    assert (folder / "freeze.json").read_text() == (scored_plan / "freeze.json").read_text()


def test_no_absolute_path_is_frozen_or_recorded(scored_plan, text):
    assert str(text) not in (scored_plan / "freeze.json").read_text()
    assert str(scored_plan.parent) not in (scored_plan / "comparison.json").read_text()


@pytest.mark.slow
def test_the_report_tests_what_the_plan_does_and_nothing_else(text, tmp_path):
    given = {"evaluations": ["copy", "perplexity"], "tested": ["perplexity"], "probe_seeds": [0, 1]}
    carried_out(settings(text, tmp_path, freeze=True, **given))
    folder = carried_out(settings(text, tmp_path, **given))
    inputs = read_inputs(folder)
    assert list(inputs.primaries) == ["perplexity"]
    assert inputs.frozen.endswith("before the first score.")
