"""Trainings of a probe as one stack: each leaves what it leaves alone, whatever becomes of the others."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_settings import probe_settings

from attnbench.comparison.stacks import in_stacks
from attnbench.comparison.workers import execute_stack
from attnbench.evals.lib import scoring, solving
from attnbench.evals.runners import stack as runner
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.probe import ProbeJob
from attnbench.evals.runners.stack import run_stack
from attnbench.mixers.softmax import Softmax
from attnbench.results.job import run_jobs
from attnbench.results.row_files import read_results
from attnbench.results.rows import ResultRow
from attnbench.settings.errors import Interrupted
from attnbench.settings.schema import SELECTION_SEED
from attnbench.training import checkpoint
from attnbench.training.log import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS = [(1e-2, 0), (1e-2, 1), (3e-3, 0), (1e-2, SELECTION_SEED)]
"""Learning rates and seeds."""

CLOCKS = ("tokens_per_second", "generator_tokens_per_second")


def jobs_in(folder: Path, runs: Sequence[tuple[float, int]] = RUNS, **options: Any) -> list[ProbeJob]:
    settings = probe_settings(folder, **options)
    [evaluation] = settings.evaluations
    first = prepare_probe(settings, evaluation)[1][0]
    return [first.at(rate, seed) for rate, seed in runs]


def rows_of(job: ProbeJob) -> dict[str, ResultRow]:
    return {row.measurement.metric: row for row in read_results(job.results)}


def numbers_of(job: ProbeJob) -> list[tuple]:
    """Numbers that a training has in its rows wherever it was trained."""
    return [
        (name, row.measurement.value, row.measurement.status, row.identity.seed, row.identity.config_hash)
        for name, row in rows_of(job).items()
        if name not in CLOCKS
    ]


def test_every_training_leaves_the_rows_of_one_alone(tmp_path):
    stacked, alone = jobs_in(tmp_path / "stacked"), jobs_in(tmp_path / "alone")
    run_stack(stacked, shares_device=False)
    for job in alone:
        run_jobs([job])
    for ours, theirs in zip(stacked, alone, strict=True):
        assert ours.is_done()
        assert ours.folder.name == theirs.folder.name
        assert numbers_of(ours) == numbers_of(theirs)
        assert {row.measurement.settings["stack"] for row in rows_of(ours).values()} == {4}
        assert all("stack" not in row.measurement.settings for row in rows_of(theirs).values())
        # Its steps took their time from the others'.
        assert rows_of(ours)["tokens_per_second"].measurement.settings["shared_device"]
        logged, expected = (read_metrics(job.folder / "metrics.jsonl") for job in (ours, theirs))
        assert [row["step"] for row in logged] == [row["step"] for row in expected]
        assert logged[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
        assert checkpoint.is_final(ours.folder / "checkpoint")
        assert {"config.yaml", "environment.json", "train.log"} <= {path.name for path in ours.folder.iterdir()}


def test_one_that_diverges_has_rows_that_say_so_and_the_others_go_on(tmp_path):
    stacked = jobs_in(tmp_path / "stacked", [(1e-2, 0), (1e38, 1), (1e-2, 2)])
    run_stack(stacked, shares_device=False)
    alone = jobs_in(tmp_path / "alone", [(1e-2, 0), (1e38, 1), (1e-2, 2)])
    for job in alone:
        run_jobs([job])
    assert [rows_of(job)["selection"].measurement.status for job in stacked] == ["ok", "diverged", "ok"]
    for ours, theirs in zip(stacked, alone, strict=True):
        assert numbers_of(ours) == numbers_of(theirs)
    said, expected = (rows_of(jobs[1])["selection"].measurement.reason for jobs in (stacked, alone))
    assert said == expected.replace(str(tmp_path / "alone"), str(tmp_path / "stacked"))
    assert "first in step" in said


def test_what_is_done_is_not_trained_again(tmp_path):
    jobs = jobs_in(tmp_path)
    run_jobs([jobs[1]])
    before = jobs[1].results.read_bytes()
    run_stack(jobs_in(tmp_path), shares_device=False)
    assert jobs[1].results.read_bytes() == before
    assert [rows_of(job)["selection"].measurement.settings.get("stack") for job in jobs] == [3, None, 3, 3]


def test_a_stack_that_does_not_fit_runs_in_halves_and_the_rows_list_the_sizes(tmp_path, monkeypatch):
    train, sizes = runner.train_stack, []

    def small(members: Sequence[Any], **given: Any) -> Any:
        sizes.append(len(members))
        if len(members) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return train(members, **given)

    monkeypatch.setattr(runner, "train_stack", small)
    for again in (False, True):
        sizes.clear()
        jobs = jobs_in(tmp_path)
        for job in jobs:
            # Made again, too, where the files of the time before are there.
            job.settings = replace(job.settings, rerun=again)
        before = [job.results.stat().st_mtime_ns if again else 0 for job in jobs]
        run_stack(jobs, shares_device=False)
        assert sizes == [4, 2, 2]
        assert all(job.results.stat().st_mtime_ns > moment for job, moment in zip(jobs, before, strict=True))
    for job in jobs:
        settings = rows_of(job)["selection"].measurement.settings
        assert (settings["stack"], settings["stack_too_large"]) == (2, [4])
        assert not (job.folder / "failed.txt").exists()


def test_a_kernel_without_a_batching_rule_trains_one_by_one_and_says_so(tmp_path, monkeypatch):
    jobs = jobs_in(tmp_path)
    monkeypatch.setattr(Softmax, "without_vmap", frozenset({jobs[0].mixers[0].options["backend"]}))
    run_stack(jobs, shares_device=False)
    assert {rows_of(job)["selection"].measurement.settings["stack"] for job in jobs} == {1}


def test_a_stop_keeps_all_of_them_and_they_end_as_if_it_had_never_come(tmp_path, monkeypatch):
    never = jobs_in(tmp_path / "never")
    run_stack(never, shares_device=False)
    stopped = jobs_in(tmp_path / "stopped")
    begin = runner.train_stack

    def stopping(members: Sequence[Any], **given: Any) -> Any:
        class Signal:
            def __call__(self, state: Any, report: Any = None) -> None:
                if state.step == 4 and report is not None:
                    signal.raise_signal(signal.SIGTERM)

        # Heard behind the turn of the second, so that the first two have not kept their states at that step.
        members[1].hooks = [Signal(), *members[1].hooks] if stops else members[1].hooks
        return begin(members, **given)

    stops = True
    monkeypatch.setattr(runner, "train_stack", stopping)
    with pytest.raises(Interrupted, match="stopped at step 4"):
        run_stack(stopped, shares_device=False)
    assert not any(job.is_done() for job in stopped)
    stops = False
    resumed = jobs_in(tmp_path / "stopped")
    run_stack(resumed, shares_device=False)
    for ours, theirs in zip(resumed, never, strict=True):
        assert numbers_of(ours) == numbers_of(theirs)
        weights = [job.folder / "checkpoint" / "final" / "weights.safetensors" for job in (ours, theirs)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert not (ours.folder / "failed.txt").exists()


def test_cells_of_a_stack_are_run_as_one(tmp_path):
    jobs = jobs_in(tmp_path)
    for group in in_stacks(jobs, lambda job: 3):
        execute_stack(group)
    assert [rows_of(job)["selection"].measurement.settings["stack"] for job in jobs] == [2, 2, 2, 2]


@pytest.mark.slow
def test_compiled_trainings_of_one_shape_are_compiled_once_and_have_the_numbers_of_others(tmp_path):
    ours, theirs = jobs_in(tmp_path / "compiled"), jobs_in(tmp_path / "alone")
    torch._dynamo.utils.counters.clear()
    for job in ours:
        job.compiled = True
        run_jobs([job])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    for job in theirs:
        run_jobs([job])
    for own, other in zip(ours, theirs, strict=True):
        assert all(row.measurement.settings["compiled"] for row in rows_of(own).values())
        logged, expected = (read_metrics(job.folder / "metrics.jsonl") for job in (own, other))
        assert logged[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
        assert own.config_hash == other.config_hash


def test_one_pass_looks_at_all_trainings_of_a_stack(tmp_path, monkeypatch):
    groups, look = [], runner.mean_accuracies
    monkeypatch.setattr(
        runner, "mean_accuracies", lambda models, batches: groups.append(len(models)) or look(models, batches)
    )
    monkeypatch.setattr(solving, "CHECK_STEPS", 4)
    run_stack(jobs_in(tmp_path), shares_device=False)
    # At steps 4, 8 and the last, 10.
    assert groups == [4, 4, 4]


@pytest.mark.parametrize("most", [1, 10**4, 2**25])
def test_the_accuracies_of_several_models_are_those_of_each(most, tmp_path, monkeypatch):
    monkeypatch.setitem(scoring.MAX_ELEMENTS, "cpu", most)
    jobs = jobs_in(tmp_path)
    models = [job.build().train() for job in jobs]
    batches = [job.validation().rows(slice(40)) for job in jobs]
    together = scoring.mean_accuracies(models, batches)
    assert together == [scoring.mean_accuracy(model, batch) for model, batch in zip(models, batches, strict=True)]
    assert len(set(together)) > 1
    assert all(model.training for model in models)
