"""Learning rates: a grid for each variant, searched on validation data with seeds that are never scored."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from attnbench.comparison.program import Failure, Program, Undecided, Unknown
from attnbench.evals.lib.solving import SOLVED
from attnbench.evals.runners.checkpoint import language_model_job
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.evals.runners.probe import ProbeJob, trained_label
from attnbench.results.corpora import on_corpus
from attnbench.results.job import Job
from attnbench.results.numbers import reaches, without_rounding
from attnbench.results.rows import TRAINING
from attnbench.settings.schema import SELECTION_SEED, ControlSettings, EvaluationSettings, RunSettings
from attnbench.training.job import Run
from attnbench.training.prepare import with_identity
from attnbench.verdict.claims import ControlScores, control_scores
from attnbench.verdict.rates import Choice, rate_sensitivity, rate_window

MAX_WIDENINGS = 2
"""Most rates that are added to a grid whose best is at the edge."""

RATES_IN_FULL = "the best with its neighbours"
"""Rates of a language model that are trained in full after one epoch of one seed, in the words of freeze.json; a file
without this entry is older: only the best two rates were trained in full."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Trial:
    """Outcome of one training of a search."""

    score: float | None
    """Accuracy or nats on validation data; None where it failed."""
    steps: float | None = None
    """To an accuracy of 0.95; None where it never got there."""


Trials = Mapping[float, Sequence[Trial]]
"""By rate."""


@dataclass(kw_only=True, eq=False)
class Score:
    """A language model of a variant, or one task of a probe, with the grid of the learning rate."""

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
    prepared: ProbeJob | Run
    """One of its trainings, whatever its rate."""
    at: Callable[[float, int, int | None], Job]
    """Return the training at a rate, a seed and (of a probe) the step at which it leaves the search, see `_limit`."""
    first_stage: Callable[[float], Job] | None = None
    """Return the short training that selects rates for whole trainings, see `_in_full`; None: all rates are trained in
    full."""
    corpus: str | None = None
    """The corpus, where the plan has several."""

    @property
    def metric(self) -> str:
        """The metric that rates are chosen by."""
        return "selection" if self.probe is not None else "nats_per_character"

    @property
    def probe(self) -> ProbeJob | None:
        return self.prepared if isinstance(self.prepared, ProbeJob) else None

    @property
    def chance(self) -> float:
        """Accuracy of a guess; 0 where no score names it."""
        axes = self.probe.task.axes() if self.probe is not None else []
        return next((settings["chance"] for _, settings in axes if "chance" in settings), 0.0)

    @property
    def search_seeds(self) -> list[int]:
        return [SELECTION_SEED + index for index in range(self.num_seeds)]

    def all_seeds(self, rate: float, limit: int | None = None) -> list[Job]:
        """The trainings of a rate on the search seeds."""
        return [self.at(rate, seed, limit) for seed in self.search_seeds]

    def order(self, trials: Trials) -> list[float]:
        """Order rates by their trainings, the best first."""
        if self.probe is None:
            return best_of_training(trials)
        primary = self.probe.primary
        if primary is not None and primary.kind == "level":
            # A ladder's steps are fixed: the accuracy at the end counts, however soon a rate came near it.
            trials = {rate: [replace(trial, steps=None) for trial in group] for rate, group in trials.items()}
        return best_of_probe(trials, self.probe.task.num_steps)


def search(score: Score) -> Program[Choice]:
    """Try the grid of a score, and choose the learning rate. Raises Undecided if a training has no results.

    A best rate at the edge widens the grid by one, at most MAX_WIDENINGS times.
    """
    rates = sorted(score.grid)
    if len(rates) == 1:
        return _choice(score, {rates[0]: []}, {}, rates[0])
    first = yield from _first(score, rates)
    # A grid of two rates is not widened.
    for _ in range(MAX_WIDENINGS if len(rates) > 2 else 0):
        best = score.order(first)[0]
        if best not in (rates[0], rates[-1]):
            break
        rates = sorted([*rates, next_rate(rates, above=best == rates[-1])])
        first = yield from _first(score, rates)
    trials = first if score.first_stage is None else (yield from _in_full(score, first))
    return _choice(score, first, trials, score.order(trials)[0])


