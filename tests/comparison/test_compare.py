"""A plan carried out: every cell once, failures recorded, cut off and continued, carried to another machine."""

import hashlib
import io
import itertools
import json
import logging
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
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from probe_settings import smoke_words
from small import (
    comparison_settings,
    compose_once,
    identity_of,
    in_this_process,
    little_plan,
    mixer_settings,
    python_path,
)

from attnbench.comparison import compare, dry_run, workers
from attnbench.comparison.plan import Comparison
from attnbench.comparison.progress import CameOut, Kind, Progress, fitting, what_came_out
from attnbench.evals.perplexity import Perplexity
from attnbench.machine.bars import AboveTheBar
from attnbench.machine.processes import Outcome
from attnbench.mixers.flash import Flash
from attnbench.model.building import function_of
from attnbench.report.inputs import read_inputs
from attnbench.report.results import Results
from attnbench.report.sections.answer import answer
from attnbench.results.folder import ROOT
from attnbench.results.job import Job
from attnbench.results.row_files import read_results
from attnbench.results.rows import REFERENCE, REFERENCE_RATIO, Measurement, ResultRow
from attnbench.settings.combinations import check_plan
from attnbench.settings.errors import Interrupted, UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import SELECTION_SEED, ComparisonSettings, PlanSettings
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import summary, verdicts_of

CLOCKS = ("tokens_per_second", "generator_tokens_per_second", "train_seconds", "first_step_seconds", "peak_memory_mib")
"""Metrics that two equal comparisons may differ in, and all of throughput."""

OVERRIDES = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("train.num_epochs=null", "train.num_steps=6", "train.batch_size=4", "train.warmup_steps=2", "data=text"),
    "train.validation_characters=200",
]
VARIANTS = {"softmax": ["attn=softmax"], "plain": ["attn=linear"]}
GROUPS = ("copy", "training", "throughput")
ODD = {"odd": ["attn=softmax", "attn.num_heads=3"]}
"""A variant that no model can be built of."""

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(text: Path, evaluations: Iterable[str] = ("copy", "perplexity", "throughput"), **changed: Any) -> PlanSettings:
    changes = {"copy_learning_rates": [1e-2, 3e-2]} if "copy" in evaluations else {}
    # All of the text takes longer than the trainings.
    changes |= {"perplexity_characters": 200} if "perplexity" in evaluations else {}
    overrides = [*OVERRIDES, f"data.path={text}", *smoke_words(*evaluations, **changes)]
    given = {"overrides": overrides, "evaluations": [*evaluations], "num_workers": 2}
    return little_plan(**{**given, **changed})


def settings(text: Path, outputs: Path, **changed: Any) -> ComparisonSettings:
    """Settings of compare.py, or of its plan, changed."""
    of_command = {name: changed.pop(name) for name in ("report", "rerun", "exported", "imported") if name in changed}
    command = "attnbench compare plan=little"
    return comparison_settings(plan(text, **changed), outputs, command=command, **of_command)


def compared(given: ComparisonSettings) -> Path:
    return compare.compare(given, compose_once)


def recorder(calls: list[tuple[bool, list[Job]]]) -> Callable[..., Iterator[Outcome]]:
    """Stand in for `run_in_processes`; keep for each group whether every cell is to get a fresh process."""

    def run(
        function: Callable[[Sequence[Job]], None], items: Iterable[Sequence[Job]], *, fresh: bool, **_: Any
    ) -> Iterator[Outcome]:
        calls.append((fresh, []))
        for outcome in in_this_process(function, items):
            calls[-1][1].extend(outcome.item)
            yield outcome

    return run


