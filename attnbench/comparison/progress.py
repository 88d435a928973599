"""Progress of a plan: the outcome of each cell, those that run, and an estimate of the rest."""

import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from tqdm import tqdm

from attnbench.comparison.cells import Cell, gpus_and_workers
from attnbench.comparison.plan import Comparison
from attnbench.evals.runners.probe import ProbeJob
from attnbench.evals.runners.system import UNHASHED
from attnbench.machine.device import synchronize
from attnbench.machine.environment import environment
from attnbench.machine.processes import Outcome
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.results.folder import ROOT
from attnbench.results.row_files import read_results
from attnbench.results.rows import TEST_OF_BEST, Measurement
from attnbench.settings.errors import printable
from attnbench.settings.text import MAX_JSON_BYTES, parse_json, read_bounded
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import duration
from attnbench.training.job import TrainingJob
from attnbench.training.loop import train
from attnbench.training.step import StepReport

log = logging.getLogger(__name__)

FIRST_WEIGHT = 2
"""The cost that a plan states counts as much as so many finished cells of an evaluation: the first to finish are often
the cheapest variant's."""

COLUMNS = 79

TRIAL_STEPS = 4
"""Steps that are timed to estimate a training; the first, which compiles, counts once."""

TRIAL_SEQUENCES = 4
"""Sequences of a step that is timed on a CPU, where its time grows with them."""


class Progress:
    """A line a finished cell, with what came out; and what runs now, with the time left: on a terminal below the lines,
    in a file behind each.

    Args:
        left: how many cells there are of each evaluation.
        tells_now: the cells run in the order in which they were begun.
        costs: seconds a cell of each evaluation, as the plan states them; without one the mean of what has run counts.
    """

    def __init__(self, left: Counter[str], costs: Mapping[str, float], *, tells_now: bool = True) -> None:
        self.tells_now = tells_now
        self.left, self.total, self.costs = left, left.total(), costs
        self.seconds: dict[str, list[float]] = {}
        self.waiting: list[Cell] = []
        self.at_a_time = 1
        self._line = None
        if sys.stderr.isatty():
            self._line = tqdm(bar_format="{desc}", leave=False, ncols=COLUMNS)

    def add(self, cells: Sequence[Cell]) -> None:
        """Take note of cells that were not known at the beginning."""
        self.left.update(cell.group for cell in cells)
        self.total += len(cells)

    def skip(self, cells: Sequence[Cell]) -> None:
        """Count cells that were done before."""
        self.left.subtract(cell.group for cell in cells)
        if cells:
            log.info(f"[{self.total - self.left.total()}/{self.total}] {len(cells)} were done before")

    def begin(self, cells: Sequence[Cell], at_a_time: int) -> None:
        """Take note of cells that are run, in this order."""
        self.waiting, self.at_a_time = list(cells), at_a_time
        if cells:
            self._show(f"[{self.total - self.left.total()}/{self.total}]" if self._line is None else "")

    def extend(self, cells: Sequence[Cell]) -> None:
        """Take note of cells that run before those which wait."""
        self.waiting[self.at_a_time : self.at_a_time] = cells

    def report(self, outcome: Outcome[Cell]) -> None:
        """Print the outcome of a cell."""
        cell = outcome.item
        self.left[cell.group] -= 1
        self.waiting.remove(cell)
        # What ran beside others took its time from them too.
        share = outcome.seconds / self.at_a_time
        self.seconds.setdefault(cell.group, []).append(share)
        became = what_came_out(cell) if outcome.error is None else f"failed: {outcome.error}"
        self._show(
            f"[{self.total - self.left.total()}/{self.total}] {cell.label}: {became}, {duration(outcome.seconds)}"
        )

    def close(self) -> None:
        """Remove the status below the lines."""
        if self._line is not None:
            self._line.close()

    def _show(self, line: str) -> None:
        left = self.seconds_left()
        parts = [f"about {duration(left)} to go"] if left else []
        if self.waiting and self.tells_now:
            others = min(self.at_a_time, len(self.waiting)) - 1
            parts.append(f"now {self.waiting[0].label}{f' and {others} more' if others else ''}")
        status = ", ".join(parts)
        if self._line is None:
            log.info(f"{line} ({status})" if status else line)
            return
        if line:
            log.info(line)
        status = printable(status)
        self._line.set_description_str(status if len(status) <= COLUMNS else f"{status[: COLUMNS - 1]}…")

    def seconds_left(self) -> float | None:
        """Estimate from the time that cells took and the plan's costs; None where neither says."""
        ran = [(seconds, self.costs.get(name)) for name, group in self.seconds.items() for seconds in group]
        known = [(seconds, cost) for seconds, cost in ran if cost]
        # How much slower this machine is than the one that the plan's costs are of.
        scale = sum(seconds for seconds, _ in known) / sum(cost for _, cost in known) if known else 1.0
        overall = statistics.fmean(seconds for seconds, _ in ran) if ran else None
        total = 0.0
        for name, number in self.left.items():
            took, stated = self.seconds.get(name, []), self.costs.get(name)
            if stated:
                cost = (FIRST_WEIGHT * stated * scale + sum(took)) / (FIRST_WEIGHT + len(took))
            elif took or overall is not None:
                cost = statistics.fmean(took) if took else overall
            elif number:
                return None
            else:
                cost = 0.0
            total += number * (cost or 0.0)
        return total


