"""Dry run of a plan: its runs, and an estimate of their time here."""

import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from attnbench.comparison.plan import Comparison
from attnbench.comparison.progress import Kind, kind_of
from attnbench.comparison.workers import gpus_and_workers
from attnbench.machine.device import synchronize
from attnbench.machine.timing import attempt
from attnbench.results.job import Job
from attnbench.settings.errors import UserError, one_line
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import duration
from attnbench.training.loop import train
from attnbench.training.run import TrainedJob
from attnbench.training.step import StepReport

log = logging.getLogger(__name__)

TRIAL_STEPS = 4
"""Timed steps of a training; the first, which compiles, counts once."""

TRIAL_SEQUENCES, TRIAL_SECONDS = 4, 1.0
"""On a CPU a step with TRIAL_SEQUENCES is timed first. The whole batch is timed only if by that estimate it takes less
than TRIAL_SECONDS."""


def list_jobs(comparison: Comparison, searches: Sequence[Job], timed: Sequence[Job]) -> None:
    """Scored runs without a rate are counted only."""
    scored = comparison.wanted(comparison.scored)
    left: Counter[Kind] = Counter()
    for job in (*searches, *scored, *timed):
        is_done = comparison.is_finished(job)
        left[kind_of(job)] += not is_done
        log.info(f"  {'done' if is_done else 'to do'}  {job.label}")
    undecided = Counter(map(kind_of, comparison.to_score())) - Counter(kind_of(job) for job in scored)
    for group in dict.fromkeys(kind.group for kind in undecided):
        number = sum(number for kind, number in undecided.items() if kind.group == group)
        log.info(f"  to do  {group}: {number} scored runs, at the rates that the searches will give")
    left.update(undecided)
    left = +left
    if left:
        groups = {kind.group for kind in left}
        trained = _seconds_of_elements(comparison, groups)
        stated = comparison.plan.costs
        total, by_cost, unknown = 0.0, False, Counter()
        for kind, number in left.items():
            if (kind.group, kind.name) in trained:
                total += number * trained[kind.group, kind.name] * kind.size
            elif kind.group in stated:
                total, by_cost = total + number * stated[kind.group], True
            else:
                unknown[kind.group] += number
        named = [f"{number} of {group}" for group, number in unknown.items()]
        log.info(
            f"about {duration(total)} for {left.total()} runs where the machine stays as busy as it is now, less "
            "where trainings end early: trainings by a few steps of each, timed now, without starts and evaluations"
            + (", the rest by plan.costs" if by_cost else "")
            + (f"; not counted: {', '.join(named)}, which plan.costs does not name" if named else "")
        )


def _seconds_of_elements(comparison: Comparison, groups: Iterable[str]) -> dict[tuple[str, str], float]:
    """Return the seconds that a comparison waits for a training per unit of size, by group and name. A training whose
    steps raise an error is recorded as failed."""
    seconds: dict[tuple[str, str], float] = {}
    (gpus, workers), threads = gpus_and_workers(comparison.settings), torch.get_num_threads()
    # The workers share the cores.
    torch.set_num_threads(max(1, threads // workers))
    try:
        for job in (score.prepared for score in comparison.scores):
            if job.evaluation in groups:
                kind = kind_of(job)
                try:
                    one = attempt(lambda job=job: _seconds_of(job)) if job.matched is not None else None
                except Exception as error:
                    # Any error of a mixer leaves the others to be listed and timed.
                    comparison.fail(kind.name, str(error) if isinstance(error, UserError) else one_line(error))
                    one = None
                # A GPU's workers take turns.
                at_a_time = workers if job.device.type == "cpu" else max(1, len(gpus))
                seconds[kind.group, kind.name] = one / kind.size / at_a_time if isinstance(one, float) else 0.0
    finally:
        torch.set_num_threads(threads)
    return seconds


def _seconds_of(job: TrainedJob) -> float:
    """Estimate the seconds of all steps of a training from its first ones."""
    batch_size = job.train.batch_size
    if job.device.type != "cpu":
        first, step = _time_steps(job, batch_size)
        return first + job.num_steps * step
    number = min(TRIAL_SEQUENCES, batch_size)
    _, few = _time_steps(job, number)
    step = few * batch_size / number
    # Most of a small model's step is the same for any number of sequences.
    if step < TRIAL_SECONDS:
        _, step = _time_steps(job, batch_size)
    return job.num_steps * step


def _time_steps(job: TrainedJob, num_sequences: int) -> tuple[float, float]:
    """Time the first steps with part of a batch: seconds of the first, and of a later one."""
    settings, device = job.train, job.device
    batch, state = job.trial_batch().rows(slice(num_sequences)), TrainState.fresh(job.build())
    at_once = settings.micro_batch_size if num_sequences == settings.batch_size else None
    marks = [time.perf_counter()]

    def mark(state: TrainState, report: StepReport) -> None:
        synchronize(device)
        marks.append(time.perf_counter())

    train(
        state,
        lambda step: batch,
        replace(settings, batch_size=num_sequences, micro_batch_size=at_once),
        precision=job.record().precision,
        num_steps=TRIAL_STEPS,
        hooks=[mark],
        compiled=job.compiled,
        captured=job.captured,
    )
    first, *later = [after - before for before, after in pairwise(marks)]
    return first, statistics.median(later)
