"""Dry run of a plan: its cells, and about how long they take here."""

import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from attnbench.comparison.cells import Cell, gpus_and_workers
from attnbench.comparison.plan import Comparison
from attnbench.comparison.progress import Kind, kind_of
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.device import synchronize
from attnbench.machine.timing import attempt
from attnbench.settings.errors import UserError, one_line
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import duration
from attnbench.training.job import TrainingJob
from attnbench.training.loop import train
from attnbench.training.run import Training
from attnbench.training.step import StepReport

log = logging.getLogger(__name__)

TRIAL_STEPS = 4
"""Steps that are timed to estimate a training; the first, which compiles, counts once."""

TRIAL_SEQUENCES, TRIAL_SECONDS = 4, 1.0
"""Sequences of a step that is timed on a CPU, where the time of a large model's grows with them; and seconds that a
step of the whole batch may take by that, so that it is timed itself."""


def list_cells(comparison: Comparison, searches: Sequence[Cell], timed: Sequence[Cell]) -> None:
    """List what would run, what is done, and about how long the rest takes here; scored trainings by number alone whose
    rates are not chosen yet."""
    scored = comparison.wanted(comparison.scored)
    left: Counter[Kind] = Counter()
    for cell in (*searches, *scored, *timed):
        is_done = comparison.is_finished(cell)
        left[kind_of(cell.jobs[0])] += not is_done
        log.info(f"  {'done' if is_done else 'to do'}  {cell.label}")
    undecided = Counter(map(kind_of, comparison.to_score())) - Counter(kind_of(cell.jobs[0]) for cell in scored)
    for group in dict.fromkeys(kind.group for kind in undecided):
        number = sum(number for kind, number in undecided.items() if kind.group == group)
        log.info(f"  to do  {group}: {number} scored cells, at the rates that the searches will give")
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
            f"about {duration(total)} for {left.total()} cells where the machine stays as busy as it is now, less "
            "where trainings end early: trainings by a few steps of each, timed now, without starts and evaluations"
            + (", the rest by plan.costs" if by_cost else "")
            + (f"; not counted: {', '.join(named)}, which plan.costs does not name" if named else "")
        )


def _seconds_of_elements(comparison: Comparison, groups: Iterable[str]) -> dict[tuple[str, str], float]:
    """Seconds that a comparison waits for a training, by its group and name, a unit of its kind's size.

    One whose steps raise an error is recorded as failed.
    """
    seconds: dict[tuple[str, str], float] = {}
    (gpus, workers), threads = gpus_and_workers(comparison.settings), torch.get_num_threads()
    # As the workers will share the cores.
    torch.set_num_threads(max(1, threads // workers))
    try:
        for job in (score.prepared for score in comparison.scores):
            if job.evaluation in groups:
                kind = kind_of(job)
                try:
                    one = attempt(lambda job=job: _seconds_of(job)) if job.matched is not None else None
                except Exception as error:
                    # As in a worker: whatever is wrong with a mixer, the others are listed and timed.
                    comparison.fail(kind.name, str(error) if isinstance(error, UserError) else one_line(error))
                    one = None
                # A GPU's workers take turns.
                at_a_time = workers if job.device.type == "cpu" else max(1, len(gpus))
                # What cannot be built, fails or does not fit takes no time.
                seconds[kind.group, kind.name] = one / kind.size / at_a_time if isinstance(one, float) else 0.0
    finally:
        torch.set_num_threads(threads)
    return seconds


def _seconds_of(job: TrainingJob | ProbeJob) -> float:
    """Estimate the seconds of a whole training, should it make all its steps, from its first ones."""
    training = job.training()
    if job.device.type != "cpu":
        first, step = _time_steps(training, training.settings.batch_size)
        return first + training.num_steps * step
    number = min(TRIAL_SEQUENCES, training.settings.batch_size)
    _, few = _time_steps(training, number)
    step = few * training.settings.batch_size / number
    # Most of a small model's step is the same for any number of sequences.
    if step < TRIAL_SECONDS:
        _, step = _time_steps(training, training.settings.batch_size)
    return training.num_steps * step


def _time_steps(training: Training, num_sequences: int) -> tuple[float, float]:
    """Time a training's first steps, with some of its batch's sequences: seconds of the first, and of a later one."""
    settings, device = training.settings, training.device
    batch, state = training.batches(0).rows(slice(num_sequences)), TrainState.fresh(training.build())
    at_once = settings.micro_batch_size if num_sequences == settings.batch_size else None
    marks = [time.perf_counter()]

    def mark(state: TrainState, report: StepReport) -> None:
        synchronize(device)
        marks.append(time.perf_counter())

    train(
        state,
        lambda step: batch,
        replace(settings, batch_size=num_sequences, micro_batch_size=at_once),
        precision=training.record.precision,
        num_steps=TRIAL_STEPS,
        hooks=[mark],
        compiled=training.compiled,
        captured=training.captured,
    )
    first, *later = [after - before for before, after in pairwise(marks)]
    return first, statistics.median(later)
