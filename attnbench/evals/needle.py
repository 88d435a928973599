from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.needle_strings import needle_strings
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.strings import StringProbe
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, in_pieces, integers_below
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.training.step import Batch

DEPTH = 1
"""Purpose of a hash, as its first counter; lib/needle_strings.py has further ones."""


class Needle(StringProbe):
    """Small models that name one value in a long text of other symbols, which needs no key without distractors.

    A key and its value stand in filler, and the key once more at the end; length 10, at a depth of 40 %:

        input   f7 f2 k3 v9 f7 f1 f4 f2 f8 k3
        target  .  .  .  .  .  .  .  .  .  v9

    Keys, values and filler are symbols of their own, uniform and independent. At depth d the key follows d % of the
    other n - 3 symbols, rounded down; in training every place is equally likely.

    A model that names the only value, whatever the key, scores 1.0: the task then measures how long and over how much
    filler a model keeps one symbol. With distractors, here one, other pairs have other keys:

        input   f7 k5 v1 f2 k3 v9 f7 f8 k3
        target  .  .  .  .  .  .  .  .  v9

    With one key and values as filler (`num_keys=1 num_filler=0`) it is the induction task of Mamba (arXiv 2312.00752).
    """

    num_keys: int = option(16, "different keys", minimum=1)
    num_values: int = option(16, "different values", minimum=2)
    num_filler: int = option(32, "different symbols of the filler; 0: values fill it", minimum=0)
    num_distractors: int = option(0, "further pairs, at random places", minimum=0)
    # Shorter sequences may be too few for three splits.
    min_length: int = option(16, "positions of the shortest training sequences", minimum=4)
    max_length: int = option(128, "and of the longest", minimum=1)
    test_lengths: list[int] = option(
        [64, 128, 256, 512, 1024],
        "positions; lengths past max_length ask for more than was trained",
        distinct=True,
        minimum=4,
    )
    depths: list[int] | None = option(
        [0, 25, 50, 75, 100],
        "of the pair, in percent: 0 at the start; null: at random, as in training",
        distinct=True,
        minimum=0,
        maximum=100,
    )
    num_test: int = option(500, "test sequences of each length and depth", minimum=1)

    former = {"num_keys": 16, "num_values": 16, "num_filler": 32, "num_distractors": 0}
    plots = (("accuracy", "length"), ("accuracy", "depth"))
    headline = (
        Headline("accuracy", "needle", axes=("length", "depth"), label=("length", "depth"), higher_is_better=True),
    )
    primary = Primary(
        metric="accuracy",
        kind="accuracy",
        margin=0.01,
        settings={"beyond_training": False},
        hardest=["length", "-depth"],
    )
    smoke = {
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 5, "batch_size": 8},
        **{"min_length": 8, "max_length": 12, "test_lengths": [12, 24], "depths": [0, 100], "num_test": 16},
        **{"learning_rates": [1e-2]},
    }
    one_more = {"depths": [0, 50, 100]}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_distractors >= self.num_keys:
            word = f"eval.needle.num_distractors={self.num_distractors}"
            raise UserError(f"{word}: must be below eval.needle.num_keys={self.num_keys}")
        shortest = 4 + 2 * self.num_distractors
        check_value("eval.needle.min_length", self.min_length, minimum=shortest)
        check_value("eval.needle.test_lengths", self.test_lengths, minimum=shortest)

    @property
    def vocabulary_size(self) -> int:
        return self.num_keys + self.num_values + self.num_filler

    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        num_places_B = length_B - 2 - self.num_distractors
        place_B = integers_below(hashed(0, seed, SPLITS[split], index_B, DEPTH), num_places_B)
        return self._batch(split, seed, index_B, length_B, place_B, longest)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        for metric, settings in self.axes():
            batch = self.test_sequences(seed, settings["length"], device, depth=settings.get("depth"))
            yield accuracy(correct_labels(model, batch), metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        shared = {"split": "test", "chance": 1 / self.num_values}
        depths = [{"depth": depth} for depth in self.depths] if self.depths is not None else [{}]
        return [
            ("accuracy", {**shared, "length": length, **depth, "beyond_training": length > self.max_length})
            for length in self.test_lengths
            for depth in depths
        ]

    def test_sequences(self, seed: int, length: int, device: torch.device, *, depth: int | None = None) -> Batch:
        if depth is None:
            return super().test_sequences(seed, length, device)
        place = (length - 3 - self.num_distractors) * depth // 100

        def make(index_B: Tensor) -> Batch:
            length_B, place_B = torch.full_like(index_B, length), torch.full_like(index_B, place)
            return self._batch("test", seed, index_B, length_B, place_B, length)

        return in_pieces(make, 0, self.num_test, device)

    def _batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, place_B: Tensor, longest: int) -> Batch:
        make = partial(
            needle_strings,
            longest=longest,
            num_keys=self.num_keys,
            num_values=self.num_values,
            num_filler=self.num_filler,
            num_distractors=self.num_distractors,
        )
        row_B = hashed(0, seed, SPLITS[split], index_B, length_B, place_B)
        hash_B = hashes_in_split(split, row_B, lambda hash_R, row_R: make(hash_R, length_B[row_R], place_B[row_R])[0])
        tokens_BT, value_B1 = make(hash_B, length_B, place_B)
        # Symbol 0 fills the end, which no earlier position can see.
        ones_B1 = torch.ones(value_B1.shape, device=hash_B.device)
        return Batch(tokens_BT.where(tokens_BT != ABSENT, 0), value_B1, ones_B1, length_B[:, None] - 1)