@pytest.fixture
def ran(monkeypatch) -> Callable[[], list[Job]]:
    """Cells that were run since this was asked last, all in this process: processes have tests of their own."""
    calls: list[tuple[bool, list[Job]]] = []
    monkeypatch.setattr(workers, "run_in_processes", recorder(calls))

    def since() -> list[Job]:
        found = [cell for _, group in calls for cell in group]
        calls.clear()
        return found

    return since


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> tuple[Path, list[tuple[bool, list[Job]]]]:
    """A finished comparison, which tests only read, and how its cells were run."""
    calls: list[tuple[bool, list[Job]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_in_processes", recorder(calls))
        return compared(settings(text, tmp_path_factory.mktemp("outputs"))), calls


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of the finished comparison's folder, which a test may damage."""
    folder, _ = whole
    return Path(shutil.copytree(folder, tmp_path / "outputs" / folder.name))


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "comparison.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of the cells that comparison.json names, without what a clock or the commit says."""
    listed = []
    for row in (row for name in sorted(record(folder)["files"]) for row in read_results(folder / name)):
        if row.identity.evaluation == "throughput" or row.measurement.metric in CLOCKS:
            row.measurement.value = row.measurement.low = row.measurement.high = None
            row.measurement.num_samples = None
        entry = row.to_dict()
        loads = ("load_average", REFERENCE, REFERENCE_RATIO)
        settings = {name: it for name, it in entry["settings"].items() if name not in loads}
        listed.append({**entry, "settings": settings, "environment": None, "commit": None})
    return listed


def groups(ran: Iterable[Job]) -> list[str]:
    return sorted(cell.evaluation for cell in ran)


def test_every_cell_is_run_once_what_is_scored_after_its_search_and_what_is_timed_last(whole):
    _, calls = whole
    labels = [cell.label for _, group in calls for cell in group]
    variants = ("softmax", "plain")
    scored = [label for label in labels if label.startswith("copy") and "seed" in label]
    assert len(scored) == 4
    assert sorted(labels) == sorted(
        [f"copy {variant}, lr {rate}, search" for variant in variants for rate in ("0.01", "0.03")]
        + scored
        + [f"training {variant}, lr 0.004, seed {seed}" for variant in variants for seed in (0, 1)]
        + [f"throughput {variant}" for variant in variants]
    )
    copied = [label for label in labels if label.startswith("copy")]
    # A search waits for no other.
    assert [label.split()[1].strip(",") for label in copied] == ["softmax"] * 4 + ["plain"] * 4
    assert [label in scored for label in copied] == [False, False, True, True] * 2
    assert [label.split()[0] for label in labels[-2:]] == ["throughput"] * 2
    # What is timed shares the device with nothing, and a process with nothing either.
    for fresh, group in calls:
        assert all((cell.evaluation == "throughput") == fresh == (not cell.shares_device) for cell in group)


def test_what_ran_beside_others_says_so(whole):
    folder, _ = whole
    probes = [row.measurement for path in folder.glob("cells/copy-*/results/*.jsonl") for row in read_results(path)]
    speeds = [measurement for measurement in probes if measurement.unit == "token/s"]
    assert speeds
    assert all(measurement.settings["shared_device"] for measurement in speeds)
    # The speed of a language model that shared the device would be read as that of one that did not.
    assert not any(row["metric"] == "tokens_per_second" for row in rows(folder) if row["evaluation"] == "training")


@pytest.mark.slow
def test_workers_find_the_same_and_what_is_timed_runs_alone(whole, text, tmp_path):
    folder = compared(settings(text, tmp_path))
    assert rows(folder) == rows(whole[0])
    times = {}
    for config in folder.glob("**/config.yaml"):
        ends = [path.stat().st_mtime for path in config.parent.glob("results/*.jsonl")]
        times[config.parent.name] = (config.stat().st_mtime, max(ends))
    timed = {name: span for name, span in times.items() if name.startswith("throughput")}
    assert len(timed) == 2
    for name, (start, end) in timed.items():
        others = (span for other, span in times.items() if other != name)
        assert all(other_end < start or other_start > end for other_start, other_end in others)


def test_stacked_trainings_are_the_same_cells_with_the_same_scores(whole, text, tmp_path, ran):
    folder = compared(settings(text, tmp_path, evaluations=["copy"], stack=3))
    labels = [cell.label for cell in ran()]
    alone = {path.relative_to(whole[0]) for path in whole[0].glob("cells/copy-*/results/*.jsonl")}
    assert {path.relative_to(folder) for path in folder.glob("cells/copy-*/results/*.jsonl")} == alone
    assert len(labels) == len(set(labels)) == len(alone)
    for path in alone:
        ours, theirs = (
            {row.measurement.metric: row.measurement for row in read_results(where / path)}
            for where in (folder, whole[0])
        )
        # Two seeds or two rates of a variant at a time, as the plan asks for them.
        assert ours["selection"].settings["stack"] == 2
        assert (ours["selection"].value, ours["selection"].status) == (theirs["selection"].value, "ok")
    assert not record(folder)["failures"]


def test_a_few_seeds_have_no_interval_and_the_best_is_that_of_the_table(whole):
    scores = Results(whole[0]).scores
    of_few = scores[scores["seeds"] == 2]
    assert len(of_few)
    assert of_few[["low", "high"]].isna().all(axis=None)
    assert (of_few[of_few["is_best"]].groupby("evaluation").size() >= 1).all()


def test_the_record_says_what_was_compared_and_how(whole):
    folder, _ = whole
    content = record(folder)
    assert (content["plan"], content["command"]) == ("little", "attnbench compare plan=little")
    assert content["variants"] == content["rank"] == ["softmax", "plain"]
    assert content["reference"] is None
    assert content["failures"] == content["missing"] == []
    assert len(content["files"]) == 4 + 2 * 4 + 2
    assert all((folder / name).is_file() for name in content["files"])
    assert not any(f"seed{SELECTION_SEED}" in name for name in content["files"])
    # Text of each language model that is scored, and of none that rates were chosen by.
    samples = {path.parent for path in folder.glob("*/sample.json")}
    assert samples == {(folder / name).parents[1] for name in content["files"] if "/results/training-" in name}
    assert [(rate["variant"], rate["evaluation"]) for rate in content["rates"]] == [
        *(("softmax", "copy"), ("softmax", "training"), ("plain", "copy"), ("plain", "training")),
    ]
    for rate in content["rates"]:
        assert set(rate["scores"]) == ({"0.01", "0.03"} if rate["evaluation"] == "copy" else set())
        assert rate["chosen"] in rate["grid"]


def test_a_second_time_nothing_is_run_and_the_report_is_written_of_the_record(whole, text, ran, monkeypatch):
    folder, _ = whole
    before, written = rows(folder), []
    monkeypatch.setattr("attnbench.report.page.write_report", lambda folder, inputs: written.append(folder))
    assert compared(settings(text, folder.parent, report=True)) == folder
    assert (ran(), written) == ([], [folder])
    assert rows(folder) == before


@pytest.mark.parametrize(
    ("changed", "words", "again"),
    [
        ({"seeds": [0, 1, 2], "probe_seeds": [0, 1, 2]}, [], ["copy", "copy", "training", "training"]),
        ({}, ["eval.throughput.lengths=[16,32]"], ["throughput", "throughput"]),
        ({"variants": {**VARIANTS, "mine": ["attn=linear", "attn.qk_norm=true"]}, "only": ["copy"]}, [], ["copy"] * 4),
    ],
    ids=["a seed", "a length", "a variant"],
)
def test_one_value_more_runs_its_cells_alone(changed, words, again, copied, text, ran):
    given, before = settings(text, copied.parent, **changed), rows(copied)
    given.plan.overrides += words
    compared(given)
    assert groups(ran()) == again
    after = rows(copied)
    assert all(row in after for row in before if not words or row["evaluation"] not in again)


def test_carried_elsewhere_nothing_is_run_again(whole, text, tmp_path, ran):
    folder, _ = whole
    carried = str(tmp_path / "rows.jsonl")
    assert compared(settings(text, folder.parent, exported=carried)) == folder
    other = compared(settings(text, tmp_path, imported=carried))
    assert ran() == []
    there = rows(other)
    assert {mark["sha256"] for row in there for mark in row["settings"].pop("imported")} == {
        hashlib.sha256(Path(carried).read_bytes()).hexdigest()
    }
    assert there == rows(folder)
    assert record(other)["rates"] == record(folder)["rates"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"variants": ODD}, r"^attn\.num_heads=3"),
        ({"variants": {**VARIANTS, **ODD}}, r"^plan\.variants\.odd: attn\.num_heads=3.*plan\.variants\.odd=null"),
        ({"variants": {**VARIANTS, "mine": ["attn=sofmax"]}},
         r"^plan\.variants\.mine: attn=sofmax: unknown \(did you mean softmax\?\)"),
        ({"variants": {**VARIANTS, "mine": ["attn=linear", "attn.conv_sise=4"]}},
         r"^plan\.variants\.mine: attn\.conv_sise=4: unknown setting \(did you mean conv_size\?\)"),
        ({"variants": {**VARIANTS, "mine": ["attn=linear", "attn.backend=fla"]}},
         r"^plan\.variants\.mine: attn\.backend=fla: .*device=cpu.*plan\.variants\.mine=null"),
        ({"variants": {**VARIANTS, "plain": ["attn=linear", "data.validation_fraction=0.2"]}},
         r"^plan\.variants: scores on different corpora compare nothing; softmax reads"),
        ({"variants": {"softmax": ["attn=softmax"], "again": ["attn=softmax", "attn.conv_size=4"]},
          "evaluations": ["copy"]},
         r"plan\.variants: softmax and again are one model in every evaluation"),
        ({"variants": {**VARIANTS, "mine": ["attn=module", "attn.path=outside_layers:SeesAhead"]}},
         r"^plan\.variants\.mine: .*SeesAhead: position 0 sees"),
        ({"variants": {**VARIANTS, "mine": ["attn=module", "attn.path=outside_layers:Nobody"]}},
         r"^plan\.variants\.mine: .*outside_layers has no Module"),
    ],
)  # fmt: skip
def test_a_plan_that_compares_nothing_is_refused_before_anything_runs(changed, message, text, tmp_path, ran):
    with pytest.raises(UserError, match=message):
        compared(settings(text, tmp_path, **changed))
    assert ran() == []


