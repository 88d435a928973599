"""Cells: what a comparison is made of, each one training or one measurement, complete by its results files alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attnbench.evals.base import CheckpointEvaluation, Evaluation, Probe, SystemEvaluation
from attnbench.evals.runners.prepare_probe import build_tasks, prepare_probe
from attnbench.evals.runners.probe import run_probe
from attnbench.evals.runners.system import prepare_system, run_system
from attnbench.evals.runners.training import results_of, run_training, training_results
from attnbench.results.rows import TRAINING, is_complete, read_results
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, RunSettings
from attnbench.training.prepare import Run


@dataclass(slots=True, kw_only=True, frozen=True)
class Cell:
    """What another process needs to run it, and where its results will be."""

    label: str
    """For people: recall linear, num_pairs 16, lr 0.03, seed 0."""
    settings: RunSettings
    results: tuple[Path, ...]
    evaluation: EvaluationSettings | None = None
    """None for the training of a language model, whose evaluations stand in its settings."""
    task: int | None = None
    """Of a probe: which of its tasks; None for a system evaluation."""
    rate: float = 0.0
    shares_device: bool = False

    @property
    def group(self) -> str:
        """The evaluation's name, or TRAINING."""
        return self.evaluation.name if self.evaluation is not None else TRAINING

    @property
    def is_timed(self) -> bool:
        """It runs alone on its device, in a process that did nothing else."""
        return self.evaluation is not None and self.task is None

    def is_done(self) -> bool:
        """Whether all its results are there; those of a training that failed say so.

        A file that was altered is none: run, the cell makes it again, or says what is wrong with it and the way out.
        """
        first, *others = self.results
        if not is_whole(first):
            return False
        return all(map(is_whole, others)) or any(row.measurement.status != "ok" for row in read_results(first))


def is_whole(path: Path) -> bool:
    """True where a file of complete results is there and can be read."""
    try:
        return is_complete(path) and read_results(path) is not None
    except UserError:
        return False


def execute(cell: Cell) -> None:
    """Runs a cell in this process.

    Raises:
        UserError, Interrupted: as run_training, run_probe and run_system.
    """
    if cell.evaluation is None:
        run_training(cell.settings, shares_device=cell.shares_device, waits=True)
    elif cell.task is None:
        run_system(cell.settings, cell.evaluation)
    else:
        prepared = prepare_probe(cell.settings, cell.evaluation, cell.task, cell.rate)
        run_probe(prepared, shares_device=cell.shares_device)


def training_cell(prepared: Run) -> Cell:
    """The training of a language model and the evaluations of its checkpoints that its settings name."""
    settings = prepared.settings
    results = [training_results(prepared), *(results_of(prepared, own) for own in settings.evaluations)]
    rate = settings.train.learning_rate
    label = f"training {settings.mixer.name}, {_trained(rate, settings.seed)}"
    return Cell(label=label, settings=settings, results=tuple(results), rate=rate)


def probe_cell(settings: RunSettings, evaluation: EvaluationSettings, task: int, rate: float) -> Cell:
    """One training of one task."""
    return Cell(
        label=f"{task_name(settings, evaluation, task)}, {_trained(rate, settings.seed)}",
        settings=settings,
        results=(prepare_probe(settings, evaluation, task, rate).results,),
        evaluation=evaluation,
        task=task,
        rate=rate,
    )


def task_name(settings: RunSettings, evaluation: EvaluationSettings, index: int) -> str:
    """For people: the probe, the variant, and where the task differs from the probe's others."""
    _, tasks = build_tasks(settings, evaluation)
    own = tasks[index].settings
    distinct = [
        f"{name} {value}" for name, value in own.items() if any(task.settings.get(name) != value for task in tasks)
    ]
    return ", ".join([f"{evaluation.name} {settings.mixer.name}", *distinct])


def system_cell(prepared: Run, evaluation: EvaluationSettings) -> Cell:
    """One system evaluation of one variant."""
    _, path = prepare_system(prepared, evaluation)
    label = f"{evaluation.name} {prepared.mixer}"
    return Cell(label=label, settings=prepared.settings, results=(path,), evaluation=evaluation)


class ByKind(NamedTuple):
    """Evaluations by what they need."""

    of_checkpoints: list[EvaluationSettings]
    probes: list[EvaluationSettings]
    system: list[EvaluationSettings]


def by_kind(settings: RunSettings) -> ByKind:
    """The evaluations that read checkpoints, those that train probes, and those of the system."""
    sorted_out = ByKind([], [], [])
    for evaluation in settings.evaluations:
        cls = resolve(evaluation.target, Evaluation)
        kinds = (CheckpointEvaluation, Probe, SystemEvaluation)
        fitting = [found for kind, found in zip(kinds, sorted_out, strict=True) if issubclass(cls, kind)]
        if not fitting:
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UserError(f"eval.{evaluation.name}: {cls.__name__} must be one of {names}, not an Evaluation alone")
        fitting[0].append(evaluation)
    return sorted_out


def _trained(rate: float, seed: int) -> str:
    return f"lr {rate:g}, " + ("search" if seed == SELECTION_SEED else f"seed {seed}")
