from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch

from attnbench.evals.base import SizedProbe
from attnbench.evals.lib.rows import without_number
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.numbers import reaches
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.training.step import Batch

HELD = 0.9
"""Scaled accuracy from which on a level is held."""


class LadderProbe(SizedProbe, ABC):
    """A probe that scores one model at several levels.

    Accuracy a at a level with chance c is scaled to (a - c) / (1 - c), and `doublings` is the sum over the levels. It
    is not clipped at 0, so that its mean is 0 for a model that guesses. A training makes all its steps, and its last
    model is scored: a stop on success would give every mixer another number of steps.
    """

    axis: ClassVar[str]
    """Setting with the level in the rows of accuracy."""
    level_option: ClassVar[str]
    """Option that lists the levels."""
    fixed_steps = True

    primary = Primary(metric="doublings", kind="level", margin=0.5, hardest=["levels"])

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        words = cls.name.replace("_", " ")
        column = Headline("doublings", f"{words} doublings", axes=("levels",), label=(), higher_is_better=True)
        cls.headline = (column, *cls.__dict__.get("headline", ()))

    @property
    def levels(self) -> Sequence[int]:
        return getattr(self, self.level_option)

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a constant answer, at every level."""

    @abstractmethod
    def test_sequences(self, seed: int, level: int, device: torch.device) -> Batch:
        """Make the test sequences of a level."""

    def correct(self, model: LanguageModel, seed: int, level: int, device: torch.device) -> torch.Tensor:
        return correct_labels(model, self.test_sequences(seed, level, device))

    def level_settings(self, level: int) -> dict[str, Any]:
        """Settings of a level's accuracy beside its axis."""
        return {}

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        scaled = {}
        for level, (metric, settings) in zip(self.levels, self.axes(), strict=False):
            row = accuracy(self.correct(model, seed, level, device), metric, settings)
            assert row.value is not None
            scaled[level] = (row.value - self.chance) / (1 - self.chance)
            yield row
        yield from self.summed(scaled, model)

    def summed(self, scaled: dict[int, float], model: LanguageModel) -> Iterator[Measurement]:
        """Yield the rows over all levels, from the scaled accuracy of each."""
        (doublings, settings), (largest, held_settings), *_ = self.axes()[len(self.levels) :]
        yield Measurement(metric=doublings, value=sum(scaled.values()), unit="", settings=settings)
        held = [level for level, value in scaled.items() if reaches(value, HELD)]
        if held:
            yield Measurement(metric=largest, value=max(held), unit="", settings=held_settings)
        else:
            reason = f"the scaled accuracy is below {HELD} at every level"
            yield without_number(largest, "", held_settings, "not_reached", reason)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        shared = {**self.settings, "split": "test"}
        of_levels = [
            ("accuracy", {**shared, self.axis: level, **self.level_settings(level), "chance": self.chance})
            for level in self.levels
        ]
        over_all = {**shared, "levels": len(self.levels)}
        return [*of_levels, ("doublings", {**over_all, "chance": 0.0}), ("largest_held", over_all)]

    def check_doubling(self) -> None:
        if any(after != 2 * before for before, after in pairwise(self.levels)):
            name = f"eval.{self.name}.{self.level_option}"
            raise UserError(f"{name}={list(self.levels)}: each must be twice the one before")
