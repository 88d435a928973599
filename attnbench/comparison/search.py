"""Learning rates: a grid for each variant, searched on validation data with a seed that is never scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attnbench.comparison.cells import Cell
from attnbench.evals.runners.checkpoint import language_model_jobs
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.probe import ProbeJob, trained_label
from attnbench.results.rows import TRAINING, read_results
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, RunSettings
from attnbench.training.prepare import Run, with_identity
from attnbench.training.run import TrainingJob

NEAR = 0.01
"""Share of the best accuracy within which a rate is as good."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    """Choice of the rate that a variant is scored at."""

    variant: str
    evaluation: str
    settings: dict[str, Any]
    """Settings of the task; empty for language models."""
    grid: list[float]
    scores: dict[str, float | None]
    """Score of each rate of the grid on validation data; None where it failed. Empty without a search."""
    chosen: float
    at_edge: bool
    """No rate inside the grid was as good as its smallest or largest: a wider grid might hold a better one."""
    taken_from: dict[str, Any] | None = None
    """The settings of the neighbouring task whose rate this is."""


@dataclass(kw_only=True)
class Search:
    """The learning rate of one score: the trainings that try a grid, the choice, and the trainings that are scored."""

    name: str
    """Name for people."""
    variant: str
    evaluation: str
    """Its name, or TRAINING."""
    settings: dict[str, Any]
    """Settings of the task; empty for language models."""
    grid: Sequence[float]
    metric: str
    """The row of a search that rates are chosen by."""
    higher_is_better: bool
    prepared: ProbeJob | TrainingJob
    """One of its trainings, whatever its rate."""
    cell: Callable[[float, int], Cell]
    """The training at a rate and a seed."""
    source: "Search | None" = None
    """The neighbouring task whose rate this one takes over; None: it searches."""

    @cached_property
    def cells(self) -> list[Cell]:
        """One training a rate, of a seed that is never scored; none where there is nothing to choose."""
        is_searched = self.source is None and len(self.grid) > 1
        return [self.cell(rate, SELECTION_SEED) for rate in self.grid] if is_searched else []

    def scored(self, rate: float, seeds: Sequence[int]) -> list[Cell]:
        """The trainings that are scored."""
        return [self.cell(rate, seed) for seed in seeds]

    def choice(self) -> Choice:
        """Choose the rate, from the finished searches or from those of the neighbour whose rate it takes over.

        Raises:
            UserError: a search has no results.
        """
        if self.source is not None:
            taken_from = dict(self.source.settings)
            return replace(self.source.choice(), settings=dict(self.settings), taken_from=taken_from)
        scores: dict[float, float | None] = {}
        for cell in self.cells:
            if not cell.is_done():
                raise UserError(f"{cell.label}: has no results, so no learning rate can be chosen")
            rows = [row.measurement for row in read_results(cell.results[0])]
            scores[cell.rate] = next((row.value for row in rows if row.metric == self.metric), None)
        chosen, at_edge = choose_rate(scores, self.grid, higher_is_better=self.higher_is_better)
        return Choice(
            variant=self.variant,
            evaluation=self.evaluation,
            settings=dict(self.settings),
            grid=sorted(self.grid),
            scores={f"{rate:g}": value for rate, value in sorted(scores.items())},
            chosen=chosen,
            at_edge=at_edge,
        )


def search_of_training(run: Run, evaluations: Sequence[EvaluationSettings], grid: Sequence[float]) -> Search:
    """The search of a language model.

    Args:
        evaluations: of its checkpoints, where it is scored.
    """

    def cell(rate: float, seed: int) -> Cell:
        settings, is_scored = run.settings, seed != SELECTION_SEED
        # A search is one of many trainings whose curve nobody looks at; its result stands in comparison.json.
        logger = settings.logger if is_scored else replace(settings.logger, mode="none")
        train = replace(settings.train, learning_rate=float(rate))
        wanted = list(evaluations) if is_scored else []
        at_rate = with_identity(run, replace(settings, train=train, seed=seed, evaluations=wanted, logger=logger))
        label = f"training {run.mixer}, {trained_label(rate, seed)}"
        return Cell(label=label, jobs=language_model_jobs(at_rate), rate=train.learning_rate)

    return Search(
        name=f"training {run.mixer}",
        variant=run.mixer,
        evaluation=TRAINING,
        settings={},
        grid=grid,
        metric="nats_per_character",
        higher_is_better=False,
        prepared=TrainingJob(run),
        cell=cell,
    )


def searches_of_probe(settings: RunSettings, evaluation: EvaluationSettings) -> list[Search]:
    """The searches of a probe, one a task."""
    probe, jobs = prepare_probe(settings, evaluation)
    searches = [_search_of_task(job, probe.learning_rates) for job in jobs]
    for search, job in zip(searches, jobs, strict=True):
        source = probe.rate_source(job.task)
        if source is not None:
            search.source = next(other for other in searches if other.settings == source.settings)
    return searches


def _search_of_task(job: ProbeJob, grid: Sequence[float]) -> Search:
    def cell(rate: float, seed: int) -> Cell:
        at_rate = job.at(rate, seed)
        return Cell(label=at_rate.label, jobs=(at_rate,), rate=rate)

    return Search(
        name=job.task_label,
        variant=job.settings.mixer.name,
        evaluation=job.evaluation,
        settings=job.task.settings,
        grid=grid,
        metric="selection",
        higher_is_better=True,
        prepared=job,
        cell=cell,
    )


def choose_rate(
    scores: Mapping[float, float | None], grid: Sequence[float], *, higher_is_better: bool
) -> tuple[float, bool]:
    """Choose the rate of the lowest loss or of the highest accuracy.

    It is the smallest of those within 1 % of it, one inside the grid before one at its edge, whose neighbours are known
    on one side alone.

    Accuracies of one seed that differ by no more than matters between variants do not say which rate works for other
    seeds, and of rates that work the larger ones diverge first. Where all failed it is the smallest, whose scored runs
    will say why.

    Returns:
        The rate, and True where no rate inside the grid was as good as one at its edge.
    """
    sign = 1 if higher_is_better else -1
    reached = {rate: sign * value for rate, value in scores.items() if value is not None}
    best = max(reached.values(), default=0.0)
    # A share of the best, so that near chance, where all are about the same, none is as good as a better one.
    enough = best * (1 - NEAR) if higher_is_better else best
    as_good = [rate for rate, value in reached.items() if value >= enough]
    inside = [rate for rate in as_good if min(grid) < rate < max(grid)]
    return min(inside or as_good, default=min(grid)), bool(as_good) and not inside
