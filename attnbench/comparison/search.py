"""Learning rates: a grid for each variant, searched on validation data with a seed that is never scored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnbench.comparison.cells import Cell, probe_cell, training_cell
from attnbench.evals.runners.prepare_probe import build_tasks
from attnbench.results.rows import read_results
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, RunSettings
from attnbench.training.prepare import Run, again
from attnbench.verdict.ranking import ACCURACY


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    """The rate that a variant is scored at, and how it was found."""

    variant: str
    evaluation: str
    settings: dict[str, Any]
    """Of the task; empty for language models."""
    grid: list[float]
    scores: dict[str, float | None]
    """What each rate of the grid reached on validation data; None where it failed. Empty without a search."""
    chosen: float
    at_edge: bool
    """No rate inside the grid was as good as its smallest or largest: a wider grid might hold a better one."""
    taken_from: dict[str, Any] | None = None
    """The settings of the neighbouring task whose rate this is."""


def training_searches(prepared: Run, grid: Sequence[float]) -> list[Cell]:
    """One training a rate; none where there is nothing to choose."""
    return [_training(prepared, rate, SELECTION_SEED, ()) for rate in grid] if len(grid) > 1 else []


def training_choice(prepared: Run, grid: Sequence[float]) -> Choice:
    """The rate of the lowest validation loss, from the finished searches."""
    cells = training_searches(prepared, grid)
    return _choose(prepared.mixer, "training", {}, grid, cells, "nats_per_character", higher_is_better=False)


def training_cells(
    prepared: Run, evaluations: Sequence[EvaluationSettings], rate: float, seeds: Sequence[int]
) -> list[Cell]:
    """The trainings that are scored."""
    return [_training(prepared, rate, seed, evaluations) for seed in seeds]


def probe_searches(settings: RunSettings, evaluation: EvaluationSettings) -> list[Cell]:
    """One training a task and rate; none for a task with a single rate, or with that of a neighbour."""
    probe, tasks = build_tasks(settings, evaluation)
    return [
        cell
        for index, task in enumerate(tasks)
        if probe.rate_source(task) is None
        for cell in _task_searches(settings, evaluation, index, probe.learning_rates)
    ]


def probe_choice(settings: RunSettings, evaluation: EvaluationSettings, index: int) -> Choice:
    """The rate of one task, from its finished searches or from those of the neighbour whose rate it takes over.

    Raises:
        UserError: a search has no results.
    """
    probe, tasks = build_tasks(settings, evaluation)
    task = tasks[index]
    source = probe.rate_source(task)
    if source is not None:
        neighbour = next(place for place, other in enumerate(tasks) if other.settings == source.settings)
        found = probe_choice(settings, evaluation, neighbour)
        return replace(found, settings=dict(task.settings), taken_from=dict(source.settings))
    grid, variant = probe.learning_rates, settings.mixer.name
    cells = _task_searches(settings, evaluation, index, grid)
    return _choose(variant, evaluation.name, task.settings, grid, cells, "selection", higher_is_better=True)


def probe_cells(
    settings: RunSettings, evaluation: EvaluationSettings, index: int, rate: float, seeds: Sequence[int]
) -> list[Cell]:
    """The trainings of one task that are scored."""
    return [probe_cell(replace(settings, seed=seed), evaluation, index, rate) for seed in seeds]


def _task_searches(
    settings: RunSettings, evaluation: EvaluationSettings, index: int, grid: Sequence[float]
) -> list[Cell]:
    searching = replace(settings, seed=SELECTION_SEED)
    return [probe_cell(searching, evaluation, index, rate) for rate in grid] if len(grid) > 1 else []


def _training(prepared: Run, rate: float, seed: int, evaluations: Sequence[EvaluationSettings]) -> Cell:
    settings = prepared.settings
    train = replace(settings.train, learning_rate=float(rate))
    # A search is one of many trainings whose curve nobody looks at; its result stands in comparison.json.
    logger = replace(settings.logger, mode="none") if seed == SELECTION_SEED else settings.logger
    changed = replace(settings, train=train, seed=seed, evaluations=list(evaluations), logger=logger)
    return training_cell(again(prepared, changed))


def _choose(
    variant: str,
    evaluation: str,
    task: dict[str, Any],
    grid: Sequence[float],
    cells: Sequence[Cell],
    metric: str,
    *,
    higher_is_better: bool,
) -> Choice:
    """The rate of the lowest loss, or of the highest accuracy: the smallest of those within 1 % of it, one inside the
    grid before one at its edge, whose neighbours are known on one side alone.

    Accuracies of one seed that differ by no more than matters between variants do not say which rate works for other
    seeds, and of rates that work the larger ones diverge first. Where all failed it is the smallest, whose scored runs
    will say why.

    Raises:
        UserError: a search has no results.
    """
    scores: dict[float, float | None] = {}
    for cell in cells:
        if not cell.is_done():
            raise UserError(f"{cell.label}: has no results, so no learning rate can be chosen")
        rows = [row.measurement for row in read_results(cell.results[0])]
        scores[cell.rate] = next((row.value for row in rows if row.metric == metric), None)
    sign = 1 if higher_is_better else -1
    reached = {rate: sign * value for rate, value in scores.items() if value is not None}
    best = max(reached.values(), default=0.0)
    # A share of the best, so that near chance, where all are about the same, none is as good as a better one.
    enough = best * (1 - ACCURACY.smallest_difference) if higher_is_better else best
    as_good = [rate for rate, value in reached.items() if value >= enough]
    inside = [rate for rate in as_good if min(grid) < rate < max(grid)]
    return Choice(
        variant=variant,
        evaluation=evaluation,
        settings=dict(task),
        grid=sorted(grid),
        scores={f"{rate:g}": value for rate, value in sorted(scores.items())},
        chosen=min(inside or as_good, default=min(grid)),
        at_edge=bool(as_good) and not inside,
    )
