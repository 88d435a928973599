"""Learning rates: a grid for each variant, searched on validation data with seeds that are never scored."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from attnbench.comparison.cells import Cell
from attnbench.evals.lib.solving import SOLVED
from attnbench.evals.runners.checkpoint import language_model_jobs
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.probe import ProbeJob, trained_label
from attnbench.results.corpora import on_corpus
from attnbench.results.files import read_once
from attnbench.results.numbers import reaches, without_rounding
from attnbench.results.row_files import read_results
from attnbench.results.rows import TRAINING
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, RunSettings
from attnbench.training.job import TrainingJob
from attnbench.training.prepare import Run, with_identity
from attnbench.verdict.rates import Choice, rate_sensitivity, rate_window

MAX_WIDENINGS = 2
"""Rates that are added to a grid whose best is at its edge, one after the other."""

RATES_IN_FULL = "the best with its neighbours"
"""Rates of a language model that go on from one epoch of one seed to whole trainings of all search seeds, in the words
of freeze.json; a file without them was frozen when the best two went on."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Trial:
    """Outcome of one training of a search."""

    score: float | None
    """Accuracy or nats on validation data; None where it failed."""
    steps: float | None = None
    """To an accuracy of 0.95; None where it never got there."""


@dataclass(kw_only=True)
class Search:
    """The learning rate of one score: the trainings that try a grid, the choice, and the trainings that are scored.

    A best rate at the edge widens the grid by one, at most MAX_WIDENINGS times. Which trainings there are is therefore
    known step by step, from the results of those before: see `rounds`.
    """

    name: str
    """Name for people."""
    variant: str
    evaluation: str
    """Its name, or TRAINING."""
    settings: dict[str, Any]
    """Settings of the task; empty for language models."""
    grid: Sequence[float]
    num_seeds: int
    """Search seeds; from SELECTION_SEED on, never scored."""
    metric: str
    """The row of a search that rates are chosen by."""
    prepared: ProbeJob | TrainingJob
    """One of its trainings, whatever its rate."""
    cell: Callable[[float, int, int | None], Cell]
    """The training at a rate and a seed and, of a probe, with the step at which it leaves the search, see `_known`."""
    first_stage: Callable[[float], Cell] | None = None
    """The cheaper training at a rate, by which rates go on to whole trainings, see `_finalists`; None: all do."""
    corpus: str | None = None
    """The corpus, where the plan has several."""
    source: "Search | None" = None
    """The neighbouring task whose rate this one takes over; None: it searches."""

    @property
    def _is_searched(self) -> bool:
        """False where there is nothing to choose."""
        return self.source is None and len(self.grid) > 1

    @property
    def search_seeds(self) -> list[int]:
        return [SELECTION_SEED + index for index in range(self.num_seeds)]

    def cells(self) -> list[Cell]:
        """List the trainings that are known by now: of the grid, and of what the finished ones ask for."""
        if not self._is_searched:
            return []
        known, is_done = self._first()
        cells = [cell for group in known.values() for cell in group]
        if self.first_stage is not None and is_done:
            cells += [cell for rate in self._finalists(known) for cell in self._all_seeds(rate)]
        # A training of one epoch in all is both stages at once.
        return list({cell.folder: cell for cell in cells}.values())

    def _first(self) -> tuple[dict[float, list[Cell]], bool]:
        """The trainings of the grid, widened as far as the finished ones ask for it, and if all are finished."""
        rates = sorted(self.grid)
        known, is_done = self._known(rates)
        # A choice between two is no grid.
        for _ in range(MAX_WIDENINGS if len(rates) > 2 else 0):
            best = self._ordered(known)[0] if is_done else None
            if best not in (rates[0], rates[-1]):
                break
            rates = sorted([*rates, next_rate(rates, above=best == rates[-1])])
            known, is_done = self._known(rates)
        return known, is_done

    def _known(self, rates: Sequence[float]) -> tuple[dict[float, list[Cell]], bool]:
        """The trainings of these rates that are known by now, and if all of all rates are finished.

        A probe tries the middle of its grid first, then one rate on each side, and so on. Once a rate has solved all
        its seeds, those after it leave the search after twice the steps that took, unless they have arrived by then.
        """
        middle, known, limit = rates.index(sorted(self.grid)[(len(self.grid) - 1) // 2]), {}, None
        # A choice between two is no grid, here either.
        is_in_turn = isinstance(self.prepared, ProbeJob) and len(self.grid) > 2
        distances = {rate: abs(index - middle) if is_in_turn else 0 for index, rate in enumerate(rates)}
        for distance in sorted(set(distances.values())):
            group = [rate for rate in rates if distances[rate] == distance]
            known |= {rate: self._trials(rate, limit) for rate in group}
            if not all(cell.is_done() for rate in group for cell in known[rate]):
                return known, False
            limit = self._limit([self._read(cells) for cells in known.values()])
        return known, True

    def _limit(self, trials: Sequence[Sequence[Trial]]) -> int | None:
        """Twice the steps of the slowest seed of the rate that solved all of them first; None: none did."""
        if not isinstance(self.prepared, ProbeJob) or self.prepared.task.fixed_steps:
            return None
        solved = [[trial.steps or 0 for trial in group] for group in trials if num_solved(group) == len(group)]
        return round(2 * min(map(max, solved))) if solved else None

    def _trials(self, rate: float, limit: int | None) -> list[Cell]:
        """The trainings of a rate that all rates have."""
        return [self.first_stage(rate)] if self.first_stage is not None else self._all_seeds(rate, limit)

    def _all_seeds(self, rate: float, limit: int | None = None) -> list[Cell]:
        return [self.cell(rate, seed, limit) for seed in self.search_seeds]

    def _ordered(self, known: Mapping[float, Sequence[Cell]]) -> list[float]:
        """Order rates by what their trainings came to, the best first."""
        return self._best({rate: self._read(cells) for rate, cells in known.items()})

    def _finalists(self, known: Mapping[float, Sequence[Cell]]) -> list[float]:
        """List the rates that are trained in full, as far as the finished trainings ask for them.

        These are the best rate of the first stage and its neighbours in the grid. Where the best of the whole trainings
        is another rate, its neighbours are added, until the best has all of its neighbours beside it.
        """
        rates, best, finalists = sorted(known), self._ordered(known)[0], []
        while True:
            index = rates.index(best)
            more = sorted({*finalists, *rates[max(0, index - 1) : index + 2]})
            full = {rate: self._all_seeds(rate) for rate in more}
            if more == finalists or not all(cell.is_done() for cells in full.values() for cell in cells):
                return more
            finalists, best = more, self._ordered(full)[0]

    def _read(self, cells: Sequence[Cell]) -> list[Trial]:
        """Read what the trainings came to.

        Raises:
            UserError: one has no results.
        """
        trials = []
        for cell in cells:
            if not cell.is_done():
                raise UserError(f"{cell.label}: has no results, so no learning rate can be chosen")
            values = _values(cell.results[0])
            trials.append(Trial(score=values.get(self.metric), steps=values.get("steps_to_95")))
        return trials

    def _best(self, trials: Mapping[float, Sequence[Trial]]) -> list[float]:
        if isinstance(self.prepared, ProbeJob):
            return best_of_probe(trials, self.prepared.task.num_steps)
        return best_of_training(trials)

    def scored(self, rate: float, seeds: Sequence[int]) -> list[Cell]:
        """The trainings that are scored."""
        return [self.cell(rate, seed, None) for seed in seeds]

    def choice(self) -> Choice:
        """Choose the rate, from the finished searches or from those of the neighbour whose rate it takes over.

        Raises:
            UserError: a search has no results.
        """
        if self.source is not None:
            taken_from = dict(self.source.settings)
            return replace(self.source.choice(), settings=dict(self.settings), taken_from=taken_from)
        evaluation = on_corpus(self.evaluation, self.corpus)
        given = {"variant": self.variant, "evaluation": evaluation, "settings": dict(self.settings)}
        if not self._is_searched:
            return Choice(**given, grid=sorted(self.grid), scores={}, chosen=self.grid[0], at_edge=False)
        known, _ = self._first()
        rates, first = sorted(known), {rate: self._read(cells) for rate, cells in known.items()}
        trials = first
        if self.first_stage is not None:
            trials = {rate: self._read(self._all_seeds(rate)) for rate in self._finalists(known)}
        [chosen, *_] = self._best(trials)
        any_worked = any(trial.score is not None for group in trials.values() for trial in group)
        probe = self.prepared if isinstance(self.prepared, ProbeJob) else None
        budget = probe.task.num_steps if probe is not None else 0
        curve = {rate: _mean([trial.score for trial in group]) for rate, group in first.items()}
        return Choice(
            **given,
            grid=rates,
            rate_window=rate_window(curve, higher_is_better=probe is not None),
            rate_sensitivity=rate_sensitivity(curve, chosen, higher_is_better=probe is not None),
            scores=_by_rate(trials, lambda group: _mean([trial.score for trial in group])),
            seeds=_by_rate(trials, lambda group: [trial.score for trial in group]),
            solved=_by_rate(trials, num_solved) if probe is not None else {},
            steps=_by_rate(trials, lambda group: mean_steps(group, budget)) if probe is not None else {},
            after_an_epoch=_by_rate(first, lambda group: group[0].score) if self.first_stage is not None else {},
            chosen=chosen,
            at_edge=any_worked and chosen in (rates[0], rates[-1]),
        )


@read_once
def _values(path: Path) -> dict[str, float | None]:
    """Read the last value of each metric."""
    return {row.measurement.metric: row.measurement.value for row in read_results(path)}


def rounds(cells: Callable[[], Sequence[Cell]]) -> Iterator[list[Cell]]:
    """Yield the cells of searches, and once these were run those that they ask for, until there are no more.

    Args:
        cells: lists all that are known by now. One that was run and has no results is not yielded again.
    """
    tried: set[Path] = set()
    while new := [cell for cell in cells() if cell.folder not in tried]:
        yield new
        tried.update(cell.folder for cell in new)


def best_of_probe(trials: Mapping[float, Sequence[Trial]], budget: int) -> list[float]:
    """Order rates, the best first: most seeds solved, then fewest steps to 0.95, then the highest mean accuracy.

    Args:
        budget: steps that a seed counts as which never reached 0.95. One that failed has an accuracy of 0.
    """

    def key(rate: float) -> tuple[float, ...]:
        group = trials[rate]
        mean = fmean(trial.score or 0.0 for trial in group)
        return -num_solved(group), mean_steps(group, budget), -without_rounding(mean), rate

    return sorted(trials, key=key)


def best_of_training(trials: Mapping[float, Sequence[Trial]]) -> list[float]:
    """Order rates, the best first: the lowest mean nats; one with a failed seed is behind all others."""
    mean = {
        rate: fmean(trial.score if trial.score is not None else math.inf for trial in group)
        for rate, group in trials.items()
    }
    return sorted(trials, key=lambda rate: (mean[rate], rate))


def num_solved(trials: Sequence[Trial]) -> int:
    """Count the seeds that reached 0.95 and ended there."""
    return sum(trial.steps is not None and reaches(trial.score or 0.0, SOLVED) for trial in trials)


def mean_steps(trials: Sequence[Trial], budget: int) -> float:
    """Average the steps to 0.95, the budget where it was never reached."""
    return fmean(trial.steps if trial.steps is not None else budget for trial in trials)


def next_rate(rates: Sequence[float], *, above: bool) -> float:
    """Continue a grid of three or more rates by one, in its own steps: 1e-2, 3e-2, 1e-1 by 3e-1 or 3e-3."""
    outer, middle, inner = (rates[-1], rates[-2], rates[-3]) if above else (rates[0], rates[1], rates[2])
    # Half decades written as 1 and 3 have two ratios in turn: the next is the one before the last.
    return float(f"{outer * middle / inner:.2g}")


def _by_rate(trials: Mapping[float, Sequence[Trial]], of: Callable[[Sequence[Trial]], Any]) -> dict[str, Any]:
    return {f"{rate:g}": of(group) for rate, group in sorted(trials.items())}


def _mean(scores: Sequence[float | None]) -> float | None:
    reached = [score for score in scores if score is not None]
    return fmean(reached) if reached else None


def search_of_training(
    run: Run,
    evaluations: Sequence[EvaluationSettings],
    grid: Sequence[float],
    num_seeds: int = 1,
    corpus: str | None = None,
) -> Search:
    """Return the search of a language model: one epoch of one seed for all rates, then the best and its neighbours in
    full.

    Args:
        evaluations: of its checkpoints, where it is scored.
        num_seeds: of the second stage; where it is 1 all rates are tried in full.
        corpus: its name, where the plan has several.
    """
    name = on_corpus(f"training {run.mixer}", corpus)

    def cell(rate: float, seed: int, num_steps: int | None = None) -> Cell:
        settings, is_scored = run.settings, seed < SELECTION_SEED
        # A search is one of many trainings whose curve nobody looks at; its result stands in comparison.json.
        logger = settings.logger if is_scored else replace(settings.logger, mode="none")
        train = replace(settings.train, learning_rate=float(rate))
        wanted = list(evaluations) if is_scored else []
        length = replace(run, num_steps=num_steps or run.num_steps)
        at_rate = with_identity(length, replace(settings, train=train, seed=seed, evaluations=wanted, logger=logger))
        label = f"{name}, {trained_label(rate, seed)}{', one epoch' if num_steps else ''}"
        return Cell(label=label, jobs=language_model_jobs(at_rate), rate=train.learning_rate)

    def first_stage(rate: float) -> Cell:
        is_shorter = run.steps_per_epoch < run.num_steps
        return cell(rate, SELECTION_SEED, run.steps_per_epoch if is_shorter else None)

    return Search(
        name=name,
        variant=run.mixer,
        corpus=corpus,
        evaluation=TRAINING,
        settings={},
        grid=grid,
        num_seeds=num_seeds,
        metric="nats_per_character",
        prepared=TrainingJob(run),
        cell=lambda rate, seed, _: cell(rate, seed),
        first_stage=first_stage if num_seeds > 1 and len(grid) > 2 else None,
    )


def searches_of_probe(settings: RunSettings, evaluation: EvaluationSettings, num_seeds: int = 1) -> list[Search]:
    """The searches of a probe, one a task."""
    probe, jobs = prepare_probe(settings, evaluation)
    searches = [_search_of_task(job, probe.learning_rates, num_seeds) for job in jobs]
    for search, job in zip(searches, jobs, strict=True):
        source = probe.rate_source(job.task)
        if source is not None:
            search.source = next(other for other in searches if other.settings == source.settings)
    return searches


def _search_of_task(job: ProbeJob, grid: Sequence[float], num_seeds: int) -> Search:
    def cell(rate: float, seed: int, limit: int | None) -> Cell:
        at_rate = job.at(rate, seed, limit)
        return Cell(label=at_rate.label, jobs=(at_rate,), rate=rate)

    return Search(
        name=job.task_label,
        variant=job.settings.mixer.name,
        evaluation=job.evaluation,
        settings=job.task.settings,
        grid=grid,
        num_seeds=num_seeds,
        metric="selection",
        prepared=job,
        cell=cell,
    )