def test_a_list_of_evaluations_is_refused_by_name(text, tmp_path, ran):
    given = settings(text, tmp_path)
    given.plan.evaluations = ["battery"]
    with pytest.raises(UserError, match="battery is a list of evaluations"):
        compared(given)
    assert ran() == []


@pytest.mark.parametrize(
    ("dies", "evaluation", "num_failures"),
    [
        ("copy softmax, lr 0.01, search", "copy", 2),
        pytest.param("copy softmax, lr", "copy", 3, marks=pytest.mark.slow),
        pytest.param("training plain, lr 0.004, seed 1", "perplexity", 1, marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_dies_is_recorded_and_tried_again_the_next_time(
    dies, evaluation, num_failures, text, tmp_path, ran, monkeypatch
):
    def dying(cell: Job) -> None:
        if cell.label.startswith(dies):
            raise RuntimeError("its process was ended by SIGKILL")
        whole(cell)

    whole = workers.execute
    given = settings(text, tmp_path, evaluations=[evaluation], probe_seeds=[0])
    with monkeypatch.context() as patch:
        patch.setattr(workers, "execute", dying)
        with pytest.raises(UserError, match=f"^{num_failures} failed"):
            compared(given)
    failures = record(tmp_path / "little")["failures"]
    assert len(failures) == num_failures
    died = [failure for failure in failures if failure["cell"].startswith(dies)]
    assert {failure["reason"] for failure in died} == {"its process was ended by SIGKILL"}
    # A task whose search is missing has no rate, and its scored cells do not run.
    assert all("no learning rate can be chosen" in failure["reason"] for failure in failures if failure not in died)
    ran()
    compared(given)
    assert len(ran()) == num_failures
    assert record(tmp_path / "little")["failures"] == []


def test_a_cell_whose_results_are_missing_is_made_again(copied, text, ran):
    before = rows(copied)
    for kind in ("softmax-*/results/training-*", "plain-*/results/perplexity-*", "cells/throughput-plain-*/results/*"):
        sorted(copied.glob(kind))[0].unlink()
    compared(settings(text, copied.parent))
    assert groups(ran()) == ["throughput", "training", "training"]
    assert rows(copied) == before


def test_an_altered_cell_fails_by_its_file_and_the_others_are_run(copied, text, ran):
    before = rows(copied)
    altered = [next(copied.glob(f"cells/copy-plain-*-seed{seed}-*/results/*.jsonl")) for seed in (SELECTION_SEED, 0)]
    [missing] = copied.glob("cells/throughput-plain-*/results/*.jsonl")
    for path in altered:
        path.write_bytes(path.read_bytes().replace(b'"num_devices": 1', b'"num_devices": 2', 1))
    missing.unlink()
    with pytest.raises(UserError, match=r"failed, listed in comparison\.json"):
        compared(settings(text, copied.parent))
    reasons = [failure["reason"] for failure in record(copied)["failures"]]
    [reason] = [reason for reason in reasons if altered[0].name in reason]
    assert reason.endswith("once it is removed, the command that made it makes it again")
    assert missing.exists()
    for path in altered:
        path.unlink()
    compared(settings(text, copied.parent))
    assert [row["value"] for row in rows(copied)] == [row["value"] for row in before]


def test_a_training_that_diverges_is_done_and_no_failure(text, tmp_path, ran):
    given = settings(text, tmp_path, evaluations=["perplexity"], learning_rates=[1e5], seeds=[0])
    folder = compared(given)
    assert len(ran()) == 2
    statuses = {(row["evaluation"], row["metric"], row["status"]) for row in rows(folder)}
    assert ("training", "tokens_per_second", "diverged") in statuses
    assert {status for evaluation, _, status in statuses if evaluation == "perplexity"} == {"diverged"}
    # They count as the unigram, which has a number.
    chances = [row["settings"]["chance"] for row in rows(folder) if row["metric"] == "nats_per_character"]
    assert all(1 < chance < 5 for chance in chances)
    compared(given)
    assert ran() == []


def test_a_rerun_runs_every_cell_again(text, tmp_path, ran):
    given = {"evaluations": ["copy"], "probe_seeds": [0], "variants": {"softmax": ["attn=softmax"]}}
    folder = compared(settings(text, tmp_path, **given))
    before, labels = rows(folder), [cell.label for cell in ran()]
    compared(settings(text, tmp_path, rerun=True, **given))
    assert [cell.label for cell in ran()] == labels
    assert rows(folder) == before


def test_a_dry_run_lists_the_cells_and_how_long_they_take_and_writes_nothing(whole, text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    compared(settings(text, tmp_path / "outputs", dry_run=True))
    assert not (tmp_path / "outputs").exists()
    assert "14 runs" in caplog.text
    assert "  to do  copy plain, lr 0.03, search" in caplog.text
    assert "  to do  copy: 4 scored runs, at the rates that the searches will give" in caplog.text
    (line,) = [record.message for record in caplog.records if record.message.startswith("about ")]
    assert re.match(r"about \d+:\d\d for \d+ runs where the machine stays as busy as it is now, less where", line)
    assert "not counted: 2 of throughput" in line
    caplog.clear()
    folder, _ = whole
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    compared(settings(text, folder.parent, dry_run=True))
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    assert "to do" not in caplog.text
    assert caplog.text.count("  done  ") == 14
    assert ran() == []


def test_a_dry_run_names_a_variant_that_fails_and_lists_the_others(text, tmp_path, monkeypatch, caplog):
    timed = dry_run._seconds_of

    def fails(job: Any) -> float:
        if "plain" in job.label:
            raise AttributeError("no such weight\nand more")
        return timed(job)

    monkeypatch.setattr(dry_run, "_seconds_of", fails)
    caplog.set_level("INFO", logger="attnbench")
    given = settings(text, tmp_path, evaluations=["copy", "perplexity"], dry_run=True)
    with pytest.raises(UserError, match=r"^2 cannot run, named above"):
        compared(given)
    failed = [line for line in caplog.messages if line.startswith("failed: ")]
    assert [line.partition(": AttributeError: ")[2] for line in failed] == ["no such weight"] * 2
    assert all("plain" in line for line in failed)
    assert "  to do  copy softmax, lr 0.03, search" in caplog.messages
    assert [line for line in caplog.messages if line.startswith("about ")]


def test_cut_off_between_two_searches_the_report_has_what_is_scored_and_says_that_it_is_not_all(
    text, tmp_path, monkeypatch, caplog
):
    def four(function: Callable[[Any], object], items: Iterable[Any], **_: object) -> Iterator[Outcome]:
        outcomes = in_this_process(function, items)
        yield from itertools.islice(outcomes, 4)
        raise Interrupted("stopped", 130)

    given = settings(text, tmp_path, evaluations=["copy"])
    monkeypatch.setattr(workers, "run_in_processes", four)
    with pytest.raises(Interrupted):
        compared(given)
    content = record(tmp_path / "little")
    assert [rate["variant"] for rate in content["rates"]] == ["softmax"]
    assert len(content["files"]) == len(given.plan.probe_seeds)
    assert content["failures"] == []
    assert content["missing"][-1] == "copy plain, 2 scored"
    inputs = read_inputs(tmp_path / "little")
    assert {figure.label for figure in inputs.figures} == {"softmax"}
    assert answer(inputs)["Unfinished"]
    caplog.set_level("INFO", logger="attnbench")
    caplog.clear()
    compared(settings(text, tmp_path, evaluations=["copy"], dry_run=True))
    assert [line for line in caplog.messages if line.startswith("  done  copy softmax") and "seed" in line]
    assert "  to do  copy: 2 scored runs, at the rates that the searches will give" in caplog.messages


def test_a_dry_run_times_whole_batches_where_they_are_short_and_divides_no_gpu_by_its_workers(monkeypatch):
    def timed(job: Any, num_sequences: int) -> tuple[float, float]:
        return 5.0, job.overhead + job.each * num_sequences

    def seconds(device: str, overhead: float, each: float) -> float:
        named = {"evaluation": "copy", "task_label": "copy softmax", "matched": True, "device": torch.device(device)}
        train = {"train": SimpleNamespace(batch_size=64), "num_steps": 100, "overhead": overhead, "each": each}
        job = SimpleNamespace(**named, **train)
        given: Any = SimpleNamespace(settings=None, scores=[SimpleNamespace(prepared=job)])
        return dry_run._seconds_of_elements(given, ["copy"])["copy", "copy softmax"]

    monkeypatch.setattr(dry_run, "_time_steps", timed)
    monkeypatch.setattr(dry_run, "gpus_and_workers", lambda settings: ([], 4))
    assert seconds("cpu", 0.02, 0.0) == pytest.approx(100 * 0.02 / 4)
    assert seconds("cpu", 0.02, 1.0) == pytest.approx(100 * (0.02 + 4) * 16 / 4)
    assert seconds("cuda", 0.02, 0.0) == pytest.approx(5 + 100 * 0.02)


def test_of_only_some_evaluations_the_others_are_left_as_they_are_and_not_missing(whole, copied, text, tmp_path, ran):
    kept = ("files", "rates", "evaluations", "missing")
    before = record(copied)
    compared(settings(text, copied.parent, only=["throughput"]))
    assert ran() == []
    assert [record(copied)[name] for name in kept] == [before[name] for name in kept]
    folder = compared(settings(text, tmp_path / "new", only=["throughput"]))
    assert groups(ran()) == ["throughput", "throughput"]
    assert record(folder)["failures"] == record(folder)["missing"] == []
    assert "Unfinished" not in answer(read_inputs(folder))


def test_an_evaluation_that_was_begun_is_missing_whichever_are_to_run_now(copied, text, ran):
    next(copied.glob("cells/copy-plain-*-seed1-*/results")).rename(copied / "elsewhere")
    compared(settings(text, copied.parent, only=["throughput"]))
    assert ran() == []
    [label] = record(copied)["missing"]
    assert re.fullmatch(r"copy plain, .*seed 1", label)


def test_how_long_it_took_is_of_all_sittings(text, tmp_path, ran):
    given = settings(text, tmp_path, evaluations=["throughput"])
    path = compared(given) / "comparison.json"
    content = {**record(path.parent), "seconds": 1000, "started": "2020-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(content))
    compared(given)
    assert record(path.parent)["seconds"] >= 1000
    assert record(path.parent)["started"] == "2020-01-01T00:00:00+00:00"
    given.rerun, given.plan.only = True, ["throughput"]
    compared(given)
    # The other evaluations' cells are as old as they were.
    assert record(path.parent)["seconds"] >= 1000
    given.plan.only = None
    compared(given)
    assert record(path.parent)["seconds"] < 1000


@pytest.mark.parametrize(
    ("device", "number", "threads"), [("cpu", 1, 8), ("cpu", 5, 2), ("cuda", 1, 2), ("cuda", 5, 2)]
)
def test_workers_share_the_cores(device, number, threads, text, tmp_path, monkeypatch):
    """On a GPU however few runs there are: one that has as many threads is kept."""
    given = settings(text, tmp_path, num_workers=4)
    monkeypatch.setattr(workers, "resolve_device", lambda device: torch.device(given.device))
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 8)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(workers, "run_in_processes", lambda *_, **options: (calls.append(it) for it in [options]))
    given.device = device
    stacks = [(SimpleNamespace(label="one"),)] * number
    list(workers.run_here(given, stacks, is_timed=False, log=tmp_path / "output.log", number=number))
    assert calls[0]["num_threads"] == threads


def test_progress_says_what_came_out_what_runs_and_how_long_the_rest_takes(text, tmp_path, ran, caplog):
    caplog.set_level("INFO", logger="attnbench")
    given = settings(text, tmp_path, evaluations=["copy"], probe_seeds=[0], num_workers=1, costs={"copy": 60.0})
    compared(given)
    said = [record.message for record in caplog.records]
    # No time left before anything has run: the plan's costs are of another machine.
    assert any(line.startswith("[0/6] (copy 0/6, now softmax") for line in said)
    lines = [line for line in said if re.match(r"\[\d/6\] copy", line)]
    assert [line.split("]")[0] for line in lines] == [f"[{number}/6" for number in range(1, 7)]
    status = r"\(about 0:05 to go, copy 1/6, best softmax [\d.]+ %, now softmax"
    assert re.search(rf"softmax.* search: validation accuracy [\d.]+ %, 0:01 {status}", lines[0])
    assert re.search(r": symbols right [\d.e-]+ %, length \d+, 0:01$", lines[-1])
    # The last lines say how the comparison grows.
    assert any("plan.variants.mine=" in line and line.strip().startswith(given.command) for line in said)


@pytest.mark.parametrize(("unit", "said"), [("1", "perplexity 9.757"), ("nat", "perplexity (nat) 9.757")])
def test_a_number_without_a_unit_has_none_in_its_line(unit, said, monkeypatch):
    row = SimpleNamespace(measurement=Measurement(metric="perplexity", value=9.757, unit=unit))
    monkeypatch.setattr("attnbench.comparison.progress.read_or_failure", lambda paths: [row])
    job = SimpleNamespace(plots=[("perplexity", "sequence_length")], primary=Perplexity.primary)
    cell: Any = SimpleNamespace(all_results=(), parts=[job], label="training softmax")
    assert what_came_out(cell) == (said, row, False)


def test_a_finished_comparison_is_read_judged_and_drawn_no_more_than_needed(copied, text, ran, monkeypatch):
    counted: Counter[str] = Counter()

    def count(place: str, name: Callable[..., str], returned: Any = None) -> None:
        module, _, function = place.rpartition(".")
        kept = getattr(import_module(module), function) if returned is None else lambda *_, **__: returned
        monkeypatch.setattr(place, lambda *it, **named: (counted.update([name(*it)]), kept(*it, **named))[1])

    count("attnbench.report.inputs.verdicts_of", lambda *_: "verdicts")
    count("attnbench.results.row_files.parse_results", lambda path: f"read {path.name}")
    count("attnbench.report.charts.style.to_svg", lambda picture, _: f"drawn {picture.name}", "<svg>")
    count("attnbench.report.charts.style.to_png", lambda _: "png", b"")
    count("attnbench.report.charts.style.runtime", lambda: "script", "")
    for is_drawn in (True, False):
        counted.clear()
        compared(settings(text, copied.parent, report=True))
        assert not ran()
        assert counted["verdicts"] == 1
        assert {number for name, number in counted.items() if name.startswith("drawn ")} == ({1} if is_drawn else set())
        # By the plan, and by its report.
        assert {number for name, number in counted.items() if name.startswith("read ")} <= {1, 2}


def test_of_cells_that_run_side_by_side_the_first_is_named(monkeypatch, caplog):
    caplog.set_level("INFO", logger="attnbench")
    monkeypatch.setattr("attnbench.comparison.progress.kind_of", lambda job: Kind("copy", job.label))
    waiting: list[Any] = [SimpleNamespace(label=name) for name in ("one", "two", "three", "four")]
    for at_a_time, running in ((1, "now one"), (3, "now one and 2 more"), (8, "now one and 3 more")):
        Progress(Counter(), {}).begin(waiting, at_a_time)
        assert caplog.records[-1].message == f"[0/0] (copy 0/0, {running})"


def test_the_best_score_so_far_is_that_of_the_task_of_the_last_run(monkeypatch, caplog):
    caplog.set_level("INFO", logger="attnbench")
    runs: list[Any] = [
        SimpleNamespace(label=str(index), group=group, variant=variant, metric=metric, value=value, pairs=pairs)
        for index, (group, variant, metric, value, pairs) in enumerate(
            [
                *(("recall", "a", "accuracy", 0.9, 4), ("recall", "b", "accuracy", 0.2, 16)),
                *(("recall", "b", "accuracy", 0.95, 4), ("recall", "a", "accuracy", 0.1, 16)),
                *(("training", "a", "perplexity", 9.0, 0), ("training", "b", "perplexity", 8.0, 0)),
                ("training", "a", "perplexity", 8.5, 0),
            ]
        )
    ]

    def came_out(run: Any) -> CameOut:
        measurement = Measurement(metric=run.metric, value=run.value, unit="", settings={"num_pairs": run.pairs})
        row = ResultRow(identity=identity_of(variant=run.variant, evaluation=run.group), measurement=measurement)
        return CameOut("", row, run.metric == "accuracy")

    monkeypatch.setattr("attnbench.comparison.progress.what_came_out", came_out)
    monkeypatch.setattr("attnbench.comparison.progress.kind_of", lambda run: Kind(run.group, run.variant, 2.0))
    progress = Progress(Counter(), {})
    progress.begin(runs, 1)
    for run in list(runs):
        progress.report(Outcome(item=run, seconds=1.0, error=None))
    said = [re.search(r"best (\w+ [\d.]+)( %)?[,)]", record.message) for record in caplog.records]
    bests = [found and found.group(1) for found in said]
    assert bests == [None, "a 90", "b 20", "b 95", None, "a 9", "b 8", None]


def test_on_a_terminal_lines_are_broken_between_words_and_in_a_file_they_are_whole(monkeypatch):
    line = "[25/39] training gated_deltanet, lr 1e-05, seed 0: perplexity 6.082 at sequence_length 256, 11:50"
    command = f"  attnbench compare plan={'demo' * 20}"
    for is_terminal in (False, True):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        for text in (line, command):
            AboveTheBar().emit(logging.LogRecord("attnbench", logging.INFO, "", 0, text, None, None))
        *shown, last = screen.getvalue().splitlines()
        assert len(shown) == 1 + is_terminal
        assert max(map(len, shown)) < 80 or not is_terminal
        assert " ".join(part.strip() for part in shown) == line
        assert last == command


def test_parts_of_a_status_that_do_not_fit_are_left_out_whole():
    parts = ["now gated_deltanet and 1 more", "best gated_deltanet 6.082 of 7", "about 12:50 to go"]
    assert fitting(parts) == ", ".join(parts[:2])
    assert fitting(parts[:1]) == parts[0]
    assert fitting([]) == ""
    assert len(fitting(["x" * 100, "y"])) < 80


def test_cells_that_become_known_run_before_those_that_wait_and_after_those_that_run(monkeypatch):
    cells: list[Any] = [SimpleNamespace(label=name) for name in ("one", "two", "three", "new")]
    monkeypatch.setattr("attnbench.comparison.progress.kind_of", lambda job: Kind("copy", job.label))
    one, two, three, new = cells
    progress = Progress(Counter(), {})
    progress.begin([one, two, three], 2)
    progress.extend([new])
    assert progress.waiting == [one, two, new, three]


def test_the_time_left_follows_what_runs_and_the_plan_s_costs_in_proportion():
    copy, training = Kind("copy", "copy softmax"), Kind("training", "training softmax")
    progress = Progress(Counter({copy: 2, training: 1}), {"copy": 10.0, "training": 100.0})
    assert progress.seconds_left() is None
    # Twice as slow as on the machine that the costs are of.
    progress.seconds, progress.left = {copy: [20.0]}, Counter({copy: 1, training: 1})
    assert progress.seconds_left() == 20 + 200


def test_larger_trainings_are_expected_to_take_longer_until_some_have_run():
    small, large, other = Kind("recall", "width 64", 1e6), Kind("recall", "width 256", 4e6), Kind("copy", "copy", 5e5)
    progress = Progress(Counter({large: 2, other: 1}), {})
    progress.seconds = {small: [10.0, 10.0]}
    assert progress.seconds_left() == 2 * 40 + 5
    progress.seconds[large], progress.left = [60.0], Counter({large: 2, small: -1})
    rate = (10 + 10 + 60) / (1 + 1 + 4)
    assert progress.seconds_left() == pytest.approx(2 * (4 * rate + 60) / 2)


@pytest.mark.slow
def test_cells_are_expected_as_they_come_and_none_is_left(text, tmp_path, ran, monkeypatch):
    made: list[Progress] = []
    kept = Progress.__init__

    def keep(self: Progress, left: Counter[Kind], *others: Any, **named: Any) -> None:
        made.append(self)
        kept(self, left, *others, **named)
        assert {kind.name for kind in left} == {"copy softmax", "copy plain", "training softmax", "training plain"}

    monkeypatch.setattr(Progress, "__init__", keep)
    compared(settings(text, tmp_path, evaluations=["copy", "perplexity"], learning_rates=[2e-3, 4e-3, 8e-3]))
    assert len(ran()) > 12
    assert set(made[0].left.values()) == {0}


def test_another_number_of_threads_is_named_where_timed_cells_run_again(copied, text, ran, caplog, monkeypatch):
    caplog.set_level("INFO", logger="attnbench")
    # Said, not used: two threads that wait for each other at this size take seconds of both.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    compared(settings(text, copied.parent, only=["throughput"]))
    assert groups(ran()) == ["throughput", "throughput"]
    (line,) = [record.message for record in caplog.records if "measured again" in record.message]
    assert "(1 threads) is" in line
    assert "(2 threads) now (OMP_NUM_THREADS" in line


@pytest.mark.slow
def test_stopped_and_continued_is_what_was_never_stopped(whole, text, tmp_path, ran):
    """By SIGTERM, at one cell or another, in processes of their own; it goes on in this one."""
    folder, _ = whole
    config = tmp_path / "conf" / "plan" / "little.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump({name: value for name, value in asdict(plan(text)).items() if name != "name"}))
    words = ["--config-dir", str(tmp_path / "conf"), "plan=little", "device=cpu", "logger=none", "report=false"]
    process = subprocess.Popen(
        [sys.executable, "scripts/compare.py", *words, f"outputs_dir={tmp_path}"],
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
    done = {*tmp_path.rglob("results/*.jsonl")}
    compared(settings(text, tmp_path))
    assert not [cell.label for cell in ran() if done.issuperset(cell.all_results)]
    assert rows(tmp_path / "little") == rows(folder)


def test_variants_that_are_one_model_in_an_evaluation_share_its_cells_there(
    text, tmp_path, ran, capsys, without_charts
):
    variants = {
        "softmax": ["attn=softmax"],
        "convolved": ["attn=softmax", "attn.conv_size=4"],
        "flash": ["attn=flash"],
        "linear": ["attn=linear"],
    }
    folder = compared(settings(text, tmp_path, report=True, variants=variants, seeds=[0], probe_seeds=[0]))
    cells_run = ran()
    by_group = {
        group: {cell.columns()["variant"] for cell in cells_run if cell.evaluation == group} for group in GROUPS
    }
    # Copy gives all a convolution; flash is softmax by another kernel, which has its own speed.
    assert by_group == {
        "copy": {"softmax", "linear"},
        "training": {"softmax", "convolved", "linear"},
        "throughput": set(variants),
    }
    assert record(folder)["shared"] == {
        "copy": {"convolved": "softmax", "flash": "softmax"},
        **{name: {"flash": "softmax"} for name in ("training", "perplexity")},
    }
    shown = capsys.readouterr().out
    assert "convolved is softmax in copy: one model, run once." in shown
    assert "flash is softmax in copy, training, perplexity: one model, run once." in " ".join(shown.split())
    inputs = read_inputs(folder)
    summed = figures(inputs.rows, inputs.protocol.shared)
    verdicts = verdicts_of(summed, rank=list(variants), reference=None)
    pairs = {}
    for pair in (verdict.pair for verdict in verdicts):
        pairs.setdefault(pair.evaluation, set()).add((pair.first, pair.second))
    assert pairs["copy"] == {("softmax", "linear")}
    assert pairs["perplexity"] == {("softmax", "convolved"), ("softmax", "linear"), ("convolved", "linear")}
    content = summary(summed, verdicts, variants)
    index = next(index for index, column in enumerate(content.columns) if column.header.startswith("copy"))
    entries = {variant: line[index].figure for variant, line in content.lines.items()}
    assert entries["softmax"] == entries["convolved"] == entries["flash"] is not None
    page = (folder / "report" / "index.html").read_text()
    assert "softmax = convolved = flash" in page
    assert "softmax = flash" in page


def test_a_mixer_is_another_s_function_only_where_it_says_so_itself(monkeypatch):
    def function(name: str, **options) -> dict[str, Any]:
        return function_of(mixer_settings(name, **options))

    assert function("flash") == function("softmax")
    assert function("flash", qk_norm=True) == function("softmax", qk_norm=True) != function("softmax")
    flash = mixer_settings("flash")
    windowed = replace(flash, options={**flash.options, "window": 8})
    assert function_of(windowed) == {**function("softmax"), "target": flash.target, "window": 8}

    class Other(Flash):
        """A class that derives from another may compute anything."""

    derived = replace(flash, target=f"{__name__}.Other")
    monkeypatch.setattr(sys.modules[__name__], "Other", Other, raising=False)
    trust([derived.target])
    assert function_of(derived)["target"] == derived.target


def test_a_plan_with_a_reference_runs_it_again_as_a_control_outside_the_family(text, tmp_path, ran, capsys):
    folder = compared(settings(text, tmp_path, evaluations=("copy",), overrides=[*OVERRIDES, f"data.path={text}",
        *smoke_words("copy", copy_learning_rates=[1e-2])], reference="softmax"))  # fmt: skip
    seeds = sorted((cell.label.split()[1].rstrip(","), int(cell.label.split()[-1])) for cell in ran())
    assert seeds == [("plain", 0), ("plain", 1), ("softmax", 0), ("softmax", 1), ("softmax", 50), ("softmax", 51)]
    assert record(folder)["control_seeds"] == [50, 51]
    inputs = read_inputs(folder)
    assert {row.identity.seed for row in inputs.rows} == {0, 1}
    assert {row.identity.seed for row in inputs.control} == {50, 51}
    said = " ".join(capsys.readouterr().out.split())
    told = "Control: softmax against itself under other seeds could not be tested in copy (2 seeds are too few)."
    assert told in said
    with pytest.raises(UserError, match="50 is seed 0 of the control"):
        check_plan(plan(text, seeds=[0, 50], reference="softmax"))


@pytest.mark.usefixtures("without_charts")
def test_a_plan_says_what_it_does_not_test_and_how_many_seeds_that_would_take(copied, text, tmp_path, ran, capsys):
    folder = compared(settings(text, copied.parent, tested=["perplexity"], report=True))
    # One pair in each of two evaluations: a sign-flip test must come to 0.025, and 2 / 2^7 is the first that does.
    sentence = "symbol_accuracy of copy has no verdict in this plan: a test would take 7 seeds, and there are 2."
    assert record(folder)["descriptive"] == [sentence]
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert sentence in (folder / "report" / "index.html").read_text()
    many = settings(text, tmp_path / "many", evaluations=["copy", "perplexity"], tested=["perplexity"],
        seeds=list(range(7)), probe_seeds=list(range(7)))  # fmt: skip
    chosen = "plan.tested leaves it out, so that a test of what is in it takes fewer seeds."
    assert [line.partition(": ")[2] for line in Comparison(many, compose_once).descriptive()] == [chosen]
    assert Comparison(settings(text, tmp_path / "all", evaluations=["copy"]), compose_once).descriptive() == []
    unranked = Comparison(settings(text, tmp_path / "none", evaluations=["copy"], rank=[]), compose_once)
    assert unranked.descriptive() == ["Nothing is tested in this plan: 2 seeds cannot rank mixers."]
