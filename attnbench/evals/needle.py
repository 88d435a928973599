"""Needle: small models name the one value that they read somewhere in a long text of other symbols."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.strings import StringProbe
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, in_pieces, integers_below
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option
from attnbench.training.step import Batch

NUM_KEYS = NUM_VALUES = 16
NUM_FILLER = 32

DEPTH, KEY, VALUE, FILLER = range(1, 5)
"""Purposes of a hash, as its first counter."""


class Needle(StringProbe):
    """Small models that name the one value in a long text of other symbols, which needs no key.

    One key and its value stand in filler, and the key once more at the end; length 10, at a depth of 40 %:

        input   f7 f2 k3 v9 f7 f1 f4 f2 f8 k3
        target  .  .  .  .  .  .  .  .  .  v9

    Keys are 0 ... 15, values 16 ... 31, filler 32 ... 63, each uniform and independent. At depth d the key follows d %
    of the other n - 3 symbols, rounded down; in training every place is equally likely.

    A model that names the only value, whatever the key, scores 1.0: the task measures how long and over how much filler
    a model keeps one symbol, and no association.
    """

    # Shorter sequences may be too few for three splits.
    min_length: int = option(16, "positions of the shortest training sequences", minimum=4)
    max_length: int = option(128, "and of the longest", minimum=1)
    test_lengths: list[int] = option(
        [64, 128, 256, 512, 1024],
        "positions; lengths past max_length ask for more than was trained",
        distinct=True,
        minimum=4,
    )
    depths: list[int] = option(
        [0, 25, 50, 75, 100], "of the pair, in percent: 0 at the start", distinct=True, minimum=0, maximum=100
    )
    num_test: int = option(500, "test sequences of each length and depth", minimum=1)

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

    @property
    def vocabulary_size(self) -> int:
        return NUM_KEYS + NUM_VALUES + NUM_FILLER

    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        place_B = integers_below(hashed(0, seed, SPLITS[split], index_B, DEPTH), length_B - 2)
        return _batch(split, seed, index_B, length_B, place_B, longest)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        for metric, settings in self.axes():
            batch = self.test_sequences(seed, settings["length"], device, depth=settings["depth"])
            yield accuracy(correct_labels(model, batch), metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        shared = {"split": "test", "chance": 1 / NUM_VALUES}
        return [
            ("accuracy", {**shared, "length": length, "depth": depth, "beyond_training": length > self.max_length})
            for length in self.test_lengths
            for depth in self.depths
        ]

    def test_sequences(self, seed: int, length: int, device: torch.device, *, depth: int = 0) -> Batch:
        place = (length - 3) * depth // 100

        def make(index_B: Tensor) -> Batch:
            length_B, place_B = torch.full_like(index_B, length), torch.full_like(index_B, place)
            return _batch("test", seed, index_B, length_B, place_B, length)

        return in_pieces(make, 0, self.num_test, device)


def _batch(split: str, seed: int, index_B: Tensor, length_B: Tensor, place_B: Tensor, longest: int) -> Batch:
    row_B = hashed(0, seed, SPLITS[split], index_B, length_B, place_B)
    hash_B = hashes_in_split(
        split, row_B, lambda hash_R, row_R: _tokens(hash_R, length_B[row_R], place_B[row_R], longest)
    )
    tokens_BT = _tokens(hash_B, length_B, place_B, longest)
    # Symbol 0 fills the end, which no earlier position can see.
    return Batch(
        tokens_BT.where(tokens_BT != ABSENT, 0),
        tokens_BT.gather(1, 1 + place_B[:, None]),
        torch.ones(len(hash_B), 1, device=hash_B.device),
        length_B[:, None] - 1,
    )


def _tokens(hash_B: Tensor, length_B: Tensor, place_B: Tensor, longest: int) -> Tensor:
    """Return sequences (B, longest), ABSENT behind the end of each."""
    position_T = torch.arange(longest, device=hash_B.device)
    key_B1 = integers_below(hashed(hash_B, KEY), NUM_KEYS)[:, None]
    value_B1 = NUM_KEYS + integers_below(hashed(hash_B, VALUE), NUM_VALUES)[:, None]
    filler_BT = integers_below(hashed(hash_B[:, None], FILLER, position_T), NUM_FILLER)
    tokens_BT = NUM_KEYS + NUM_VALUES + filler_BT
    tokens_BT = tokens_BT.scatter(1, place_B[:, None], key_B1).scatter(1, 1 + place_B[:, None], value_B1)
    tokens_BT = tokens_BT.scatter(1, length_B[:, None] - 1, key_B1)
    return tokens_BT.where(position_T < length_B[:, None], ABSENT)
