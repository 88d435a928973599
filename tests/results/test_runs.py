"""Runs on disk: found, read whatever their state, named by a beginning, and removed without harm to anything else."""

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripts_here import run_here
from small import identity_of

from attnbench.machine.locks import folder_lock
from attnbench.results import pruning as pruning_module
from attnbench.results.pruning import Pruning, plan_pruning, remove
from attnbench.results.row_files import ResultsWriter
from attnbench.results.rows import Measurement
from attnbench.results.runs import Run, find_runs, keep, select
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRUNED

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
    return select(find_runs(outputs), digits)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def carried_out(outputs: Path, kind: str) -> tuple[Pruning, list[str]]:
    pruning = plan_pruning(find_runs(outputs), kind, outputs)
    return pruning, [reason for _, reason in remove(pruning, kind, outputs)]


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


def test_unfinished_folders_go_and_nothing_else(outputs):
    before = everything(outputs)
    pruning, reasons = carried_out(outputs, "unfinished")
    gone = {removal.run.hash: removal.loss for removal in pruning.removals}
    assert gone == {"22221111": "640 steps", "33331111": "no step kept"}
    assert reasons == ["", ""]
    after = everything(outputs)
    assert {path for path in before if path not in after} == {
        path for path in before if "1111/" in path and "1111000" not in path
    }
    assert {run.hash for run in find_runs(outputs)} == {"11110000", "22220000", "33330000", "44440000"}
    assert not (outputs / "demo" / "linear-4m-T32-seed1-22221111").exists()
    assert before.items() >= after.items()


def test_failed_folders_go_but_for_those_with_results(outputs):
    scored = named(outputs, "22220000").folder
    (scored / "failed.txt").write_text("DivergedError: at step 7\n")
    pruning, reasons = carried_out(outputs, "failed")
    assert [removal.run.hash for removal in pruning.removals] == ["44440000"]
    assert "the disk" in pruning.removals[0].loss
    assert [run.hash for run in pruning.kept["it holds results, or a finished training"]] == ["22220000"]
    assert reasons == [""]
    assert scored.exists()
    assert not (outputs / "other" / "softmax-4m-T32-seed3-44440000").exists()


def test_checkpoints_go_of_finished_cells_alone_and_weights_of_language_models(outputs):
    pruning, _ = carried_out(outputs, "checkpoints")
    assert [(removal.run.hash, removal.num_bytes) for removal in pruning.removals] == [("33330000", 2**20)]
    cell = named(outputs, "33330000")
    assert (cell.status, (cell.folder / "checkpoint").exists()) == ("finished", False)
    assert (named(outputs, "11110000").folder / "checkpoint" / "final").exists()
    pruning, _ = carried_out(outputs, "weights")
    assert {(removal.run.hash, removal.num_bytes) for removal in pruning.removals} == {
        ("11110000", 2**21),
        ("22220000", 2**21),
    }
    assert {run.hash for kept in pruning.kept.values() for run in kept} == {"22221111", "44440000"}
    assert named(outputs, "11110000").scores.keys() == {"training", "perplexity"}
    assert (named(outputs, "22221111").folder / "checkpoint" / "step-00000640").exists()


@pytest.mark.parametrize("kind", PRUNED)
def test_what_a_process_holds_is_not_touched(outputs, kind):
    runs = find_runs(outputs)
    before = everything(outputs)
    with folder_lock(outputs / "demo", waits=False), folder_lock(outputs / "other", waits=False):
        pruning = plan_pruning(runs, kind, outputs)
        assert pruning.removals == []
        assert all(reason.startswith(f"in use by pid {os.getpid()}") for reason in pruning.kept)
        assert pruning.kept
    # Between the plan and the removal a process has taken each.
    pruning = plan_pruning(runs, kind, outputs)
    assert pruning.removals
    for removal in pruning.removals:
        with folder_lock(removal.run.folder, waits=False):
            ((_, reason),) = remove(Pruning(removals=[removal], kept={}), kind, outputs)
            assert "in use by pid" in reason
    assert everything(outputs) == before


def test_a_run_that_was_gone_on_with_since_stays(outputs):
    pruning = plan_pruning(find_runs(outputs), "unfinished", outputs)
    for removal in pruning.removals:
        (removal.run.folder / "failed.txt").write_text("UserError: since\n")
    before = everything(outputs)
    assert {reason for _, reason in remove(pruning, "unfinished", outputs)} == {"another command has gone on with it"}
    assert everything(outputs) == before


