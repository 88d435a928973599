"""A plan carried out: every cell once, failures recorded, cut off and continued, carried to another machine."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from probe_settings import smoke_words
from small import mixer_settings, python_path

from attnbench.cli import compose as config
from attnbench.comparison import cells, compare
from attnbench.comparison.cells import Cell
from attnbench.comparison.progress import Progress
from attnbench.machine.processes import Outcome, run_in_processes
from attnbench.mixers.flash import Flash
from attnbench.model.language_model import function_of
from attnbench.report.inputs import read_inputs
from attnbench.results.folder import ROOT
from attnbench.results.job import is_whole
from attnbench.results.rows import is_complete, read_results
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import SELECTION_SEED, ComparisonSettings, LoggerSettings, PlanSettings, RunSettings
from attnbench.verdict.ranking import families
from attnbench.verdict.seeds import PER_RUN, figures
from attnbench.verdict.summary import summary

CLOCKS = ("tokens_per_second", "generator_tokens_per_second", "train_seconds", "first_step_seconds", "peak_memory_mib")
"""Metrics that two equal comparisons may differ in, and all of throughput."""

OVERRIDES = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("train.num_epochs=null", "train.num_steps=6", "train.batch_size=4", "train.warmup_steps=2", "data=text"),
]
RATES = [1e-2, 3e-2]
GROUPS = ("copy", "training", "throughput")


@cache
def composed(words: tuple[str, ...]) -> RunSettings:
    return config.compose(words)


def compose(words: Sequence[str]) -> RunSettings:
    """Each command line once: Hydra takes as long for one as a little cell does."""
    return composed(tuple(words))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # Sums of another order have other last digits.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text(" ".join(random.Random(0).choices(["the", "cat", "sees", "a", "green", "tree"], k=800)))
    return path


def plan(text: Path, **changed: Any) -> PlanSettings:
    evaluations = changed.get("evaluations", ["copy", "perplexity", "throughput"])
    own = smoke_words(*evaluations, **({"copy_learning_rates": RATES} if "copy" in evaluations else {}))
    given = {
        "name": "little",
        "overrides": [*OVERRIDES, f"data.path={text}", *own],
        "variants": {"softmax": ["attn=softmax"], "plain": ["attn=linear"]},
        "evaluations": evaluations,
        "seeds": [0, 1],
        "probe_seeds": [0, 1],
        "learning_rates": [4e-3],
        "num_workers": 2,
    }
    return PlanSettings(**{**given, **changed})


def settings(text: Path, outputs: Path, *, report: bool = False, rerun: bool = False, **changed) -> ComparisonSettings:
    moved = {name: changed.pop(name, None) for name in ("exported", "imported")}
    return ComparisonSettings(
        plan=plan(text, **changed),
        logger=LoggerSettings(mode="none"),
        outputs_dir=str(outputs),
        device="cpu",
        rerun=rerun,
        report=report,
        command="python scripts/compare.py plan=little",
        **moved,
    )


@pytest.fixture
def ran(monkeypatch) -> list[Cell]:
    """The cells that were run, here and now: processes have tests of their own."""
    found: list[Cell] = []
    monkeypatch.setattr(compare, "run_in_processes", in_this_process(found))
    return found


def in_this_process(ran: list[Cell]) -> Callable[..., Iterator[Outcome]]:
    def run(function: Callable[[Cell], None], items: Iterable[Cell], **_: object) -> Iterator[Outcome]:
        for item in items:
            ran.append(item)
            try:
                function(item)
                yield Outcome(item=item, seconds=1.0, error=None)
            except Exception as error:
                yield Outcome(item=item, seconds=1.0, error=str(error))

    return run


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> tuple[Path, list[tuple[bool, list[str]]]]:
    """A comparison in real processes; tests only read it. And how it was run: whether each cell got a fresh process."""
    calls = []

    def watched(function: Callable, items: list[Cell], *, fresh: bool, **given: Any) -> Iterator[Outcome]:
        calls.append((fresh, [item.label for item in items]))
        return run_in_processes(function, items, fresh=fresh, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_in_processes", watched)
        folder = compare.compare(settings(text, tmp_path_factory.mktemp("outputs")), compose)
    return folder, calls


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "comparison.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of the cells that comparison.json names, without what a clock or the commit says."""
    found = []
    for name in sorted(record(folder)["files"]):
        for row in read_results(folder / name):
            if row.identity.evaluation == "throughput" or row.measurement.metric in CLOCKS:
                row.measurement.value = row.measurement.low = row.measurement.high = None
                row.measurement.num_samples = None
            found.append({**row.to_dict(), "environment": None, "commit": None})
    return found