def _first(score: Score, rates: Sequence[float]) -> Program[dict[float, list[Trial]]]:
    """Try every rate.

    A probe tries the middle of its grid first, then one rate on each side, and so on. Once a rate has solved all its
    seeds, later rates stop at twice that number of steps, unless they have reached 0.95.
    """
    if score.first_stage is not None:
        return (yield from _tried(score, {rate: [score.first_stage(rate)] for rate in rates}))
    middle, trials, limit = rates.index(sorted(score.grid)[(len(score.grid) - 1) // 2]), {}, None
    is_in_turn = score.probe is not None and len(score.grid) > 2
    distances = {rate: abs(index - middle) if is_in_turn else 0 for index, rate in enumerate(rates)}
    for distance in sorted(set(distances.values())):
        group = [rate for rate in rates if distances[rate] == distance]
        trials |= yield from _tried(score, {rate: score.all_seeds(rate, limit) for rate in group})
        limit = _limit(score, trials)
    return trials


def _limit(score: Score, trials: Trials) -> int | None:
    """Twice the steps of the slowest seed of the rate that solved all of them first; None: none did."""
    if score.probe is None or score.probe.task.fixed_steps:
        return None
    solved = [[trial.steps or 0 for trial in group] for group in trials.values() if num_solved(group) == len(group)]
    return round(2 * min(map(max, solved))) if solved else None


def _in_full(score: Score, first: Trials) -> Program[dict[float, list[Trial]]]:
    """Train the best rate of the first stage and its neighbours in full, on all search seeds, until all neighbours of
    the best rate are trained."""
    rates, best, full = sorted(first), score.order(first)[0], {}
    while True:
        index = rates.index(best)
        asked = sorted({*full, *rates[max(0, index - 1) : index + 2]})
        if asked == [*full]:
            return full
        full = yield from _tried(score, {rate: score.all_seeds(rate) for rate in asked})
        best = score.order(full)[0]


def _tried(score: Score, jobs: Mapping[float, Sequence[Job]]) -> Program[dict[float, list[Trial]]]:
    asked = [job for group in jobs.values() for job in group]
    answers = dict(zip(asked, (yield asked), strict=True))

    def trial(job: Job) -> Trial:
        answer = answers[job]
        if isinstance(answer, Failure | Unknown):
            raise Undecided(job)
        values = {row.measurement.metric: row.measurement.value for row in answer}
        return Trial(score=values.get(score.metric), steps=values.get("steps_to_95"))

    return {rate: list(map(trial, group)) for rate, group in jobs.items()}


def _choice(score: Score, first: Trials, trials: Trials, chosen: float) -> Choice:
    probe, rates = score.probe, sorted(first)
    any_worked = any(trial.score is not None for group in trials.values() for trial in group)
    budget = probe.task.num_steps if probe is not None else 0
    curve = {rate: _mean([trial.score for trial in group]) for rate, group in first.items()}
    given = {
        "variant": score.variant,
        "evaluation": on_corpus(score.evaluation, score.corpus),
        "settings": dict(score.settings),
        "grid": rates,
        "chosen": chosen,
        "at_edge": any_worked and chosen in (rates[0], rates[-1]),
        "scores": _by_rate(trials, lambda group: _mean([trial.score for trial in group])),
    }
    if not trials:
        return Choice(**given)
    return Choice(
        **given,
        rate_window=rate_window(curve, higher_is_better=probe is not None),
        rate_sensitivity=rate_sensitivity(curve, chosen, higher_is_better=probe is not None),
        seeds=_by_rate(trials, lambda group: [trial.score for trial in group]),
        solved=_by_rate(trials, num_solved) if probe is not None else {},
        steps=_by_rate(trials, lambda group: mean_steps(group, budget)) if probe is not None else {},
        after_an_epoch=_by_rate(first, lambda group: group[0].score) if score.first_stage is not None else {},
    )


@dataclass
class Found:
    """Results of the programs, by the names of their scores."""

    choices: dict[str, Choice] = field(default_factory=dict)
    scored: dict[str, list[Job]] = field(default_factory=dict)
    undecided: dict[str, Undecided] = field(default_factory=dict)
    controls: list[ControlScores] = field(default_factory=list)


def check_control(score: Score, control: ControlSettings, found: Found) -> Program[None]:
    """Search the rate of a positive control, and train it at that rate on search seeds."""
    try:
        choice = yield from search(score)
        jobs = [score.at(choice.chosen, SELECTION_SEED + index, None) for index in range(control.seeds)]
        trials = yield from _tried(score, {choice.chosen: jobs})
    except Undecided as reason:
        found.undecided[score.name] = reason
        return
    scores = [trial.score for trial in trials[choice.chosen]]
    found.controls.append(control_scores(control, score.name, choice.chosen, scores, score.chance))


def rate_and_scores(score: Score, seeds: Sequence[int], found: Found) -> Program[None]:
    """Search the rate of a score, and train the scored seeds at it."""
    try:
        choice = yield from search(score)
    except Undecided as reason:
        found.undecided[score.name] = reason
        return
    found.choices[score.name] = choice
    found.scored[score.name] = [score.at(choice.chosen, seed, None) for seed in seeds]
    yield found.scored[score.name]


def best_of_probe(trials: Mapping[float, Sequence[Trial]], budget: int) -> list[float]:
    """Order rates, the best first: most seeds solved, then fewest steps to 0.95 (`budget` for a seed that never reached
    it), then the highest mean accuracy, 0 for a failed seed."""

    def key(rate: float) -> tuple[float, ...]:
        group = trials[rate]
        mean = fmean(trial.score or 0.0 for trial in group)
        return -num_solved(group), mean_steps(group, budget), -without_rounding(mean), rate

    return sorted(trials, key=key)


def best_of_training(trials: Mapping[float, Sequence[Trial]]) -> list[float]:
    """Order rates by mean nats, the lowest first; a rate with a failed seed comes last."""
    mean = {
        rate: fmean(trial.score if trial.score is not None else math.inf for trial in group)
        for rate, group in trials.items()
    }
    return sorted(trials, key=lambda rate: (mean[rate], rate))


def num_solved(trials: Sequence[Trial]) -> int:
    """Count the seeds that reached 0.95 and ended above it."""
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


def score_of_training(
    run: Run,
    evaluations: Sequence[EvaluationSettings],
    grid: Sequence[float],
    num_seeds: int = 1,
    corpus: str | None = None,
) -> Score:
    """Return the score of a language model.

    Args:
        evaluations: of the checkpoints of scored trainings.
        num_seeds: search seeds; with 1 all rates are trained in full.
        corpus: its name, if the plan has several.
    """
    name = on_corpus(f"training {run.mixer}", corpus)

    @cache
    def at(rate: float, seed: int, num_steps: int | None) -> Job:
        settings, is_scored = run.settings, seed < SELECTION_SEED
        # The many curves of a search are not logged; its result stands in comparison.json.
        logger = settings.logger if is_scored else replace(settings.logger, mode="none")
        train = replace(settings.train, learning_rate=float(rate))
        wanted = list(evaluations) if is_scored else []
        length = replace(run, num_steps=num_steps or run.num_steps)
        at_rate = with_identity(length, replace(settings, train=train, seed=seed, evaluations=wanted, logger=logger))
        job = language_model_job(at_rate)
        job.label, job.task_label = f"{name}, {trained_label(rate, seed)}{', one epoch' if num_steps else ''}", name
        return job

    prepared = replace(run)
    # Counted as the trainings that it stands for.
    prepared.label = prepared.task_label = name

    def first_stage(rate: float) -> Job:
        is_shorter = run.steps_per_epoch < run.num_steps
        return at(rate, SELECTION_SEED, run.steps_per_epoch if is_shorter else None)

    return Score(
        name=name,
        variant=run.mixer,
        corpus=corpus,
        evaluation=TRAINING,
        settings={},
        grid=grid,
        num_seeds=num_seeds,
        prepared=prepared,
        at=lambda rate, seed, limit: at(rate, seed, None),
        first_stage=first_stage if num_seeds > 1 and len(grid) > 2 else None,
    )


def scores_of_probe(settings: RunSettings, evaluation: EvaluationSettings, num_seeds: int = 1) -> list[Score]:
    """One score a task."""
    probe, jobs = prepare_probe(settings, evaluation)
    return [
        Score(
            name=job.task_label,
            variant=job.settings.mixer.name,
            evaluation=job.evaluation,
            settings=job.task.settings,
            grid=probe.learning_rates,
            num_seeds=num_seeds,
            prepared=job,
            at=cache(job.at),
        )
        for job in jobs
    ]
