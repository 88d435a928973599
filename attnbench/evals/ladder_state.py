from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnbench.evals.base import NUM_SELECTION
from attnbench.evals.lib.ladder import LadderProbe
from attnbench.evals.lib.state_rules import RULES
from attnbench.evals.state_tracking import StateTracking
from attnbench.model.language_model import LanguageModel
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.training.step import Batch

GROUPS = ("parity", "s3", "s4", "a5", "s5")
"""Rules whose states are all equally likely at every step."""


class LadderState(LadderProbe):
    """Small models that follow a product of permutations, a model for each group.

    Parity is the group of two points (Z2), S3 that of three, A5 the even permutations of five:

        parity   input   0 1 1 0 1       target  0 1 0 0 1
        s3, a5   input   x1 x2 x3        target  x1 x2∘x1 x3∘x2∘x1

    Labels stand at every step; a level is scored over the last quarter of its strings, which a model without a state
    cannot answer from the beginning. The doublings of a variant are their sum over the groups.
    """

    rules: list = option(["parity", "s3", "a5"], f"a model each: {' | '.join(GROUPS)}")
    min_length: int = option(3, "steps of the shortest training strings", minimum=1)
    max_length: int = option(32, "and of the longest", minimum=4)
    multiples: list[int] = option(
        [1, 4], "levels of each rule: test lengths, in multiples of max_length", distinct=True, rising=True, minimum=1
    )
    width, head_width, feed_forward_width, num_layers = 64, 32, 0, 1
    num_steps, batch_size, num_test = 2000, 64, 500

    axis, level_option = "training_lengths", "multiples"
    plots = (("accuracy", "training_lengths"),)
    smoke = {
        **{"rules": ["parity"], "width": 16, "head_width": 8, "max_length": 8, "multiples": [1, 2]},
        **{"num_steps": 10, "batch_size": 8, "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more = {"rules": ["parity", "s3"]}

    def __post_init__(self) -> None:
        super().__post_init__()
        group = f"eval.{self.name}"
        check_value(f"{group}.rules", self.rules, kind=list[str], distinct=True, choices=GROUPS)
        most = self.min_length + NUM_SELECTION - 1
        check_value(f"{group}.max_length", self.max_length, minimum=self.min_length, maximum=most)

    def tasks(self) -> Sequence["LadderState"]:
        return [replace(self, rules=[rule]) for rule in self.rules]

    @property
    def settings(self) -> dict[str, Any]:
        return {"rule": self.rules[0]}

    @property
    def vocabulary_size(self) -> int:
        return RULES[self.rules[0]].num_symbols

    @property
    def chance(self) -> float:
        return RULES[self.rules[0]].chance

    def level_settings(self, level: int) -> dict[str, Any]:
        return {"length": level * self.max_length, "positions": "last_quarter"}

    @property
    def _strings(self) -> StateTracking:
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("min_length", "max_length", "num_test")}
        return StateTracking(rules=self.rules, **sizes)

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return self._strings.sequences(split, seed, start, count, device)

    def test_sequences(self, seed: int, level: int, device: torch.device) -> Batch:
        return self._strings.test_sequences(seed, level * self.max_length, device)

    def correct(self, model: LanguageModel, seed: int, level: int, device: torch.device) -> torch.Tensor:
        return super().correct(model, seed, level, device)[:, level * self.max_length * 3 // 4 :]
