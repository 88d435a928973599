"""The commands attnbench train and attnbench evaluate."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from attnbench.comparison.program import Driver
from attnbench.comparison.search import Found, rate_and_scores, scores_of_probe
from attnbench.comparison.variants import ByKind, by_kind
from attnbench.comparison.workers import Stack, execute
from attnbench.evals.runners.checkpoint import EvaluationJob, language_model_job
from attnbench.evals.runners.system import SystemJob
from attnbench.machine.device import resolve_device, start_afresh
from attnbench.machine.group import device_type_of, join
from attnbench.machine.processes import Outcome, run_alone
from attnbench.machine.ranks import ALONE, ranks_here
from attnbench.machine.signals import interruptible
from attnbench.mixers.recipe import warnings_of
from attnbench.results.files import replace_file
from attnbench.results.folder import holding
from attnbench.results.job import Job, run_jobs
from attnbench.settings.errors import UserError
from attnbench.settings.schema import RunSettings
from attnbench.settings.untrusted import MAX_JSON_BYTES, read_bounded
from attnbench.training.checkpoint import is_final
from attnbench.training.follow import follow
from attnbench.training.job import Run
from attnbench.training.lead import check_ranks, leading
from attnbench.training.prepare import prepare, reopen

log = logging.getLogger(__name__)


def run(settings: RunSettings) -> Path:
    """Train, unless a finished run of the same settings exists, and evaluate; return the run's folder. Raises
    Interrupted if a signal asked to stop, and the state is kept.

    Evaluations without a checkpoint (probes, speed, memory) have folders under cells/. Under torchrun, every process
    trains its share of the language model, and rank 0 does everything else.
    """
    ranks, group = ranks_here(), None
    if ranks != ALONE:
        check_ranks(settings.train, ranks)
        group = join(ranks, device_type_of(settings.device, ranks))
        if ranks.follows:
            follow(group, settings)
            return Path(settings.outputs_dir)
    with leading(group) if group is not None else nullcontext():
        kinds = by_kind(settings)
        run = prepare(replace(settings, evaluations=kinds.of_checkpoints))
        for line in warnings_of(settings.mixer):
            log.warning(line)
        # Wait for another process that evaluates this run, but not for one that trains it.
        run_jobs(language_model_job(run, group).parts, waits=is_final(run.checkpoints))
        _run_evaluations(run, settings, kinds)
    return run.folder


def evaluate_again(folder: Path, settings: RunSettings) -> Path:
    """Run the evaluations of a trained model that have no results yet. The settings are of the run's config.yaml, with
    evaluations and device replaced."""
    kinds = by_kind(settings)
    run = reopen(folder, settings)
    if not run.is_done():
        log.warning(f"{folder}: the rows of its training are missing; the command that trained it makes them again")
    jobs = [EvaluationJob(run, evaluation) for evaluation in kinds.of_checkpoints]
    if jobs:
        run_jobs(jobs, shares_device=True)
    _run_evaluations(run, settings, kinds)
    return folder


def _run_evaluations(run: Run, settings: RunSettings, kinds: ByKind) -> None:
    """Run the evaluations that need no checkpoint, and list their folders in the run's folder."""
    scores, found = [score for it in kinds.probes for score in scores_of_probe(settings, it)], Found()
    driver = Driver(rerun=settings.rerun, may_run=lambda job: True)
    driver.run([rate_and_scores(score, [settings.seed], found) for score in scores], _one_by_one)
    for reason in driver.failures.values():
        raise UserError(reason)
    jobs = [job for score in scores for job in found.scored[score.name]]
    # Memory of this process would count against the following processes.
    start_afresh(resolve_device(settings.device))
    with interruptible("stopped; the same command resumes from what is finished"):
        for evaluation in kinds.system:
            job = SystemJob(run, evaluation)
            if settings.rerun or not job.is_done():
                log.info(f"{job.label} (in a process of its own)")
                run_alone(execute, job, log=job.folder / "output.log", num_threads=torch.get_num_threads())
            jobs.append(job)
    with holding(run.folder, waits=True):
        remember_jobs(run.folder, jobs)


def _one_by_one(stacks: list[Stack], more: Callable[[], list[Stack]]) -> Generator[Outcome[Stack], None, None]:
    """An error ends the command."""
    waiting = deque(stacks)
    while waiting:
        [job] = stack = waiting.popleft()
        execute(job)
        yield Outcome(item=stack, seconds=0.0, error=None)
        waiting.extendleft(reversed(more()))


def remember_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """List the folders of these runs in the run's cells.txt, in place of former ones of their evaluations."""
    path, experiment = folder / "cells.txt", folder.parent
    known = read_bounded(path, MAX_JSON_BYTES).splitlines() if path.exists() else []
    made_now = tuple(f"cells/{job.evaluation}-" for job in jobs)
    lines = [
        *(line for line in known if not line.startswith(made_now)),
        *(job.folder.relative_to(experiment).as_posix() for job in jobs),
    ]
    if lines:
        replace_file(path, "".join(f"{line}\n" for line in lines))