def test_every_cell_is_run_once(whole):
    _, calls = whole
    labels = [label for _, group in calls for label in group]
    assert sorted(labels) == sorted(
        [f"copy {variant}, lr {rate}, search" for variant in ("softmax", "plain") for rate in ("0.01", "0.03")]
        + [label for label in labels if label.startswith("copy") and "seed" in label]
        + [f"training {variant}, lr 0.004, seed {seed}" for variant in ("softmax", "plain") for seed in (0, 1)]
        + ["throughput softmax", "throughput plain"]
    )
    assert len([label for label in labels if label.startswith("copy") and "seed" in label]) == 4
    # Searches first, then what is scored in the plan's order, and what is timed last.
    kinds = ["search" if "search" in label else label.split()[0] for label in labels]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "search",
        "copy",
        "training",
        "throughput",
    ]


def test_timed_cells_run_alone_and_in_fresh_processes(whole):
    folder, calls = whole
    assert {label.split()[0] for fresh, group in calls for label in group if fresh} == {"throughput"}
    assert not any(label.startswith("throughput") for fresh, group in calls for label in group if not fresh)
    times = {}
    for log in folder.glob("**/train.log"):
        [last] = [path.stat().st_mtime for path in log.parent.glob("results/*.jsonl")][-1:]
        times[log.parent.name] = ((log.parent / "config.yaml").stat().st_mtime, last)
    timed = {name: span for name, span in times.items() if name.startswith("throughput")}
    assert len(timed) == 2
    for name, (start, end) in timed.items():
        assert start < end
        for other, (other_start, other_end) in times.items():
            assert other == name or other_end < start or other_start > end


def test_what_ran_beside_others_says_so(whole):
    folder, _ = whole
    found = [row for path in folder.glob("cells/copy-*/results/*.jsonl") for row in read_results(path)]
    speeds = [row.measurement for row in found if row.measurement.unit == "token/s"]
    assert speeds
    assert all(own.settings["shared_device"] for own in speeds)
    # A language model's speed beside others would be taken for its own.
    assert not any(row["metric"] == "tokens_per_second" for row in rows(folder) if row["evaluation"] == "training")


def test_the_record_says_what_was_compared_and_how(whole):
    folder, _ = whole
    content = record(folder)
    assert content["plan"] == "little"
    assert content["command"] == "python scripts/compare.py plan=little"
    assert content["variants"] == content["rank"] == ["softmax", "plain"]
    assert content["reference"] is None
    assert content["failures"] == []
    assert len(content["files"]) == 4 + 2 * 4 + 2
    assert all((folder / name).is_file() for name in content["files"])
    assert not any(f"seed{SELECTION_SEED}" in name for name in content["files"])
    assert [(rate["variant"], rate["evaluation"]) for rate in content["rates"]] == [
        *(("softmax", "copy"), ("softmax", "training"), ("plain", "copy"), ("plain", "training")),
    ]
    for rate in content["rates"]:
        assert set(rate["scores"]) == ({"0.01", "0.03"} if rate["evaluation"] == "copy" else set())
        assert rate["chosen"] in rate["grid"]


def test_the_report_is_written_of_the_record(whole, text, ran, monkeypatch):
    folder, _ = whole
    written = []
    monkeypatch.setattr("attnbench.report.page.write_report", written.append)
    compare.compare(settings(text, folder.parent, report=True), compose)
    assert written == [folder]


