"""State tracking: models keep a state that every symbol changes, on strings longer than trained on."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.scoring import accuracy, correct_labels, is_label
from attnbench.evals.lib.state_rules import RULES, Rule, labelled
from attnbench.evals.lib.strings import StringProbe
from attnbench.evals.lib.task_data import SPLITS, hashes_in_split
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

AXES: dict[str, Any] = {"axes": ("length",), "label": ("rule", "length")}
LATE = {"positions": "last_quarter", "training_lengths": 2}
"""Settings of the scores that variants are compared by."""


class StateTracking(StringProbe):
    """Small models that keep a state which every symbol changes.

    The state is to be told after each step of a string:

        parity                   input   0 1 1 0 1            target  0 1 0 0 1
        mod_arithmetic           input   3 + 4 * 2 - 1        target  3 . 2 . 1 . 0
        mod_arithmetic_brackets  input   ( 3 * ( 4 + 2 ) )    target  . . . . . . . 1 3
        s3, a5, s5               input   x1 x2 x3             target  x1 x2∘x1 x3∘x2∘x1
        s5_swaps                 the same with inputs that move two of the five points, or none

    Arithmetic is modulo 5. A string's length counts its steps: bits, permutations, numbers, pairs of brackets. Steps
    are uniform and independent. Liu et al. (arXiv 2210.10749) label each step. Grazzi et al. (2411.12537) and Delétang
    et al. (2207.02098) label the last one alone, as `labels=answer` does; arithmetic then ends with an equals sign:

        parity                   input   0 1 1 0 1            target  . . . . 1
        mod_arithmetic           input   3 + 4 * 2 - 1 =      target  . . . . . . . 0
    """

    rules: list = option(
        ["parity"], "a model each: parity | mod_arithmetic | mod_arithmetic_brackets | s3 | s4 | a5 | s5 | s5_swaps"
    )
    labels: str = option("all", "steps with a label: all | answer, the last alone", choices=("all", "answer"))
    length_buckets: bool = option(
        False, "true: the strings of a step are of about one length, so that little is padded; changes the result"
    )
    min_length: int = option(
        3, "steps of the shortest training strings: bits, permutations, numbers, pairs of brackets", minimum=1
    )
    # The last quarter of a shorter string would be empty.
    max_length: int = option(40, "and of the longest", minimum=4)
    multiples: list[int] = option([1, 2, 4, 8], "test lengths, in multiples of max_length", distinct=True, minimum=1)
    test_range: list[int] | None = option(
        None, "[shortest, longest] of one more test set, whose lengths are uniform; null: none", minimum=1
    )
    whole_strings: bool = option(False, "true: also the share of test strings of which every label is right")
    special_symbols: int = option(
        0, "symbols of the vocabulary that are no step; the first of them begins every string", minimum=0
    )
    width, num_layers, feed_forward_width, num_steps = 32, 1, 0, 700

    not_in_content = ("num_train", "rules")
    former = {"labels": "all", "test_range": None, "whole_strings": False, "special_symbols": 0}
    plots = (("accuracy", "length"),)
    headline = (Headline("accuracy", "state tracking", settings=LATE, pick="each", higher_is_better=True, **AXES),)
    primary = Primary(metric="accuracy", kind="accuracy", margin=0.01, settings=LATE, hardest=["length"])
    smoke = {
        **{"rules": ["parity"], "width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 10},
        **{"batch_size": 8, "max_length": 8, "multiples": [1, 2], "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more = {"rules": ["parity", "s3"]}

    def __post_init__(self) -> None:
        super().__post_init__()
        # A list accepts unhashable items in `in`.
        known, rules, ends = [*RULES], self.rules, self.test_range
        if not rules or any(rule not in known or rules.count(rule) > 1 for rule in rules):
            raise UserError(f"eval.state_tracking.rules={rules}: must be some of {', '.join(RULES)}, each once")
        if ends is not None and (len(ends) != 2 or ends[0] > ends[1]):
            raise UserError(f"eval.state_tracking.test_range={ends}: must be [shortest, longest], or null")

    def tasks(self) -> Sequence["StateTracking"]:
        return [replace(self, rules=[rule]) for rule in self.rules]

    @property
    def _rule(self) -> Rule:
        return RULES[self.rules[0]]

    @property
    def settings(self) -> dict[str, Any]:
        return {"rule": self.rules[0]}

    def content(self) -> dict[str, Any]:
        return {**super().content(), **self.settings}

    @property
    def vocabulary_size(self) -> int:
        takes_equals = self.labels == "answer" and self._rule.takes_equals
        return self._rule.num_symbols + takes_equals + self.special_symbols

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        for lengths, rows in groupby(self.axes(), lambda row: row[1].get("length", self.test_range)):
            batch = self.test_sequences(seed, lengths, device)
            correct_BL, is_label_BL = correct_labels(model, batch), is_label(batch)
            is_late_BL = is_label_BL & (is_label_BL.cumsum(1) > is_label_BL.sum(1, keepdim=True) * 3 // 4)
            parts = {"all": correct_BL[is_label_BL], "last_quarter": correct_BL[is_late_BL]}
            whole_B = (correct_BL == is_label_BL).all(1)
            for metric, settings in rows:
                yield accuracy(
                    whole_B if metric == "string_accuracy" else parts[settings["positions"]], metric, settings
                )

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        # The last quarter of one label is that label.
        parts = ("all", "last_quarter") if self.labels == "all" else ("last_quarter",)
        tests: list[dict[str, Any]] = [{"length": n * self.max_length, "training_lengths": n} for n in self.multiples]
        if self.test_range is not None:
            tests.append({"lengths": "-".join(map(str, self.test_range))})
        chance, found = self._rule.chance, []
        for test in tests:
            shared = {**self.settings, **test, "split": "test"}
            found += [("accuracy", {**shared, "chance": chance, "positions": part}) for part in parts]
            if self.whole_strings:
                found.append(("string_accuracy", shared))
        return found

    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        rule = self._rule
        hash_B = hashes_in_split(
            split,
            hashed(0, seed, SPLITS[split], index_B, STRING, length_B),
            lambda hash_R, row_R: rule.tokens(hashed(hash_R, STRING), length_B[row_R], longest),
            exempt_B=length_B * math.log2(rule.num_inputs) < SHARED_BITS,
        )
        strings = rule.strings(hashed(hash_B, STRING), length_B, longest)
        first = self.vocabulary_size - self.special_symbols if self.special_symbols else None
        return labelled(rule, strings, length_B, answer_alone=self.labels == "answer", first=first)
