"""Cells: the units that a comparison runs, each a training or a measurement."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from attnbench.evals.base import CheckpointEvaluation, Evaluation, Probe, SystemEvaluation
from attnbench.evals.runners.probe import ProbeJob
from attnbench.evals.runners.stack import run_stack
from attnbench.evals.runners.system import SystemJob
from attnbench.machine.device import all_gpus, resolve_device
from attnbench.machine.processes import IdleWorkers, Outcome, run_in_processes
from attnbench.results.corpora import on_corpus
from attnbench.results.job import Job, is_done, run_jobs
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve
from attnbench.settings.schema import ComparisonSettings, EvaluationSettings, RunSettings


@dataclass(slots=True, kw_only=True, frozen=True)
class Cell:
    """Jobs of one folder, run by one process."""

    label: str
    """Name for people: recall linear, num_pairs 16, lr 0.03, seed 0."""
    jobs: tuple[Job, ...]
    """A training and the evaluations of its checkpoints, or one job."""
    rate: float = 0.0
    is_timed: bool = False
    """It runs alone on its device, in a fresh process."""
    shares_device: bool = field(default=False, compare=False)
    in_stack: bool = False
    """The plan asks for stacks, even if this one has a single member."""

    @property
    def group(self) -> str:
        """The evaluation's name, or TRAINING."""
        return self.jobs[0].evaluation

    @property
    def folder(self) -> Path:
        return self.jobs[0].folder

    @property
    def results(self) -> tuple[Path, ...]:
        return tuple(job.results for job in self.jobs)

    def is_done(self) -> bool:
        """Tell if all its results exist; those of a failed training say so."""
        return all(map(is_done, self.jobs))


def execute(cell: Cell) -> None:
    """Run a cell in this process."""
    run_jobs(cell.jobs, shares_device=cell.shares_device)


def execute_together(cells: Sequence[Cell]) -> None:
    """Run cells in this process: one, or the members of a stack, see `in_stacks`."""
    jobs = [job for cell in cells for job in cell.jobs if isinstance(job, ProbeJob)]
    if jobs and cells[0].in_stack:
        run_stack(jobs, shares_device=cells[0].shares_device)
        return
    for cell in cells:
        execute(cell)


def gpus_and_workers(settings: ComparisonSettings) -> tuple[list[str], int]:
    """Name the GPUs that workers are spread over, none for a single device, and count the cells at a time."""
    gpus = all_gpus(resolve_device(settings.device)) if settings.plan.devices == "all" else []
    return gpus, settings.plan.num_workers * max(1, len(gpus))


def run_here(
    settings: ComparisonSettings,
    stacks: Sequence[tuple[Cell, ...]],
    *,
    is_timed: bool,
    log: Path,
    number: int,
    idle: IdleWorkers | None = None,
    more: Callable[[], Sequence[tuple[Cell, ...]]] = list,
) -> Generator[Outcome[tuple[Cell, ...]], None, None]:
    """Run stacks in processes of this host: timed ones alone on their device, others `num_workers` at a time on each.

    Args:
        log: file of their output.
        number: cells of `stacks` and of those that `more` will return.
        idle: workers kept between calls.
        more: called after each outcome; its stacks run before the waiting ones.
    """
    gpus, at_a_time = gpus_and_workers(settings)
    num_workers = max(1, min(max(1, len(gpus)) if is_timed else at_a_time, number))
    shares = num_workers > max(1, len(gpus))
    # Workers share the cores. On a GPU the share does not depend on the number of cells, so that workers are reused.
    sharing = num_workers if is_timed or resolve_device(settings.device).type == "cpu" else at_a_time

    def given(stacks: Sequence[tuple[Cell, ...]]) -> list[tuple[Cell, ...]]:
        return [tuple(replace(cell, shares_device=shares) for cell in stack) for stack in stacks]

    waiting = deque(given(stacks))
    outcomes = run_in_processes(
        execute_together,
        waiting,
        num_workers=num_workers,
        log=log,
        num_threads=max(1, torch.get_num_threads() // sharing),
        fresh=is_timed,
        gpus=gpus,
        idle=idle,
    )
    return _growing(outcomes, waiting, lambda: given(more()))


def _growing(
    outcomes: Generator[Outcome[tuple[Cell, ...]], None, None],
    waiting: deque[tuple[Cell, ...]],
    more: Callable[[], Sequence[tuple[Cell, ...]]],
) -> Generator[Outcome[tuple[Cell, ...]], None, None]:
    with closing(outcomes):
        for outcome in outcomes:
            yield outcome
            waiting.extendleft(reversed(more()))


def system_cell(job: SystemJob, corpus: str | None = None) -> Cell:
    """Return the cell of a system evaluation, named by its corpus if there are several."""
    return Cell(label=on_corpus(job.label, corpus), jobs=(job,), is_timed=True)


class ByKind(NamedTuple):
    """Evaluations by what they need."""

    of_checkpoints: list[EvaluationSettings]
    probes: list[EvaluationSettings]
    system: list[EvaluationSettings]


def by_kind(settings: RunSettings) -> ByKind:
    """Sort evaluations by what they need."""
    groups: dict[type, list[EvaluationSettings]] = {CheckpointEvaluation: [], Probe: [], SystemEvaluation: []}
    for evaluation in settings.evaluations:
        cls = resolve(evaluation.target, Evaluation)
        kind = next((kind for kind in groups if issubclass(cls, kind)), None)
        if kind is None:
            names = ", ".join(kind.__name__ for kind in groups)
            raise UserError(f"eval.{evaluation.name}: {cls.__name__} must be one of {names}, not an Evaluation alone")
        groups[kind].append(evaluation)
    return ByKind(*groups.values())
