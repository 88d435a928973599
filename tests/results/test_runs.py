"""Runs on disk: found, and read whatever their state."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripts_here import run_here
from small import identity_of

from attnbench.machine.locks import folder_lock
from attnbench.results.row_files import ResultsWriter
from attnbench.results.rows import Measurement
from attnbench.results.runs import Run, find_runs, keep, select
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError

SCORES = {
    "perplexity": [
        Measurement(metric="perplexity", value=9.5, unit="1", settings={"split": "validation", "checkpoint": "best"}),
        Measurement(metric="perplexity", value=9.75, unit="1", settings={"split": "test", "checkpoint": "final"}),
        Measurement(metric="perplexity", value=9.25, unit="1", settings={"split": "test", "checkpoint": "best"}),
    ],
    "copy": [
        Measurement(metric="parameters", value=10, unit="1"),
        Measurement(metric="symbol_accuracy", value=0.5, unit="1", settings={"split": "test", "length": 5}),
    ],
    "training": [Measurement(metric="tokens_per_second", value=1000, unit="1/s")],
    "throughput": [
        Measurement(metric=metric, value=value, unit="x", settings={"sequence_length": length})
        for length, speed in ((64, 700), (512, 500))
        for metric, value in (("first_step_seconds", 1), ("step_milliseconds", 30), ("tokens_per_second", speed))
    ],
    "memory": [
        Measurement(metric="forward_peak_mib", value=5, unit="MiB"),
        Measurement(metric="training_peak_mib", value=16, unit="MiB"),
        Measurement(metric="training_peak_mib", value=None, unit="MiB", status="not_reached", reason="too long"),
        Measurement(metric="growth_exponent", value=1.5, unit=""),
    ],
    "scaling": [
        Measurement(metric="parameters", value=10, unit=""),
        Measurement(metric="step_milliseconds", value=30, unit="ms"),
    ],
}


def make_run(
    outputs: Path,
    name: str,
    evaluations: Sequence[str] = (),
    *,
    ends: bool = True,
    checkpoints: Sequence[str] = (),
    age: float = 0,
    **columns: Any,
) -> Path:
    """Make a folder as a job leaves it; `name` is that of the folder under outputs/."""
    folder, digits = outputs / name, name[-8:]
    (folder / "results").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"variant: {columns.get('variant', 'softmax')}\nconfig_hash: {digits}\n")
    (folder / "environment.json").write_text(json.dumps({"device": "cpu"}))
    (folder / "train.log").write_text("it ran\n")
    identity = identity_of(run=folder.name, config_hash=digits, **columns)
    for evaluation in evaluations:
        writer = ResultsWriter(
            folder / "results" / f"{evaluation}-{digits}.jsonl", identity_of(**{"evaluation": evaluation, **columns})
        )
        for row in SCORES[evaluation]:
            writer.write(row)
        if ends:
            writer.complete()
    assert identity.run == folder.name
    for checkpoint in checkpoints:
        (folder / "checkpoint" / checkpoint).mkdir(parents=True)
        (folder / "checkpoint" / checkpoint / "weights.safetensors").write_bytes(b"w" * 2**20)
    changed = time.time() - age
    for path in folder.rglob("*"):
        os.utime(path, (changed, changed))
    return folder


@pytest.fixture
def outputs(tmp_path) -> Path:
    """A run or cell in each state."""
    lm: dict[str, Any] = {"checkpoints": ["final", "best-00000020"]}
    make_run(tmp_path, "demo/softmax-4m-T32-seed0-11110000", ["training", "perplexity"], age=50, **lm)
    make_run(tmp_path, "demo/linear-4m-T32-seed0-22220000", ["training", "perplexity"], age=60, variant="linear", **lm)
    make_run(tmp_path, "demo/linear-4m-T32-seed1-22221111", checkpoints=["step-00000640"], age=40, variant="linear")
    make_run(
        tmp_path, "demo/cells/copy-linear-lr0.01-seed0-33330000", ["copy"], checkpoints=["final"], variant="linear"
    )
    torn = make_run(tmp_path, "demo/cells/copy-softmax-lr0.01-seed0-33331111", ["copy"], ends=False)
    failed = make_run(tmp_path, "other/softmax-4m-T32-seed3-44440000", checkpoints=["step-00000020"])
    (failed / "failed.txt").write_text("UserError: the disk\x1b[31m is full\nand more\n")
    assert torn.is_dir()
    return tmp_path


def named(outputs: Path, digits: str) -> Run:
    [run] = [it for it in find_runs(outputs) if it.hash.startswith(digits)]
    return run


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_runs_are_listed_by_experiment_the_oldest_first(outputs):
    found = [(run.experiment, run.hash, run.status) for run in find_runs(outputs)]
    assert found[:3] == [
        ("demo", "22220000", "finished"),
        ("demo", "11110000", "finished"),
        ("demo", "22221111", "unfinished"),
    ]
    assert found[-1] == ("other", "44440000", "failed")
    assert sorted(found[3:5]) == [("demo", "33330000", "finished"), ("demo", "33331111", "unfinished")]


def test_what_when_size_and_the_score_that_stands_for_a_file(outputs):
    run = named(outputs, "1111")
    assert (run.what, run.seed, run.is_cell) == ("softmax-4m-T32", 0, False)
    assert run.num_bytes == sum(len(content) for content in everything(run.folder).values())
    assert abs(time.time() - run.modified - 50) < 30
    score = run.scores["perplexity"].measurement
    assert (score.value, score.settings["split"], score.settings["checkpoint"]) == (9.25, "test", "best")
    assert named(outputs, "33330000").scores["copy"].measurement.metric == "symbol_accuracy"
    assert named(outputs, "22221111").step == 640
    assert named(outputs, "4444").reason == "UserError: the disk\x1b[31m is full"


def test_dates_of_files_do_not_decide_which_measurement_is_the_last(tmp_path):
    folder = make_run(tmp_path, "demo/softmax-4m-T32-seed0-11110000", ["perplexity"])
    first = folder / "results" / "perplexity-11110000.jsonl"
    # Beginnings are told apart by milliseconds.
    time.sleep(0.01)
    with ResultsWriter(folder / "results" / "perplexity-00000001.jsonl", identity_of(evaluation="perplexity")) as later:
        later.write(Measurement(metric="perplexity", value=8.0, unit="1", settings=SCORES["perplexity"][2].settings))
    for dates in ((1, 2), (2, 1), (1, 1)):
        for path, date in zip((later.path, first), dates, strict=True):
            os.utime(path, (date, date))
        assert named(tmp_path, "1111").scores["perplexity"].measurement.value == 8.0
        assert [row.measurement.value for row in read_folders([folder], last_only=True)] == [8.0]


def test_what_is_timed_shows_its_speed_memory_or_time_of_a_step(tmp_path):
    make_run(tmp_path, "demo/cells/battery-44440000", ["throughput", "memory", "scaling"])
    scores = named(tmp_path, "44440000").scores
    assert {name: (row.measurement.metric, row.measurement.value) for name, row in scores.items()} == {
        "throughput": ("tokens_per_second", 500),
        "memory": ("training_peak_mib", 16),
        "scaling": ("step_milliseconds", 30),
    }


def test_what_is_no_run_is_passed_by(outputs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    make_run(elsewhere, "mine/softmax-4m-T32-seed9-99990000", ["perplexity"])
    (outputs / "linked").symlink_to(elsewhere / "mine")
    (outputs / "demo" / "softmax-4m-T32-seed9-99990000").symlink_to(
        elsewhere / "mine" / "softmax-4m-T32-seed9-99990000"
    )
    (outputs / "photos" / "holiday-20260101").mkdir(parents=True)
    (outputs / "photos" / "holiday-20260101" / "beach.png").touch()
    assert len(find_runs(outputs)) == 6


def test_a_locked_run_is_running_and_an_altered_one_damaged(outputs):
    with folder_lock(named(outputs, "11110000").folder, waits=False):
        run = named(outputs, "11110000")
        assert (run.status, f"pid {os.getpid()}" in run.reason) == ("running", True)
    (path,) = named(outputs, "11110000").folder.glob("results/perplexity-*")
    path.write_text(path.read_text().replace("9.25", "9.15"))
    run = named(outputs, "11110000")
    assert (run.status, "altered" in run.reason) == ("damaged", True)


def test_a_lock_of_another_host_counts_as_held(outputs):
    folder = named(outputs, "11110000").folder
    (folder / ".lock").write_text("pid 7 on another-host since 2026-01-01T00:00:00+00:00\n")
    assert named(outputs, "11110000").status == "running"
    (folder / ".lock").write_text("")
    assert named(outputs, "11110000").status == "finished"


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 99, b"{", b"[" * 9999, b"\xff\xfe", b'{"complete": true}\n', b"{}\n" * 3]
)
def test_torn_and_hostile_results_end_no_listing(outputs, content):
    (path,) = named(outputs, "11110000").folder.glob("results/perplexity-*")
    path.write_bytes(content)
    assert named(outputs, "11110000").status == "damaged"
    path.unlink()
    os.mkfifo(path)
    assert named(outputs, "11110000").status == "finished"


def test_runs_are_kept_by_variant_evaluation_and_status(outputs):
    runs = find_runs(outputs)

    def hashes(**filters):
        return {run.hash for run in keep(runs, filters)}

    assert hashes(variant=["linear"]) == {"22220000", "22221111", "33330000"}
    assert hashes(evaluation=["copy"]) == {"33330000", "33331111"}
    assert hashes(evaluation=["training"], status=["unfinished"]) == {"22221111"}
    assert hashes(status=["failed", "finished"], variant=["softmax"]) == {"11110000", "44440000"}
    with pytest.raises(UserError, match=r"variant=liner: no run of it; near it: linear"):
        hashes(variant=["liner"])
    with pytest.raises(UserError, match=r"experiment=demmo: no runs in .*; near it: demo"):
        find_runs(outputs, ["demmo"])
    with pytest.raises(UserError, match=r"outputs_dir=.*nowhere: no such folder"):
        find_runs(outputs / "nowhere")


BAD = {
    "compare=[1111]": "must name two runs",
    "compare=[11110000,11110000]": "name another",
    "status=lost": "status=lost: must be one of finished",
    "foo=1": "foo=1: unknown setting",
    "nowhere": "experiment=nowhere: no runs in",
    "outputs_dir=": "outputs_dir=: must name a folder",
}


@pytest.mark.parametrize("word", BAD)
def test_mistakes_are_one_line(outputs, word):
    words = [word] if word.startswith("outputs_dir") else [word, f"outputs_dir={outputs}"]
    code, _, errors = run_here("runs.py", *words)
    assert code == 1
    assert BAD[word] in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_run_is_named_by_its_path_or_any_beginning_that_is_its_own(outputs):
    runs = find_runs(outputs)
    folder = outputs / "demo" / "softmax-4m-T32-seed0-11110000"
    for name in ("1", "11110000", folder.name, "softmax-4m-T32-seed0", str(folder)):
        assert select(runs, name).folder == folder
    (outputs / "RUN").symlink_to(folder)
    assert select(runs, str(outputs / "RUN")).folder == folder
    with pytest.raises(UserError, match=r"2222 is demo/linear-4m-T32-seed0-22220000, demo/linear.*longer beginning"):
        select(runs, "2222")
    with pytest.raises(UserError, match=r"11111 is no run; near it: 1111"):
        select(runs, "11111")
    with pytest.raises(UserError, match=r"compare: zzz is no run"):
        select(runs, "zzz")
