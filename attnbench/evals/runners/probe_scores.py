"""Rows of a probe's training: validation score, steps to the threshold, test scores."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from attnbench.evals.lib.rows import without_number
from attnbench.evals.lib.solving import RISE, SOLVED, rise_share
from attnbench.machine.precision import computing
from attnbench.results.numbers import reaches
from attnbench.results.rows import Measurement
from attnbench.settings.schema import SELECTION_SEED
from attnbench.training.checkpoint import TrainState
from attnbench.training.log import read_metrics

if TYPE_CHECKING:
    from attnbench.evals.runners.probe import ProbeJob

VALIDATION = {"split": "validation"}
RISE_SETTINGS = {**VALIDATION, "budget": 1.0}
"""Settings of `rise_share`: where accuracy never rose, it took all steps."""
SHARE = {"split": "test", "chance": 0.0}
"""Settings of `solved`: a seed that diverged has not."""


class ProbeScores:
    def __init__(self, job: "ProbeJob") -> None:
        self.job, self.task, self.primary = job, job.task, job.primary
        # Search seeds have no scores of test data.
        self._is_scored = job.settings.seed < SELECTION_SEED
        # A ladder counts levels.
        self._tells_solved = self.primary is None or self.primary.kind != "level"
        self._budgets: list[tuple[str, str, int, dict[str, Any]]] = [
            (metric, unit, per_step, {**VALIDATION, "budget": per_step * self.task.num_steps})
            for metric, unit, per_step in (
                ("steps_to_95", "step", 1),
                ("samples_to_95", "sequence", self.task.batch_size),
            )
        ]
        """Metric, unit, its number a step, and settings of what the threshold took."""

    def measured(self, state: TrainState, selection: float) -> Iterator[Measurement]:
        """`selection` is the accuracy on validation data."""
        yield Measurement(metric="selection", value=selection, unit="", settings=VALIDATION)
        yield Measurement(metric="steps_trained", value=state.step, unit="step")
        yield from self._times(state)
        if self.task.check_interval_steps is not None:
            yield self._rise()
        if not self._is_scored:
            return
        scores = []
        with torch.no_grad(), computing(self.job.precision, self.job.device):
            for score in self.task.score(state.model, self.job.settings.seed, self.job.device):
                scores.append(score)
                yield score
        if self._tells_solved:
            yield self._solved(state, scores)

    def missing(self, status: str, reason: str) -> Iterator[Measurement]:
        rows = [("selection", "", VALIDATION)]
        rows += [(metric, unit, settings) for metric, unit, _, settings in self._budgets]
        if self.task.check_interval_steps is not None:
            rows.append(("rise_share", "", RISE_SETTINGS))
        if self._is_scored:
            rows += [(metric, "", settings) for metric, settings in self.task.axes()]
            rows += [("solved", "", SHARE)] if self._tells_solved else []
        for metric, unit, settings in rows:
            yield without_number(metric, unit, settings, status, reason)

    def _solved(self, state: TrainState, scores: list[Measurement]) -> Measurement:
        """1 if the threshold was reached, also by the primary score of test data at its hardest; else 0."""
        primary = self.primary
        taken = [score for score in scores if primary is not None and primary.takes(score.metric, score.settings)]
        if primary is None or not taken:
            return without_number("solved", "", SHARE, "unsupported", "no score of test data is the primary metric")
        value = max(taken, key=lambda score: primary.hardness(score.settings)).value
        is_solved = state.reached_step is not None and value is not None and reaches(value, SOLVED)
        return Measurement(metric="solved", value=int(is_solved), unit="", settings=SHARE)

    def _times(self, state: TrainState) -> Iterator[Measurement]:
        reason = f"selection was not {SOLVED} at two checks in a row in {state.step} steps"
        if self.job.limit is not None:
            reason += f"; at {self.job.limit} another rate had solved all its seeds in half as many"
        for metric, unit, per_step, settings in self._budgets:
            if state.reached_step is None:
                yield without_number(metric, unit, settings, "not_reached", reason)
            else:
                yield Measurement(metric=metric, value=state.reached_step * per_step, unit=unit, settings=settings)

    def _rise(self) -> Measurement:
        log = read_metrics(self.job.folder / "metrics.jsonl")
        value = rise_share((row["step"], row["selection"]) for row in log if "selection" in row)
        if value is None:
            reason = f"selection was not {RISE[1]} at any check"
            return without_number("rise_share", "", RISE_SETTINGS, "not_reached", reason)
        return Measurement(metric="rise_share", value=value, unit="", settings=RISE_SETTINGS)
