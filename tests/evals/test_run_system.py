"""Cells that are timed or weighed: their folders, their processes; and all evaluations by one command."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from probe_settings import BATTERY, evaluation_class, smoke_words
from runs import SMALL
from small import compose_once, python_path

from attnbench.comparison import execute as run_model
from attnbench.evals.base import SystemEvaluation
from attnbench.evals.lib import reference
from attnbench.evals.runners.system import SystemJob
from attnbench.evals.throughput import Throughput
from attnbench.machine import environment as environments
from attnbench.report.terminal import print_summary
from attnbench.results.folder import ROOT
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.settings.schema import RunSettings
from attnbench.training import step as training_step
from attnbench.training.prepare import prepare


def settings(outputs: Path, *overrides: str, names: tuple[str, ...] = ("throughput",)) -> RunSettings:
    own = [f"eval=[{','.join(names)}]", f"outputs_dir={outputs}"]
    return compose_once([*SMALL, *own, *smoke_words(*names), *overrides])


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Evaluations that the battery runs in a process each."""
    return []


@pytest.fixture(scope="module")
def battery(tmp_path_factory, alone) -> Path:
    """A run with all evaluations, as `train.py eval=battery` makes it, in this process alone."""
    words = [*SMALL, "eval=battery", f"outputs_dir={tmp_path_factory.mktemp('outputs')}", *smoke_words(*BATTERY)]

    def run_here(function, cell, **_) -> None:
        alone.append(cell.evaluation)
        function(cell)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_model, "run_alone", run_here)
        return run_model.run(compose_once(words))


def test_the_battery_is_all_evaluations_and_its_run_knows_where_they_are(battery, alone, capsys):
    rows = read_folders([battery])
    assert {row.identity.evaluation for row in rows} == {"training", *BATTERY}
    assert all(map(read_results, battery.parent.rglob("results/*.jsonl")))
    failed = [row for row in rows if row.measurement.status not in ("ok", "not_reached")]
    # Three lengths are too few for memory's exponent on some systems, and nothing else may be missing.
    assert {row.measurement.metric for row in failed} <= {"growth_exponent", "perplexity"}
    lines = (battery / "cells.txt").read_text().splitlines()
    assert sorted(line.partition("/")[2].partition("-")[0] for line in lines) == sorted({*BATTERY} - {"perplexity"})
    assert all((battery.parent / line / "results").is_dir() for line in lines)
    assert sorted(alone) == sorted(name for name in BATTERY if issubclass(evaluation_class(name), SystemEvaluation))
    print_summary({battery: []})
    shown = capsys.readouterr().out
    for name in ("perplexity", "recalled", "copied", "tokens/s", "memory", "step"):
        assert name in shown
    assert str(battery) in shown.replace("\n", "")


def test_the_same_command_measures_nothing_again(battery, monkeypatch):
    stored = json.loads((battery / "environment.json").read_text())
    assert stored["torch"] == torch.__version__
    before = {path: path.stat().st_mtime_ns for path in battery.parent.rglob("results/*.jsonl")}
    monkeypatch.setattr(run_model, "execute", None)
    monkeypatch.setattr(run_model, "run_alone", None)
    words = [*SMALL, "eval=battery", f"outputs_dir={battery.parent.parent}", *smoke_words(*BATTERY)]
    assert run_model.run(compose_once(words)) == battery
    assert {path: path.stat().st_mtime_ns for path in battery.parent.rglob("results/*.jsonl")} == before


def job(own: RunSettings) -> SystemJob:
    return SystemJob(prepare(own), own.evaluations[0])


def measured(own: RunSettings) -> Path:
    """The results of a measurement in this process."""
    run_jobs([job(own)])
    return job(own).results


def test_rows_of_a_system_cell_say_whose_they_are(battery):
    [path] = battery.parent.glob("cells/throughput-*/results/*.jsonl")
    for row in read_results(path):
        own = row.identity
        assert (own.evaluation, own.variant, own.run) == ("throughput", "softmax", path.parents[1].name)
        assert path.stem == f"throughput-{own.config_hash}"
        assert own.device.endswith("threads)")


def test_the_folder_changes_with_all_that_changes_numbers_and_with_nothing_else(tmp_path):
    given = [
        *("eval.throughput.lengths=[16,32]", "train.precision=bfloat16", "model.dim=64", "attn=linear", "seq_len=16"),
        *("attn.rotary_theta=100", "train.micro_batch_size=2", "train.compile=true", "rerun=true"),
    ]
    folders = {job(settings(tmp_path, override)).folder for override in given}
    assert len(folders) == len(given)
    assert job(settings(tmp_path)).folder == job(settings(tmp_path, "logger=offline")).folder in folders


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        *(({name: "9.9"}, True) for name in ("torch", "device", "triton", "driver_version")),
        ({"commit": "0123456789ab", "dirty": True}, False),
    ],
)
def test_another_machine_or_library_is_another_folder_and_another_commit_is_not(
    changed, is_another, tmp_path, monkeypatch
):
    before, environment = job(settings(tmp_path)).folder, environments.environment
    monkeypatch.setattr(environments, "environment", lambda *given: {**environment(*given), **changed})
    assert (job(settings(tmp_path)).folder != before) == is_another