def test_figures_over_its_seeds(whole):
    folder, _ = whole
    found = [row for name in record(folder)["files"] for row in read_results(folder / name)]
    for figure in figures(found):
        own = [
            row.measurement.value
            for row in found
            if (row.identity.variant, row.identity.evaluation, row.measurement.metric)
            == (figure.variant, figure.evaluation, figure.metric)
            and figure.settings.items() <= row.measurement.settings.items()
            and set(row.measurement.settings) <= {*figure.settings, *PER_RUN}
        ]
        numbers = [value for value in own if value is not None]
        assert len(own) == (1 if figure.evaluation == "throughput" else 2)
        if numbers:
            assert figure.mean == pytest.approx(sum(numbers) / len(numbers))
    scored = [figure for figure in figures(found) if figure.metric == "symbol_accuracy"]
    assert {(figure.variant, figure.settings["length"]) for figure in scored} == {
        (variant, length) for variant in ("softmax", "plain") for length in (2, 5)
    }


def test_a_second_time_nothing_is_run_and_the_rows_are_the_same(whole, text, ran):
    folder, _ = whole
    before = rows(folder)
    assert compare.compare(settings(text, folder.parent), compose) == folder
    assert ran == []
    assert rows(folder) == before


def test_a_seed_more_runs_that_seed_alone(whole, text, tmp_path, ran):
    folder, _ = whole
    compare.export_cells(folder, tmp_path / "rows.jsonl")
    own = settings(text, tmp_path, imported=str(tmp_path / "rows.jsonl"), seeds=[0, 1, 2], probe_seeds=[0, 1, 2])
    compare.compare(own, compose)
    assert {cell.jobs[0].columns()["seed"] for cell in ran} == {2}
    assert sorted(cell.group for cell in ran) == ["copy", "copy", "training", "training"]


def test_one_axis_value_more_runs_that_evaluation_alone(whole, text, tmp_path, ran):
    folder, _ = whole
    compare.export_cells(folder, tmp_path / "rows.jsonl")
    own = settings(text, tmp_path, imported=str(tmp_path / "rows.jsonl"))
    own.plan.overrides = [*own.plan.overrides, "eval.throughput.lengths=[16,32]"]
    compare.compare(own, compose)
    assert [cell.group for cell in ran] == ["throughput", "throughput"]
    kept = [row for row in rows(tmp_path / "little") if row["evaluation"] != "throughput"]
    assert kept == [row for row in rows(folder) if row["evaluation"] != "throughput"]


def test_carried_elsewhere_nothing_is_run_again(whole, text, tmp_path, ran):
    folder, _ = whole
    own = settings(text, folder.parent, exported=str(tmp_path / "rows.jsonl"))
    assert compare.compare(own, compose) == folder
    other = compare.compare(settings(text, tmp_path, imported=str(tmp_path / "rows.jsonl")), compose)
    assert ran == []
    assert rows(other) == rows(folder)
    assert record(other)["rates"] == record(folder)["rates"]


def test_a_variant_that_cannot_be_composed_is_recorded_and_the_others_are_run(text, tmp_path, ran, capsys):
    variants = {"softmax": ["attn=softmax"], "odd": ["attn=softmax", "attn.num_heads=3"]}
    own = settings(text, tmp_path, variants=variants, evaluations=["copy"], probe_seeds=[0])
    with pytest.raises(UserError, match=r"^1 failed, listed in comparison\.json"):
        compare.compare(own, compose)
    [failure] = record(tmp_path / "little")["failures"]
    assert failure["cell"] == "odd"
    # Its column, with nothing in it.
    assert re.search(r"^ +softmax +odd *$", capsys.readouterr().out, re.MULTILINE)
    assert "num_heads" in failure["reason"]
    assert {cell.jobs[0].columns()["variant"] for cell in ran} == {"softmax"}
    assert len(ran) == 3


def test_where_nothing_can_be_composed_that_is_the_error(text, tmp_path, ran):
    own = settings(text, tmp_path, variants={"odd": ["attn=softmax", "attn.num_heads=3"]})
    with pytest.raises(UserError, match=r"attn\.num_heads=3"):
        compare.compare(own, compose)
    assert ran == []