def test_what_is_not_attnbench_s_stays_and_is_named(outputs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious.txt").write_text("precious")
    folder = named(outputs, "22221111").folder
    mine = [
        "notes.txt",
        "results/notes.txt",
        "checkpoint/step-00000640.bak",
        "checkpoint/best-notes.txt",
        "plots/a.png",
        ".x.1.new",
        ".sketch.json.2.new/a.txt",
        ".config.yaml.3.new/a.txt",
    ]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / ".train.log.4.new").write_text("of a process that died")
    (folder / "checkpoint" / "linked").symlink_to(elsewhere)
    (folder / "metrics.jsonl").symlink_to(elsewhere / "precious.txt")
    pruning, reasons = carried_out(outputs, "unfinished")
    (removal,) = [it for it in pruning.removals if it.run.hash == "22221111"]
    assert set(removal.remains) >= {
        "notes.txt",
        "checkpoint/linked",
        "metrics.jsonl",
        "plots",
        ".x.1.new",
        ".config.yaml.3.new",
    }
    assert set(reasons) == {""}
    assert [(folder / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert (elsewhere / "precious.txt").read_text() == "precious"
    for name in ("config.yaml", ".train.log.4.new", "checkpoint/step-00000640"):
        assert not (folder / name).exists()


KINDS = {"unfinished": "22221111", "failed": "44440000", "checkpoints": "33330000", "weights": "11110000"}


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("place", ["checkpoint/", "checkpoint/.step-00000007.removed/"])
def test_a_run_with_a_file_of_the_user_s_in_a_checkpoint_stays_and_is_named(kind, place, outputs):
    folder = named(outputs, KINDS[kind]).folder
    if place == "checkpoint/":
        place = f"checkpoint/{sorted((folder / 'checkpoint').iterdir())[0].name}/"
    (folder / place / "plots").mkdir(parents=True)
    (folder / place / "plots" / "a.png").write_text("mine")
    before = everything(folder)
    pruning, _ = carried_out(outputs, kind)
    (kept,) = pruning.kept[f"{place}plots is not attnbench's; once it is moved, the rest can be removed"]
    assert (kept.folder, everything(folder)) == (folder, before)


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("linked", ["checkpoint", "checkpoint/one", "results"])
def test_a_run_with_a_linked_checkpoint_or_results_stays_and_is_named(kind, linked, outputs, tmp_path_factory):
    folder = named(outputs, KINDS[kind]).folder
    if linked == "checkpoint/one":
        linked = f"checkpoint/{sorted((folder / 'checkpoint').iterdir())[0].name}"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    (folder / linked).rename(elsewhere)
    (folder / linked).symlink_to(elsewhere)
    before = everything(folder), everything(elsewhere)
    pruning, _ = carried_out(outputs, kind)
    (reason,) = [reason for reason, kept in pruning.kept.items() if folder in [run.folder for run in kept]]
    assert reason == f"{linked} is a link, and links are not followed"
    assert (everything(folder), everything(elsewhere)) == before


def test_a_file_that_came_into_a_checkpoint_since_is_left(outputs, monkeypatch):
    folder = named(outputs, "22221111").folder
    rename = Path.rename

    def with_notes(path, target):
        rename(path, target)
        (Path(target) / "notes.txt").write_text("mine")

    monkeypatch.setattr(Path, "rename", with_notes)
    _, reasons = carried_out(outputs, "unfinished")
    assert reasons == ["", ""]
    assert [path.read_text() for path in folder.rglob("*.txt")] == ["mine"]


@pytest.mark.parametrize("kind", PRUNED)
def test_a_folder_that_only_looks_like_a_run_is_not_touched(tmp_path, kind):
    for name in ("backup-20260101", "demo/cells/copy-linear-seed0-20260102"):
        is_scored = kind in ("checkpoints", "weights")
        folder = make_run(tmp_path, name, ["copy"] * is_scored, checkpoints=["final" if is_scored else "step-00000001"])
        for path in folder.glob("results/*"):
            path.rename(path.with_name("copy-12345678.jsonl"))
        (folder / "config.yaml").write_text("my: config\n")
        (folder / "failed.txt").write_text("it failed\n") if kind == "failed" else None
    before = everything(tmp_path)
    pruning, _ = carried_out(tmp_path, kind)
    assert pruning.removals == []
    assert list(pruning.kept) == ["no config.yaml or results file in it says that attnbench made it"]
    assert everything(tmp_path) == before


BAD = {
    "prune=everything": "prune=everything: must be one of unfinished, failed, checkpoints, weights",
    "dry_run=false": "dry_run=false: removes nothing without prune=",
    "compare=[1111]": "must name two runs",
    "status=lost": "status=lost: must be one of finished",
    "foo=1": "foo=1: unknown setting",
    "nowhere": "experiment=nowhere: no runs in",
    "experiment=dmo": "near it: demo",
    "compare=[1e10,1234]": "compare: 1e10 is no run",
    "outputs_dir=": "outputs_dir=: must name a folder",
    "compare=[11110000,11110000]": "name another",
}


@pytest.mark.parametrize("word", BAD)
def test_mistakes_are_one_line(outputs, word):
    words = [word] if word.startswith("outputs_dir") else [word, f"outputs_dir={outputs}"]
    code, _, errors = run_here("runs.py", *words)
    assert code == 1
    assert BAD[word] in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_removal_that_the_disk_refuses_is_an_error_and_the_others_go_on(outputs, monkeypatch):
    def refuse(path, remove=pruning_module._remove):
        if "22221111" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr(pruning_module, "_remove", refuse)
    code, said, errors = run_here("runs.py", "prune=unfinished", "dry_run=false", f"outputs_dir={outputs}")
    assert code == 1
    assert "removed: 1 folder" in errors
    assert "Permission denied" in said + errors
    assert re.search(r"error: prune=unfinished: 1 folder left, .* first; see the reasons above\n$", errors)
    assert (outputs / "demo" / "linear-4m-T32-seed1-22221111").exists()


def test_the_command_removes_only_when_asked_twice(outputs):
    before = everything(outputs)
    code, said, errors = run_here("runs.py", "prune=unfinished", f"outputs_dir={outputs}")
    assert (code, everything(outputs)) == (0, before)
    assert "would be removed: 2 folders" in errors
    assert "dry_run=false removes them" in errors
    assert re.search(r"linear-4m-T32-seed1-22221111\t\d+\t640 steps\n", said)
    code, _, errors = run_here("runs.py", "prune=unfinished", "dry_run=false", f"outputs_dir={outputs}")
    assert (code, "removed: 2 folders" in errors) == (0, True)
    assert len(find_runs(outputs)) == 4