def what_came_out(cell: Cell) -> str:
    """Name the score that a cell is for, or the reason why it has none: accuracy 0.98 at num_pairs 16."""
    rows = [row.measurement for path in cell.rows_there() for row in read_results(path)]
    plots = [pair for job in cell.jobs for pair in job.plots[:1]]
    # Searches have the number alone that rates are chosen by.
    for metric, axis in (*plots, ("selection", ""), ("nats_per_character", "")):
        scores = [row for row in rows if row.metric == metric and _is_score(row)]
        if scores:
            last = scores[-1]
            # The label of one of several tasks says where already.
            where = f" at {axis} {last.settings[axis]}" if axis in last.settings and axis not in cell.label else ""
            unit = f" {last.unit}" if last.unit not in ("", "1") else ""
            return f"{metric} {last.value:.4g}{unit}{where}"
    return next((f"{row.status}: {row.reason}" for row in rows if row.status != "ok"), "no number")


def _is_score(row: Measurement) -> bool:
    is_read = all(row.settings.get(name, value) == value for name, value in TEST_OF_BEST.items())
    return row.value is not None and (is_read or row.metric in ("selection", "nats_per_character"))


def list_cells(comparison: Comparison, searches: Sequence[Cell], timed: Sequence[Cell]) -> None:
    """List what would run, what is done, and about how long the rest takes here; scored trainings by number alone while
    their rates are not chosen."""
    scored = comparison.wanted(comparison.scored()) if all(cell.is_done() for cell in searches) else []
    left: Counter[str] = Counter()
    for cell in (*searches, *scored, *timed):
        left[cell.group] += not cell.is_done()
        log.info(f"  {'done' if cell.is_done() else 'to do'}  {cell.label}")
    if not scored:
        for name, number in comparison.num_scored().items():
            left[name] += number
            log.info(f"  to do  {name}: {number} scored cells, at the rates that the searches will give")
    left = +left
    if left:
        trained = _seconds_a_training(comparison, left)
        costs = {**comparison.plan.costs, **trained}
        total = sum(number * costs.get(name, 0.0) for name, number in left.items())
        unknown = [f"{number} of {name}" for name, number in left.items() if name not in costs]
        log.info(
            f"about {duration(total)} here for {left.total()} cells: trainings by a few steps of each, timed now"
            + (", the rest by plan.costs" if left.keys() - trained.keys() and not unknown else "")
            + (f"; not counted: {', '.join(unknown)}, which plan.costs does not name" if unknown else "")
        )


def _seconds_a_training(comparison: Comparison, groups: Iterable[str]) -> dict[str, float]:
    """Seconds that a comparison waits for one training of an evaluation, the mean over variants and tasks."""
    seconds: dict[str, list[float]] = {}
    (_, workers), threads = gpus_and_workers(comparison.settings), torch.get_num_threads()
    # As the workers will share the cores.
    torch.set_num_threads(max(1, threads // workers))
    try:
        for job in comparison.trainings():
            if job.evaluation in groups and job.matched is not None:
                one = attempt(lambda job=job: _seconds_of(job))
                # What does not fit has no time.
                seconds.setdefault(job.evaluation, []).extend([one] if not isinstance(one, OutOfMemory) else [])
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.fmean(group) / workers for name, group in seconds.items() if group}


def _seconds_of(job: TrainingJob | ProbeJob) -> float:
    """Estimate the seconds of a whole training from its first steps."""
    is_cpu = job.device.type == "cpu"
    training = job.training()
    settings, batch, state = training.settings, training.batches(0), TrainState.fresh(training.build())
    if is_cpu:
        batch = batch.rows(slice(TRIAL_SEQUENCES))
    micro_batch_size, count = None if is_cpu else settings.micro_batch_size, len(batch.tokens_BT)
    marks = [time.perf_counter()]

    def mark(state: TrainState, report: StepReport) -> None:
        synchronize(job.device)
        marks.append(time.perf_counter())

    train(
        state,
        lambda step: batch,
        replace(settings, batch_size=count, micro_batch_size=micro_batch_size),
        precision=training.record.precision,
        num_steps=TRIAL_STEPS,
        hooks=[mark],
        compiled=training.compiled,
        captured=training.captured,
    )
    first, *later = [after - before for before, after in pairwise(marks)]
    step = statistics.median(later) * settings.batch_size / count
    return training.num_steps * step + (0.0 if is_cpu else first)


def say_why_again(cells: Sequence[Cell]) -> None:
    """Name the differences of the machine from the one that measured these timed cells before, if any did."""
    said: set[str] = set()
    for cell in cells:
        folder = cell.folder
        now = environment(cell.jobs[0].device, ROOT)
        for other in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/environment.json")):
            if other.parent == folder or not any(other.parent.glob("results/*.jsonl")):
                continue
            try:
                then = parse_json(read_bounded(other, MAX_JSON_BYTES))
            except (OSError, ValueError):
                continue
            names = [name for name in now if name not in UNHASHED and isinstance(then, dict) and name in then]
            changed = [f"{name} {then[name]} is {now[name]} now" for name in names if then[name] != now[name]]
            if changed:
                said.add("; ".join(changed))
    for difference in sorted(said):
        why = " (OMP_NUM_THREADS, or the cores that the process may use)" if "threads)" in difference else ""
        log.info(f"what is timed is measured again, as it was on another machine: {difference}{why}")