@pytest.mark.parametrize(
    ("dies", "num_failures", "num_tried_again"),
    [
        ("copy softmax, lr 0.01, search", 2, 2),
        pytest.param("copy softmax, lr", 3, 3, marks=pytest.mark.slow),
        pytest.param("training plain, lr 0.004, seed 1", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_dies_is_recorded_and_tried_again_the_next_time(
    dies, num_failures, num_tried_again, text, tmp_path, ran, monkeypatch
):
    def dying(cell: Cell) -> None:
        if cell.label.startswith(dies):
            raise RuntimeError("its process was ended by SIGKILL")
        cells.execute(cell)

    own = settings(text, tmp_path, evaluations=["copy", "perplexity"], seeds=[0, 1], probe_seeds=[0])
    with monkeypatch.context() as patch:
        patch.setattr(compare, "execute", dying)
        with pytest.raises(UserError, match=f"^{num_failures} failed"):
            compare.compare(own, compose)
    failures = record(tmp_path / "little")["failures"]
    assert len(failures) == num_failures
    died = [failure for failure in failures if failure["cell"].startswith(dies)]
    assert {failure["reason"] for failure in died} == {"its process was ended by SIGKILL"}
    # A task whose search is missing has no rate, and its scored cells do not run.
    [*missing] = [failure for failure in failures if failure not in died]
    assert all("no learning rate can be chosen" in failure["reason"] for failure in missing)
    ran.clear()
    compare.compare(own, compose)
    assert len(ran) == num_tried_again
    assert record(tmp_path / "little")["failures"] == []


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The comparison's folder, in a place where a test may damage it."""
    folder, _ = whole
    return Path(shutil.copytree(folder, tmp_path / "outputs" / folder.name))


@pytest.mark.parametrize("how", ["missing", "empty", "torn", "a hole in it"])
def test_a_cell_whose_rows_were_cut_off_is_made_again(how, copied, text, ran):
    before = rows(copied)
    for kind in ("softmax-*/results/training-*", "cells/copy-plain-*/results/*", "cells/throughput-plain-*/results/*"):
        path = sorted(copied.glob(kind))[0]
        content = path.read_bytes()
        path.unlink()
        if how == "a hole in it":
            path.write_bytes(b"\0" * 4096 + content[4096:])
        elif how != "missing":
            path.write_bytes(content[:-9] if how == "torn" else b"")
    compare.compare(settings(text, copied.parent), compose)
    assert sorted(cell.group for cell in ran) == ["copy", "throughput", "training"]
    assert rows(copied) == before


def test_an_altered_cell_fails_by_its_file_and_the_others_are_run(copied, text, ran):
    before = rows(copied)
    altered = [next(copied.glob(f"cells/copy-plain-*-seed{seed}-*/results/*.jsonl")) for seed in (SELECTION_SEED, 0)]
    [torn] = copied.glob("cells/throughput-plain-*/results/*.jsonl")
    for path in altered:
        path.write_bytes(path.read_bytes().replace(b'"num_devices": 1', b'"num_devices": 2', 1))
    torn.write_bytes(torn.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"failed, listed in comparison\.json"):
        compare.compare(settings(text, copied.parent), compose)
    reasons = [failure["reason"] for failure in record(copied)["failures"]]
    [reason] = [reason for reason in reasons if str(altered[0]) in reason]
    assert reason.endswith("once it is removed, the command that made it makes it again")
    assert is_whole(torn)
    for path in altered:
        path.unlink()
    compare.compare(settings(text, copied.parent), compose)
    assert [row["value"] for row in rows(copied)] == [row["value"] for row in before]


def test_a_training_that_diverges_is_done_and_no_failure(text, tmp_path, ran):
    own = settings(text, tmp_path, evaluations=["perplexity"], learning_rates=[1e5], seeds=[0])
    folder = compare.compare(own, compose)
    assert len(ran) == 2
    statuses = {(row["evaluation"], row["metric"], row["status"]) for row in rows(folder)}
    assert ("training", "tokens_per_second", "diverged") in statuses
    assert {status for evaluation, _, status in statuses if evaluation == "perplexity"} == {"diverged"}
    ran.clear()
    compare.compare(own, compose)
    assert ran == []


def test_a_rerun_runs_every_cell_again(text, tmp_path, ran):
    given = {"evaluations": ["copy"], "probe_seeds": [0], "variants": {"softmax": ["attn=softmax"]}}
    folder = compare.compare(settings(text, tmp_path, **given), compose)
    before, labels = rows(folder), [cell.label for cell in ran]
    ran.clear()
    compare.compare(settings(text, tmp_path, rerun=True, **given), compose)
    assert [cell.label for cell in ran] == labels
    assert rows(folder) == before


def test_a_dry_run_lists_the_cells_and_writes_nothing(whole, text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    compare.compare(settings(text, tmp_path / "outputs", dry_run=True), compose)
    assert not (tmp_path / "outputs").exists()
    assert ran == []
    assert "14 cells" in caplog.text
    assert "  to do  copy plain, lr 0.03, search" in caplog.text
    assert "  to do  copy: 4 scored cells, at the rates that the searches will give" in caplog.text
    caplog.clear()
    folder, _ = whole
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    compare.compare(settings(text, folder.parent, dry_run=True), compose)
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    assert "to do" not in caplog.text
    assert caplog.text.count("  done  ") == 14


def test_only_some_of_the_evaluations(text, tmp_path, ran):
    own = settings(text, tmp_path, only=["throughput"])
    compare.compare(own, compose)
    assert [cell.group for cell in ran] == ["throughput", "throughput"]


def test_the_rest_of_the_plan_stays_in_the_record_and_what_is_not_there_is_missing(text, tmp_path, ran):
    own = settings(text, tmp_path, evaluations=["copy", "throughput"], probe_seeds=[0])
    compare.compare(own, compose)
    whole = record(tmp_path / "little")
    assert whole["missing"] == []
    ran.clear()
    own.plan.only = ["throughput"]
    compare.compare(own, compose)
    assert ran == []
    again = record(tmp_path / "little")
    assert {name: again[name] for name in ("files", "rates", "evaluations", "missing")} == {
        name: whole[name] for name in ("files", "rates", "evaluations", "missing")
    }
    new = settings(text, tmp_path / "new", evaluations=["copy", "throughput"], probe_seeds=[0], only=["throughput"])
    compare.compare(new, compose)
    begun = record(tmp_path / "new" / "little")
    assert begun["failures"] == []
    assert [label for label in begun["missing"] if label.endswith("search")] == [
        f"copy {name}, lr {rate}, search" for name in ("softmax", "plain") for rate in ("0.01", "0.03")
    ]
    assert begun["missing"][-1] == "copy plain, 1 scored"


def test_how_long_it_took_is_of_all_sittings(text, tmp_path, ran, monkeypatch):
    own = settings(text, tmp_path, evaluations=["throughput"])
    compare.compare(own, compose)
    path = tmp_path / "little" / "comparison.json"
    content = {**record(path.parent), "seconds": 1000, "started": "2020-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(content))
    compare.compare(own, compose)
    assert record(path.parent)["seconds"] >= 1000
    assert record(path.parent)["started"] == "2020-01-01T00:00:00+00:00"
    own.rerun, own.plan.only = True, ["throughput"]
    compare.compare(own, compose)
    # The other evaluations' cells are as old as they were.
    assert record(path.parent)["seconds"] >= 1000
    own.plan.only = None
    compare.compare(own, compose)
    assert record(path.parent)["seconds"] < 1000


def test_variants_on_different_corpora_are_refused_before_anything_runs(text, tmp_path, ran):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    own = settings(text, tmp_path, evaluations=["throughput"])
    own.plan.variants["plain"] = ["attn=linear", f"data.path={other}"]
    with pytest.raises(UserError, match=r"^plan\.variants: scores on different corpora compare nothing; softmax reads"):
        compare.compare(own, compose)
    assert ran == []


def test_a_list_of_evaluations_is_refused_by_name(text, tmp_path, ran):
    own = settings(text, tmp_path)
    own.plan.evaluations = ["battery"]
    with pytest.raises(UserError, match="battery is a list of evaluations"):
        compare.compare(own, compose)
    assert ran == []


def test_progress_says_what_came_out_what_runs_and_how_long_the_rest_takes(text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    own = settings(text, tmp_path, evaluations=["copy"], probe_seeds=[0], num_workers=1, costs={"copy": 60.0})
    compare.compare(own, compose)
    said = [record.message for record in caplog.records]
    # Before anything has run the plan's measured costs count, and then the one second that each cell takes.
    assert any(line.startswith("[0/6] (about 6:00 to go, now copy softmax") for line in said)
    lines = [line for line in said if re.match(r"\[\d/6\] copy", line)]
    assert [line.split("]")[0] for line in lines] == [f"[{number}/6" for number in range(1, 7)]
    assert re.search(r"softmax.* search: selection [\d.]+, 0:01 \(about 0:05 to go, now copy softmax", lines[0])
    assert re.search(r": symbol_accuracy [\d.e-]+ at length \d+, 0:01$", lines[-1])
    # The last lines say how the comparison grows.
    assert any("+plan.variants.mine=" in line and line.strip().startswith(own.command) for line in said)


def test_the_time_left_begins_with_the_plan_s_costs_and_follows_what_runs():
    progress = Progress(Counter(copy=2, training=1), 1, {"copy": 10.0, "training": 100.0})
    assert progress.seconds_left() == 120
    assert Progress(Counter(copy=2), 1, {}).seconds_left() is None
    # Twice as slow as where the costs are of.
    progress.seconds, progress.left = {"copy": [20.0]}, Counter(copy=1, training=1)
    assert progress.seconds_left() == 20 + 200


def test_a_dry_run_says_how_long_it_will_take_here(text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    own = settings(text, tmp_path, evaluations=["copy", "throughput"], dry_run=True)
    compare.compare(own, compose)
    (line,) = [record.message for record in caplog.records if record.message.startswith("about ")]
    assert re.match(r"about \d+:\d\d here for \d+ cells: trainings by a few steps of each", line)
    assert "not counted: 2 of throughput" in line
    assert ran == []
    assert not list(tmp_path.glob("**/results"))


def test_one_variant_more_runs_its_own_cells_alone(text, tmp_path, ran):
    compare.compare(settings(text, tmp_path, evaluations=["copy"], probe_seeds=[0]), compose)
    before = len(ran)
    variants = {"softmax": ["attn=softmax"], "plain": ["attn=linear"], "mine": ["attn=linear", "attn.qk_norm=true"]}
    compare.compare(settings(text, tmp_path, evaluations=["copy"], probe_seeds=[0], variants=variants), compose)
    assert {cell.jobs[0].columns()["variant"] for cell in ran[before:]} == {"mine"}


def test_another_number_of_threads_is_named_where_timed_cells_run_again(text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    own = settings(text, tmp_path, evaluations=["throughput"])
    compare.compare(own, compose)
    assert "measured again" not in caplog.text
    torch.set_num_threads(2)
    compare.compare(own, compose)
    assert len(ran) == 4
    (line,) = [record.message for record in caplog.records if "measured again" in record.message]
    assert "(1 threads) is" in line
    assert "(2 threads) now (OMP_NUM_THREADS" in line


def test_the_plans_that_come_with_it_compose(text):
    for path in sorted((ROOT / "conf" / "plan").glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        for variant, words in content["variants"].items():
            evaluations = f"eval=[{','.join(content['evaluations'])}]"
            overrides = [*content["overrides"], "data=text", f"data.path={text}"]
            composed = compose([evaluations, "device=cpu", *overrides, *words])
            assert [own.name for own in composed.evaluations] == content["evaluations"], (path.name, variant)


@pytest.mark.slow
def test_stopped_and_continued_is_what_was_never_stopped(whole, text, tmp_path, ran):
    """By SIGTERM, at one cell or another, in processes of their own; it goes on in this one."""
    folder, _ = whole
    config = tmp_path / "conf" / "plan" / "little.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump({name: value for name, value in asdict(plan(text)).items() if name != "name"}))
    process = subprocess.Popen(
        [
            *(sys.executable, "scripts/compare.py", "--config-dir", str(tmp_path / "conf"), "plan=little"),
            *("device=cpu", "logger=none", f"outputs_dir={tmp_path}", "report=false"),
        ],
        cwd=ROOT,
        env={**python_path(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    num_finished, said = random.Random(os.getpid()).randrange(10), []
    for line in process.stderr:
        said.append(line)
        if line.startswith(f"[{num_finished}/") or (line.startswith("plan=") and not num_finished):
            time.sleep(random.random() / 2)
            process.send_signal(signal.SIGTERM)
            break
    said.append(process.stderr.read())
    assert process.wait(timeout=60) in (143, 0), said
    done = {path.relative_to(tmp_path) for path in tmp_path.rglob("results/*.jsonl")}
    compare.compare(settings(text, tmp_path), compose)
    assert (
        not {path.relative_to(tmp_path) for cell in ran for path in cell.results}
        & {path for path in done if is_complete(tmp_path / path)}
        or ran
    )
    assert rows(tmp_path / "little") == rows(folder)


def test_variants_that_are_one_model_in_an_evaluation_share_its_cells_there(text, tmp_path, ran, capsys):
    variants = {
        "softmax": ["attn=softmax"],
        "convolved": ["attn=softmax", "attn.conv_size=4"],
        "flash": ["attn=flash"],
        "linear": ["attn=linear"],
    }
    given = {
        "variants": variants,
        "seeds": [0],
        "probe_seeds": [0],
        "evaluations": ["copy", "perplexity", "throughput"],
    }
    folder = compare.compare(settings(text, tmp_path, report=True, **given), compose)
    by_evaluation = {
        group: [cell.jobs[0].columns()["variant"] for cell in ran if cell.group == group] for group in GROUPS
    }
    # Copy gives all a convolution; flash is softmax by another kernel, whose speed is its own.
    assert set(by_evaluation["copy"]) == {"softmax", "linear"}
    assert set(by_evaluation["training"]) == {"softmax", "convolved", "linear"}
    assert set(by_evaluation["throughput"]) == set(variants)
    assert record(folder)["shared"] == {
        "copy": {"convolved": "softmax", "flash": "softmax"},
        **{name: {"flash": "softmax"} for name in ("training", "perplexity")},
    }
    shown = capsys.readouterr().out
    assert "convolved is softmax in copy: one model, run once." in shown
    assert "flash is softmax in copy, training, perplexity: one model, run once." in " ".join(shown.split())
    inputs = read_inputs(folder)
    summed = figures(inputs.rows, inputs.protocol.shared)
    ranked = families(summed, rank=list(variants), reference=None)
    pairs = {family.evaluation: {(pair.first, pair.second) for pair in family.comparisons} for family in ranked}
    assert pairs["copy"] == {("softmax", "linear")}
    assert pairs["perplexity"] == {("softmax", "convolved"), ("softmax", "linear"), ("convolved", "linear")}
    content = summary(summed, ranked, variants)
    index = next(index for index, column in enumerate(content.columns) if column.header.startswith("copy"))
    told = {variant: entries[index].text for variant, entries in content.lines.items()}
    assert told["softmax"] == told["convolved"] == told["flash"] != "–"
    page = (folder / "report" / "index.html").read_text()
    assert "softmax = convolved = flash" in page
    assert "softmax = flash" in page


def test_variants_that_are_one_model_everywhere_are_refused(text, tmp_path, ran):
    variants = {"softmax": ["attn=softmax"], "again": ["attn=softmax", "attn.conv_size=4"]}
    with pytest.raises(UserError, match=r"plan\.variants: softmax and again are one model in every evaluation"):
        compare.compare(settings(text, tmp_path, variants=variants, evaluations=["copy"]), compose)
    assert not ran


def test_a_mixer_is_another_s_function_only_where_it_says_so_itself():
    def function(name: str, **options) -> dict[str, Any]:
        return function_of(mixer_settings(name, **options))

    assert function("flash") == function("softmax")
    assert function("flash", qk_norm=True) == function("softmax", qk_norm=True) != function("softmax")
    flash = mixer_settings("flash")
    windowed = replace(flash, options={**flash.options, "window": 8})
    assert function_of(windowed) == {**function("softmax"), "target": flash.target, "window": 8}

    class Other(Flash):
        """A class that derives from another may compute anything."""

    derived = replace(mixer_settings("flash"), target=f"{__name__}.Other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Other", Other, raising=False)
        trust([derived.target])
        assert function_of(derived)["target"] == derived.target
