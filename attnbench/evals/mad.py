from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import SizedProbe
from attnbench.evals.lib.mad_rules import MAD_RULES, MadRule, Memorise
from attnbench.evals.lib.scoring import accuracy, correct_labels, macro_accuracy
from attnbench.evals.lib.task_data import SPLITS, hashes_in_split, in_pieces
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.training.step import Batch

RECALLS = ("fuzzy_recall", "noisy_recall")
"""Tasks whose labels need a key to come twice."""

MEMORISE = "memorise"
"""Memorisation as published, of a vocabulary of any size."""


class Mad(SizedProbe):
    """Small models on four tasks after MAD.

    Its selective copying is eval.copy.selective, its in-context recall is recall at length 32. lib/mad_rules.py defines
    the sequences:

        noisy_recall   input  k3 v1 ~ k5 v2 k3 v1 ~ k5 v2     target  . . . . . v1 . . v2 .
        fuzzy_recall   input  k3 v1 v4 k1 k6 v2 k3 v1 v4      target  . . . . . . v1 v4 .
        compression    input  a c b <c> 2 0 1                 target  . . . . b a c
        memorisation   input  k7 _ k2 _                       target  . v3 . v9
        memorise       input  k7 _ k2 _                       target  . v3 . v9

    memorise is MAD's own task, [memorise, length, vocabulary size], in which each key has another value. Published are
    256 training sequences of length 32 and vocabularies of 256 to 8,192 symbols, and the score is `macro_accuracy`.

    MAD's noise replaces no symbol at a known rate a unit; its fuzzy keys may begin each other; its compression decodes
    one position's output with a perceptron, while here attention may look back.
    """

    cells: list = option(
        [["fuzzy_recall", 128], ["noisy_recall", 128], ["compression", 32], ["memorisation", 32]],
        "[task, positions], of compression the symbols to keep; a model for each; [memorise, positions, vocabulary]",
    )
    num_train: int = option(12800, "sequences, taken in a new order every epoch", minimum=1)
    num_test: int = option(1280, "test sequences", minimum=1)

    not_in_content = ("cells", "num_train")
    plots = (("accuracy", "rule"),)
    headline = (Headline("accuracy", "MAD", axes=("rule",), label=("rule",), pick="each", higher_is_better=True),)
    primary = Primary(metric="accuracy", kind="accuracy", margin=0.01)
    smoke = {
        **{"cells": [["noisy_recall", 56], ["memorisation", 8]]},
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 5, "batch_size": 8},
        **{"num_train": 64, "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more = {"cells": [["fuzzy_recall", 56], ["noisy_recall", 56], ["memorisation", 8]]}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("eval.mad.num_train", self.num_train, minimum=self.batch_size)
        # A list accepts unhashable items in `in`.
        names, cells = [*MAD_RULES], self.cells
        if not cells or any(not (isinstance(cell, list) and cell and _has_size(cell, names)) for cell in cells):
            raise UserError(
                f"eval.mad.cells={cells}: must be a list of [task, length], tasks of {', '.join(names)}, or of "
                f"[{MEMORISE}, length, vocabulary size]"
            )
        for name, length, *vocabulary in cells:
            # Nine pairs of six symbols fit, so that a key comes twice and there is a label.
            check_value(f"eval.mad.cells: {name}: length", length, kind=int, minimum=54 if name in RECALLS else 8)
            check_value(f"eval.mad.cells: {name}: vocabulary size", vocabulary, kind=list[int], minimum=5)
        if len({(name, *vocabulary) for name, _, *vocabulary in cells}) < len(cells):
            raise UserError(f"eval.mad.cells={cells}: each task may stand once")

    def tasks(self) -> Sequence["Mad"]:
        return [replace(self, cells=[cell]) for cell in self.cells]

    @property
    def settings(self) -> dict[str, Any]:
        name, _, *vocabulary = self.cells[0]
        return {"rule": name, **({"symbols": vocabulary[0]} if vocabulary else {})}

    def content(self) -> dict[str, Any]:
        rule, length, *_ = self.cells[0]
        return {**super().content(), "rule": rule, "length": length}

    @property
    def _rule(self) -> MadRule:
        name, _, *vocabulary = self.cells[0]
        return Memorise(*vocabulary) if vocabulary else MAD_RULES[name]

    @property
    def vocabulary_size(self) -> int:
        return self._rule.vocabulary_size(self.cells[0][1])

    @property
    def num_train_sequences(self) -> int:
        return self.num_train

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        rule, length = self._rule, self.cells[0][1]

        def make(index_B: Tensor) -> Batch:
            hash_B = hashes_in_split(
                split,
                hashed(0, seed, SPLITS[split], index_B),
                lambda hash_R, _: rule.batch(hash_R, seed, length).tokens_BT,
            )
            return rule.batch(hash_B, seed, length)

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        batch = self.sequences("test", seed, 0, self.num_test, device)
        assert batch.weight_BT is not None
        correct_BL, axes = correct_labels(model, batch), self.axes()
        yield accuracy(correct_BL[batch.weight_BT > 0], *axes[0])
        for macro in axes[1:]:
            yield macro_accuracy(correct_BL, batch, *macro)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        metrics = ["accuracy", "macro_accuracy"] if self.cells[0][0] == MEMORISE else ["accuracy"]
        settings = {**self.settings, "split": "test", "chance": 1 / self._rule.num_answers}
        return [(metric, settings) for metric in metrics]


def _has_size(cell: list[Any], names: list[str]) -> bool:
    return len(cell) == (3 if cell[0] == MEMORISE else 2) and cell[0] in [*names, MEMORISE]
