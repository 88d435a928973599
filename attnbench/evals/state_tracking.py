"""State tracking: models keep a state that every symbol changes, on strings longer than trained on."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.state_rules import RULES
from attnbench.evals.lib.strings import StringProbe
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.training.step import Batch

SHARED_BITS = 10
"""Lengths with fewer than 2^10 strings may have one in several splits: there are too few of them."""

STRING = 1
"""Purpose of a hash, as its first counter."""


class StateTracking(StringProbe):
    """Small models that keep a state which every symbol changes.

    The state is to be told after each step of a string:

        parity                   input   0 1 1 0 1            target  0 1 0 0 1
        mod_arithmetic           input   3 + 4 * 2 - 1        target  3 . 2 . 1 . 0
        mod_arithmetic_brackets  input   ( 3 * ( 4 + 2 ) )    target  . . . . . . . 1 3
        s3, a5, s5               input   x1 x2 x3             target  x1 x2∘x1 x3∘x2∘x1
        s5_swaps                 the same with inputs that move two of the five points, or none

    Arithmetic is modulo 5. A string's length counts its labels. Steps are uniform and independent. Grazzi et al. (arXiv
    2411.12537) and Delétang et al. (2207.02098) ask for the answer behind the end of a string alone, Liu et al.
    (2210.10749) at each position, as here.
    """

    rules: list = option(
        ["parity"], "a model each: parity | mod_arithmetic | mod_arithmetic_brackets | s3 | a5 | s5 | s5_swaps"
    )
    length_buckets: bool = option(
        False, "true: the strings of a step are of about one length, so that little is padded; changes the result"
    )
    min_length: int = option(
        3, "labels of the shortest training strings: bits, permutations, numbers, pairs of brackets", minimum=1
    )
    # The last quarter of a shorter string would be empty.
    max_length: int = option(40, "and of the longest", minimum=4)
    multiples: list[int] = option([1, 2, 4, 8], "test lengths, in multiples of max_length", distinct=True, minimum=1)
    width, num_layers, feed_forward_width, num_steps = 32, 1, 0, 700

    plots = (("accuracy", "length"),)
    headline = (
        Headline(
            "accuracy",
            "state tracking",
            settings={"positions": "last_quarter", "training_lengths": 2},
            axes=("length",),
            label=("rule", "length"),
            pick="each",
            higher_is_better=True,
        ),
    )
    primary = Primary(
        metric="accuracy",
        kind="accuracy",
        margin=0.01,
        settings={"positions": "last_quarter", "training_lengths": 2},
        hardest=["length"],
    )
    smoke = {
        **{"rules": ["parity"], "width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 10},
        **{"batch_size": 8, "max_length": 8, "multiples": [1, 2], "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more = {"rules": ["parity", "s3"]}

    def __post_init__(self) -> None:
        super().__post_init__()
        # A list accepts unhashable items in `in`.
        known, rules = [*RULES], self.rules
        if not rules or any(rule not in known or rules.count(rule) > 1 for rule in rules):
            raise UserError(
                f"eval.state_tracking.rules={rules}: must be one or several of {', '.join(RULES)}, each once"
            )

    def tasks(self) -> Sequence["StateTracking"]:
        return [replace(self, rules=[rule]) for rule in self.rules]

    @property
    def settings(self) -> dict[str, Any]:
        return {"rule": self.rules[0]}

    def content(self) -> dict[str, Any]:
        content = {**super().content(), **self.settings}
        return {name: value for name, value in content.items() if name != "rules"}

    @property
    def vocabulary_size(self) -> int:
        return RULES[self.rules[0]].num_symbols

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        correct_BL = torch.empty(0)
        for metric, settings in self.axes():
            if settings["positions"] == "all":
                correct_BL = correct_labels(model, self.test_sequences(seed, settings["length"], device))
            first = 0 if settings["positions"] == "all" else correct_BL.shape[1] * 3 // 4
            yield accuracy(correct_BL[:, first:], metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        shared = {"split": "test", "chance": RULES[self.rules[0]].chance}
        return [
            (
                "accuracy",
                {
                    **self.settings,
                    **{"length": n * self.max_length, "training_lengths": n, **shared, "positions": positions},
                },
            )
            for n in self.multiples
            for positions in ("all", "last_quarter")
        ]

    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        rule = RULES[self.rules[0]]
        hash_B = hashes_in_split(
            split,
            hashed(0, seed, SPLITS[split], index_B, STRING, length_B),
            lambda hash_R, row_R: rule.tokens(hashed(hash_R, STRING), length_B[row_R], longest),
            exempt_B=length_B * math.log2(rule.num_inputs) < SHARED_BITS,
        )
        tokens_BT, states_BL, positions_BL = rule.strings(hashed(hash_B, STRING), length_B, longest)
        is_label_BL = torch.arange(longest, device=hash_B.device) < length_B[:, None]
        # Symbol 0 fills the end, which no earlier position can see.
        tokens_BT = tokens_BT.where(tokens_BT != ABSENT, 0)
        return Batch(tokens_BT, states_BL.where(is_label_BL, 0), is_label_BL.float(), positions_BL)
