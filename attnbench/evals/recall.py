"""Multi-query associative recall: small models that look up, later on, pairs they have read (arXiv 2312.04927)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import Probe, Task
from attnbench.evals.lib.options import check_training, mixer_wishes, probe_deviation
from attnbench.evals.lib.recall_sizes import DRAWN, PRESETS, Sizes, budget, check_sizes
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.task_data import (
    SPLITS,
    choose,
    choose_by_power,
    hashes_in_split,
    in_pieces,
    integers_below,
    shuffled,
)
from attnbench.mixers.around import Gate
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch

BLANK = 0

NEARNESS = 0.99
"""p(slot) ∝ slot^-0.99: what follows the pairs soon is asked for most, as words recur in text."""

KEYS, VALUES, SLOTS, QUERIES, FILLER = range(5)
"""Purposes of a hash, as its first counter."""


@dataclass(slots=True, kw_only=True)
class RecallTask(Task):
    """Pairs of key and value, then some of the keys again, to be answered with their values; 3 pairs, length 14:

        input   k3 v3 k1 v1 k7 v7 .  .  k1 .  k7 .  k3 .
        target  .  .  .  .  .  .  .  .  v1 .  v7 .  v3 .

    Symbol 0 is the blank, the rest of the lower half of the vocabulary are keys, the upper half values. Keys of a
    sequence are different, and so are its values: who only knows which values are there is right once in `pairs`.
    Each key is asked for once, in random order. What follows the pairs is cut into slots of two positions, of which a
    query takes the first; slots count from 1 and are drawn without replacement with p(slot) ∝ slot^(a - 1), a = 0.01.
    All other positions hold blanks, or random values, which may be those of pairs: the answers are never shown.

    With the query order `drawn`, that of Arora et al., the first pair has the slot that is drawn first, and so on: the
    earlier a pair stands, the sooner, as a rule, it is asked for.

    Sequence i of every split has pair count i of `pairs`, round and round, and test_sequences have one count only; a
    sequence of a given count is a function of (split, seed, index).
    """

    length: int
    """Positions of a sequence."""
    pairs: list[int]
    """Different numbers of pairs, which one model is trained on."""
    num_test: int
    """Test sequences for each number of pairs."""
    random_filler: bool
    query_order: str | None = None
    """None: random."""

    @property
    def num_values(self) -> int:
        return self.vocabulary_size - self.vocabulary_size // 2

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """See Task; L is the largest number of pairs."""
        pairs_N = torch.tensor(self.pairs, device=device)

        def make(index_B: Tensor) -> Batch:
            return self._batch(split, seed, index_B, pairs_N[index_B % len(self.pairs)], max(self.pairs))

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Accuracy for each number of pairs."""
        for pairs, (metric, settings) in zip(self.pairs, self.axes(), strict=True):
            correct_BL = correct_labels(model, self.test_sequences(seed, pairs, device))
            yield accuracy(correct_BL, metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """See Task."""
        chance = {"split": "test", "chance": 1 / self.num_values}
        return [
            ("accuracy", {**self.settings, "num_pairs": pairs, **chance, "chance_among_pairs": 1 / pairs})
            for pairs in self.pairs
        ]

    def test_sequences(self, seed: int, pairs: int, device: torch.device) -> Batch:
        """The test sequences with one number of pairs."""
        return in_pieces(
            lambda index_B: self._batch("test", seed, index_B, torch.full_like(index_B, pairs), pairs),
            start=0,
            count=self.num_test,
            device=device,
        )

    def _batch(self, split: str, seed: int, index_B: Tensor, pairs_B: Tensor, most: int) -> Batch:
        row_B = hashed(0, seed, SPLITS[split], index_B, pairs_B)
        hash_B = hashes_in_split(
            split, row_B, lambda hash_R, row_R: self._from_hashes(hash_R, pairs_B[row_R], most).tokens_BT
        )
        return self._from_hashes(hash_B, pairs_B, most)

    def _from_hashes(self, hash_B: Tensor, pairs_B: Tensor, most: int) -> Batch:
        """Build the sequences of these hashes, with room for `most` pairs in each."""
        half, pairs_B1 = self.vocabulary_size // 2, pairs_B[:, None]
        column_P = torch.arange(most, device=hash_B.device)
        present_BP = column_P < pairs_B1
        key_BP = BLANK + 1 + choose(hashed(hash_B, KEYS), half - 1, most)
        value_BP = half + choose(hashed(hash_B, VALUES), self.num_values, most)
        num_slots_B = self.length // 2 - pairs_B
        slot_BP = choose_by_power(hashed(hash_B, SLOTS), num_slots_B, self.length // 2, most, NEARNESS)
        asked_BP = column_P.expand_as(key_BP)
        if self.query_order != DRAWN:
            asked_BP = shuffled(hashed(hash_B, QUERIES), present_BP)
        query_BP = 2 * (pairs_B1 + slot_BP - 1)

        # One position past the end of each row takes what is absent.
        tokens_BT = self._filler(hash_B, self.length + 1)
        for position_BP, token_BP in (
            (2 * column_P, key_BP),
            (2 * column_P + 1, value_BP),
            (query_BP, key_BP.gather(1, asked_BP)),
        ):
            tokens_BT.scatter_(1, position_BP.where(present_BP, self.length), token_BP)
        return Batch(
            tokens_BT[:, :-1].contiguous(),
            value_BP.gather(1, asked_BP).where(present_BP, 0),
            present_BP.float(),
            query_BP.where(present_BP, 0),
        )

    def _filler(self, hash_B: Tensor, length: int) -> Tensor:
        if not self.random_filler:
            return torch.full((len(hash_B), length), BLANK, device=hash_B.device)
        position_T = torch.arange(length, device=hash_B.device)
        value_BT = integers_below(hashed(hash_B[:, None], FILLER, position_T), self.num_values)
        return self.vocabulary_size // 2 + value_BT


RATE_FROM: dict[tuple[int, int | None], tuple[int, int]] = {(512, 64): (256, 16)}
"""The cell whose search is dear, and the one whose rate it takes over with `reuse_rate`."""


class Recall(Probe):
    """Small models trained to recall, one for each cell and width.

    Every setting that is null has the value of the preset, see PRESETS.

    Args:
        cells: pairs [length, pairs]; where pairs is a list, one model is trained on all and scored on each of them.
        widths: of the models, which have one head, so also its width, and no feed-forward.
        vocabulary_size: half keys (one of which is the blank), half values.
        num_steps, budgets: the most that a training makes; without the one the other's number for the preset and cell.
        fixed_steps: all of them, with a cosine; false: a training ends once it has solved its task, see `solving`.
        num_train: sequences, which every epoch takes in a new order.
        num_test: test sequences for each number of pairs.
        filler: between the queries: blank or random.
        reuse_rate: the cell (512,64) takes over the rate found at (256,16) where that is run at the same width.
        check_interval_steps: between two looks at validation data; with a number the rows say how fast accuracy rose.
        conv_size, output_gate: of every mixer that has them; null leaves each its own.
        initial_deviation: of the projections; null: see options.probe_deviation.

    Raises:
        UserError: a value out of its range, or a cell that does not fit its length or the vocabulary.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (("accuracy", "num_pairs"), ("accuracy", "width"))
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline(
            "accuracy",
            "recall",
            axes=("sequence_length", "num_pairs", "width"),
            label=("sequence_length", "num_pairs"),
            pick="each",
            higher_is_better=True,
        ),
    )
    primary: ClassVar[Primary] = Primary(
        metric="accuracy",
        kind="accuracy",
        margin=0.01,
        hardest=["sequence_length", "num_pairs", "-width"],
    )
    smoke: ClassVar[dict[str, Any]] = {
        **{"preset": "small", "cells": [[16, 2]], "widths": [16], "num_train": 64, "num_test": 16},
        **{"num_steps": 10, "batch_size": 8, "learning_rates": [1e-2]},
    }
    one_more: ClassVar[dict[str, Any]] = {"cells": [[8, 2], [16, 2]]}

    def __init__(
        self,
        *,
        preset: str,
        cells: list | None,
        widths: list | None,
        vocabulary_size: int | None,
        num_train: int | None,
        num_test: int | None,
        num_steps: int | None,
        budgets: dict[str, dict[str, int]],
        fixed_steps: bool,
        batch_size: int | None,
        filler: str | None,
        reuse_rate: bool,
        check_interval_steps: int | None,
        num_layers: int,
        conv_size: int | None,
        output_gate: Gate | None,
        initial_deviation: float | None,
        learning_rates: list,
        precision: str,
    ) -> None:
        check_value("eval.recall.preset", preset, choices=tuple(PRESETS))
        given = {"cells": cells, "widths": widths, "vocabulary_size": vocabulary_size, "num_train": num_train}
        check_value("eval.recall.batch_size", batch_size, minimum=1)
        given |= {"num_test": num_test, "filler": filler, "batch_sizes": {0: batch_size} if batch_size else None}
        sizes = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
        check_sizes(sizes)
        check_counts("eval.recall", num_layers=num_layers)
        check_value("eval.recall.num_steps", num_steps, minimum=1)
        check_value("eval.recall.budgets", [n for steps in budgets.values() for n in steps.values()], minimum=1)
        check_counts("eval.recall", 0, conv_size=conv_size)
        check_value("eval.recall.check_interval_steps", check_interval_steps, minimum=1)
        check_training("eval.recall", learning_rates, precision)
        self.learning_rates, self.precision = [float(rate) for rate in learning_rates], precision
        self.reuse_rate = reuse_rate
        self._tasks = [
            _task(
                sizes,
                cell,
                width,
                num_steps=num_steps or budget(budgets, preset, cell),
                fixed_steps=fixed_steps,
                check_interval_steps=check_interval_steps,
                num_layers=num_layers,
                wishes=mixer_wishes(conv_size, output_gate),
                deviation=initial_deviation,
            )
            for width in sizes.widths
            for cell in sizes.cells
        ]

    def tasks(self) -> list[Task]:
        """Width by width, in each the cells as they are listed."""
        return list(self._tasks)

    def rate_source(self, task: Task) -> Task | None:
        """See Probe and `reuse_rate`."""
        source = RATE_FROM.get(_cell(task.settings))
        if not self.reuse_rate or source is None:
            return None
        width = task.settings["width"]
        others = (it for it in self._tasks if it.settings["width"] == width and _cell(it.settings) == source)
        return next(others, None)


def _cell(settings: dict[str, Any]) -> tuple[int, int | None]:
    return settings["sequence_length"], settings.get("num_pairs")


def _task(
    sizes: Sizes,
    cell: list[Any],
    width: int,
    *,
    num_steps: int,
    fixed_steps: bool,
    check_interval_steps: int | None,
    num_layers: int,
    wishes: dict[str, Any],
    deviation: float | None,
) -> RecallTask:
    length, pairs = cell
    settings = {"sequence_length": length, "width": width}
    return RecallTask(
        # A model of several numbers of pairs names each in the rows of its scores alone.
        settings=settings if isinstance(pairs, list) else {**settings, "num_pairs": pairs},
        model=ModelSettings(
            name=f"recall-{width}",
            dim=width,
            num_layers=num_layers,
            head_width=width,
            feed_forward_width=0,
            initial_deviation=probe_deviation("eval.recall", deviation, width),
        ),
        vocabulary_size=sizes.vocabulary_size,
        num_steps=num_steps,
        batch_size=sizes.batch_size(length),
        num_train_sequences=sizes.num_train,
        mixer_options=wishes,
        fixed_steps=fixed_steps,
        check_interval_steps=check_interval_steps,
        length=length,
        pairs=pairs if isinstance(pairs, list) else [pairs],
        num_test=sizes.num_test,
        random_filler=sizes.filler == "random",
        query_order=sizes.query_order,
    )