def test_two_instruction_sets_are_two_environments_and_timed_apart(tmp_path, monkeypatch):
    device = torch.device("cpu")
    folder, stamp = job(settings(tmp_path)).folder, environments.environment(device, ROOT)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    lowered = environments.environment(device, ROOT)
    assert environments.environment_id(lowered) != environments.environment_id(stamp)
    assert job(settings(tmp_path)).folder != folder


def test_what_does_not_fit_is_rows_and_the_next_length_is_measured(tmp_path, monkeypatch):
    def full_when_short(state, batch, *given, step=training_step.train_step):
        if batch.tokens_BT.shape == (2, 16):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(state, batch, *given)

    monkeypatch.setattr(training_step, "train_step", full_when_short)
    own = settings(tmp_path, "eval.throughput.constant_tokens=null", "eval.throughput.lengths=[16,32]")
    found = [row.measurement for row in read_results(measured(own))]
    statuses = {
        length: {row.status for row in found if row.settings["sequence_length"] == length} for length in (16, 32)
    }
    assert statuses == {16: {"out_of_memory"}, 32: {"ok"}}


def test_an_evaluation_that_does_not_tell_itself_that_memory_ran_out_keeps_what_it_had(tmp_path, monkeypatch):
    own = settings(tmp_path)

    def exhausted(self, subject, measure=Throughput.run):
        yield next(measure(self, subject))
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(Throughput, "run", exhausted)
    path = measured(own)
    found = [row.measurement for row in read_results(path)]
    assert [(row.metric, row.status) for row in found] == [
        ("first_step_seconds", "ok"),
        ("tokens_per_second", "out_of_memory"),
    ]
    assert "can't allocate memory" in found[1].reason


def test_a_measurement_that_breaks_off_is_made_again_as_a_whole(tmp_path, monkeypatch):
    own = settings(tmp_path)

    def broken(self, subject, measure=Throughput.run):
        yield next(measure(self, subject))
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Throughput, "run", broken)
        with pytest.raises(RuntimeError):
            measured(own)
    assert not job(own).results.exists()
    assert (job(own).folder / "failed.txt").read_text().startswith("RuntimeError: broken")
    measured(own)
    assert len(read_results(job(own).results)) == 12
    assert not (job(own).folder / "failed.txt").exists()


@pytest.mark.slow
def test_a_failure_in_the_other_process_is_an_error_here(tmp_path):
    own = settings(tmp_path)
    odd = replace(own.evaluations[0], options={**own.evaluations[0].options, "repeats": 0})
    with pytest.raises(UserError, match=r"eval\.throughput\.repeats=0"):
        run_model.run(replace(own, evaluations=[odd]))


@pytest.mark.slow
def test_stopped_while_another_process_measures_neither_is_left(tmp_path):
    words = [*SMALL, "eval=[throughput]", f"outputs_dir={tmp_path}", *smoke_words("throughput")]
    # So many repeats that it would take minutes.
    words += ["eval.throughput.repeats=100000", "eval.throughput.max_seconds=500"]
    process = subprocess.Popen(
        [sys.executable, "scripts/train.py", *words],
        cwd=ROOT,
        env={**python_path(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("demo/cells/throughput-*/environment.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = [int(pid) for pid in _children(process.pid)]
    assert children
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert said.splitlines()[-1] == "stopped; the same command resumes from what is finished"
    deadline = time.monotonic() + 5
    while any(_is_running(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_timed_rows_have_a_reference_beside_them_and_their_ratio_to_it(tmp_path, monkeypatch):
    taken = iter((40.0, 44.0, 400.0, None))
    monkeypatch.setattr("attnbench.evals.lib.reference._reference_ms", lambda run: next(taken))
    path = measured(settings(tmp_path, "eval.throughput.lengths=[16,32,64]", "eval.throughput.constant_tokens=null"))
    own = [row.measurement for row in read_results(path)]
    timed = [row for row in own if "reference_milliseconds" in row.settings]
    assert {row.metric for row in own} - {row.metric for row in timed} == {"peak_memory_mib"}
    assert all("load_average" in row.settings for row in timed)
    expected = {16: [40.0, 44.0], 32: [44.0, 400.0], 64: [400.0]}
    assert all(row.settings["reference_milliseconds"] == expected[row.settings["sequence_length"]] for row in timed)
    found = {row.metric: row for row in timed if row.settings["sequence_length"] == 16}
    step, speed = found["step_milliseconds"], found["tokens_per_second"]
    assert step.settings["reference_ratio"] == pytest.approx((step.value or 0) / 42)
    # 4 x 32 tokens are a batch of the training.
    assert speed.settings["reference_ratio"] == pytest.approx((speed.value or 0) / (4 * 32 / 42e-3))
    assert "reference_ratio" not in found["achieved_tflops"].settings


def test_the_reference_takes_time_and_draws_nothing_from_the_generator(tmp_path):
    own = job(settings(tmp_path)).run
    before = torch.get_rng_state()
    assert 0 < (reference._reference_ms(own) or 0) < 10_000
    assert torch.equal(torch.get_rng_state(), before)


def test_the_reference_has_a_number_of_heads_that_divides_its_width(tmp_path):
    """A mixer with heads of its own number may have a head width that does not divide the model's."""
    own = job(settings(tmp_path)).run
    model = replace(own.settings.model, dim=64, head_width=24)
    assert reference._layer_ms(model, 1, 16, "float32", torch.device("cpu")) > 0
