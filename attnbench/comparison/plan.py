"""A plan as cells: every variant × evaluation × seed, and the searches for their learning rates."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from attnbench.comparison.cells import ByKind, Cell, by_kind, system_cell, task_name
from attnbench.comparison.coinciding import Shared, shared_cells
from attnbench.comparison.search import (
    Choice,
    probe_cells,
    probe_choice,
    probe_searches,
    training_cells,
    training_choice,
    training_searches,
)
from attnbench.evals.runners.prepare_probe import build_tasks
from attnbench.results.rows import TRAINING
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ComparisonSettings, EvaluationSettings, RunSettings, setting_of
from attnbench.training.prepare import Run, corpus_label, prepare
from attnbench.verdict.seeds import same_models

log = logging.getLogger(__name__)

Compose = Callable[[Sequence[str]], RunSettings]
"""From the words of a train.py command line to its settings."""


class Comparison:
    """One plan, on this machine.

    Args:
        compose: turns overrides into settings; raises UserError for what this machine cannot do.

    Raises:
        UserError: no variant can be run.
    """

    def __init__(self, settings: ComparisonSettings, compose: Compose) -> None:
        self.settings, self.plan = settings, settings.plan
        self.folder = Path(settings.outputs_dir) / self.plan.name
        # How long it took is never read off a clock that can be set.
        self.started, self.mark = datetime.now(UTC), time.monotonic()
        self.failures: dict[str, str] = {}
        self.choices: list[Choice] = []
        self.undecided: list[str] = []
        """Scored cells that wait for a search, in words."""
        self.variants: dict[str, tuple[Run, ByKind]] = {}
        errors = {}
        for name, words in self.plan.variants.items():
            try:
                settings_of_variant = self._settings(name, words, compose)
                self.variants[name] = prepare(settings_of_variant), by_kind(settings_of_variant)
            except UserError as error:
                errors[name] = str(error)
        if not self.variants:
            raise UserError("; ".join(dict.fromkeys(errors.values())))
        corpora = {name: corpus_label(prepared.corpus) for name, (prepared, _) in self.variants.items()}
        if len(set(corpora.values())) > 1:
            named = ", ".join(f"{name} reads {corpus}" for name, corpus in corpora.items())
            raise UserError(f"plan.variants: scores on different corpora compare nothing; {named}")
        self.shared = shared_cells(self.variants)
        for line in same_models(self.shared):
            log.info(f"{line}: run once")
        # What cannot run here is recorded, and the others are compared.
        for name, reason in errors.items():
            self.fail(name, reason)

    def _with_cells(self, prepared: Run, evaluations: Sequence[EvaluationSettings]) -> list[EvaluationSettings]:
        """Those in which the variant has cells of its own."""
        return [own for own in evaluations if prepared.mixer not in self.shared.get(own.name, {})]

    def _trains(self, prepared: Run, kinds: ByKind) -> bool:
        return bool(kinds.of_checkpoints) and prepared.mixer not in self.shared.get(TRAINING, {})

    def shared_by_evaluation(self) -> Shared:
        """`shared` by the evaluations that rows name: those of a model's checkpoints are shared as its training is."""
        of_checkpoints = [own.name for _, kinds in self.variants.values() for own in kinds.of_checkpoints]
        return self.shared | {name: self.shared[TRAINING] for name in of_checkpoints if TRAINING in self.shared}

    def _settings(self, name: str, words: Sequence[str], compose: Compose) -> RunSettings:
        words = [f"device={self.settings.device}", *self.plan.overrides, *words]
        # An evaluation that does not exist is said to be none, before an option of one that is not asked for.
        unasked = [word for word in words if self._is_of_unasked_evaluation(word)]
        evaluations = f"eval=[{','.join(self.plan.evaluations)}]"
        composed = compose([evaluations, *(word for word in words if word not in unasked)])
        for evaluation in self.plan.evaluations:
            if evaluation not in [own.name for own in composed.evaluations]:
                raise UserError(f"plan.evaluations: {evaluation} is a list of evaluations; name each of them")
        if unasked:
            raise UserError(
                f"{unasked[0]} is of none of plan.evaluations={self.plan.evaluations}; to run some of a plan's "
                "evaluations, plan.only=[NAME]"
            )
        return replace(
            composed,
            mixer=replace(composed.mixer, name=name),
            experiment=self.plan.name,
            outputs_dir=self.settings.outputs_dir,
            logger=replace(self.settings.logger, name=None),
            rerun=self.settings.rerun,
        )

    def _is_of_unasked_evaluation(self, word: str) -> bool:
        group, *options = setting_of(word).split(".")
        return group == "eval" and options[0] not in self.plan.evaluations

    def wanted(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that are run: of the evaluations that `plan.only` names, or of all."""
        return [cell for cell in cells if self._is_wanted(cell.group)]

    def _is_wanted(self, group: str) -> bool:
        """A training is of every evaluation that reads its model."""
        read = {own.name for _, kinds in self.variants.values() for own in kinds.of_checkpoints}
        names = read if group == TRAINING else {group}
        return not names.isdisjoint(self.plan.only or self.plan.evaluations)

    def searches(self) -> list[Cell]:
        """The trainings that learning rates are chosen by."""
        cells = []
        for prepared, kinds in self.variants.values():
            for evaluation in self._with_cells(prepared, kinds.probes):
                cells += probe_searches(prepared.settings, evaluation)
            if self._trains(prepared, kinds):
                cells += training_searches(prepared, self.plan.learning_rates)
        return self._in_order(cells)

    def scored(self) -> list[Cell]:
        """The trainings that are scored, at the rates that the finished searches give.

        Where a search has no results its cells are `undecided`, and failed if they were to run.
        """
        cells, self.choices, self.undecided = [], [], []
        for prepared, kinds in self.variants.values():
            settings = prepared.settings
            for evaluation in self._with_cells(prepared, kinds.probes):
                for index in range(len(build_tasks(settings, evaluation)[1])):
                    name = task_name(settings, evaluation, index)
                    choose = partial(probe_choice, settings, evaluation, index)
                    choice = self._choice(name, evaluation.name, len(self.plan.probe_seeds), choose)
                    if choice is not None:
                        cells += probe_cells(settings, evaluation, index, choice.chosen, self.plan.probe_seeds)
            if self._trains(prepared, kinds):
                grid = self.plan.learning_rates
                choose = partial(training_choice, prepared, grid)
                choice = self._choice(f"training {prepared.mixer}", TRAINING, len(self.plan.seeds), choose)
                if choice is not None:
                    cells += training_cells(prepared, kinds.of_checkpoints, choice.chosen, self.plan.seeds)
        return self._in_order(cells)

    def timed(self) -> list[Cell]:
        """What runs alone."""
        cells = [
            system_cell(prepared, evaluation)
            for prepared, kinds in self.variants.values()
            for evaluation in self._with_cells(prepared, kinds.system)
        ]
        return self._in_order(cells)

    def num_scored(self) -> Counter[str]:
        """How many cells `scored` will give to run, by evaluation."""
        numbers: Counter[str] = Counter()
        for prepared, kinds in self.variants.values():
            for evaluation in self._with_cells(prepared, kinds.probes):
                num_tasks = len(build_tasks(prepared.settings, evaluation)[1])
                numbers[evaluation.name] += num_tasks * len(self.plan.probe_seeds)
            if self._trains(prepared, kinds):
                numbers[TRAINING] += len(self.plan.seeds)
        return Counter({group: number for group, number in numbers.items() if self._is_wanted(group)})

    def _choice(self, name: str, group: str, num_scored: int, choose: Callable[[], Choice]) -> Choice | None:
        """What was chosen; None where a search has no results."""
        try:
            chosen = choose()
        except UserError as error:
            self.undecided.append(f"{name}, {num_scored} scored")
            if self._is_wanted(group):
                self.fail(name, str(error))
            return None
        self.choices.append(chosen)
        return chosen

    def _in_order(self, cells: list[Cell]) -> list[Cell]:
        """Evaluation by evaluation, as the plan lists them."""
        names = self.plan.evaluations
        of_checkpoints = [own.name for _, kinds in self.variants.values() for own in kinds.of_checkpoints]
        place = {name: index for index, name in enumerate(names)}
        place[TRAINING] = min((place[name] for name in of_checkpoints), default=0)
        return sorted(cells, key=lambda cell: place[cell.group])

    def fail(self, cell: str, reason: str) -> None:
        """Records what could not be run; the rest goes on."""
        self.failures[cell] = reason
        log.error(f"failed: {cell}: {reason}")
