from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.strings import StringProbe
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, integers_below, shuffled
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option
from attnbench.training.step import Batch

NUM_SYMBOLS = 26
START, SEPARATOR, PADDING, BLANK = range(NUM_SYMBOLS, NUM_SYMBOLS + 4)
"""Tokens beside the symbols 0 ... 25; BLANK only in selective copy."""

SHARED_LENGTHS = 4
"""Strings shorter than this may be in several splits: there are too few of them."""

TRAINED = {"beyond_training": False}
STRING, POSITIONS = 1, 2
"""Purposes of a hash, as its first counter."""


class Copy(StringProbe):
    """Small models that repeat a string.

    Strings have 26 symbols, uniform and independent, and follow a separator once more; n = 4, trained up to 5:

        input   <s> c a b d <sep> c a b d <pad> <pad> <pad>
        target   .  . . . .   c   a b d .   .     .     .

    In selective copy the symbols stand at n random ones of 2n places, among blanks:

        input   <s> . c . . a b . d <sep> c a b d <pad> ...
    """

    max_length: int = option(50, "training strings have 1 to as many symbols", minimum=1)
    test_lengths: list[int] = option(
        [5, 10, 20, 30, 50, 75, 100, 200],
        "symbols; lengths past max_length ask for more than was trained",
        distinct=True,
        minimum=1,
    )
    selective: bool = option(False, "scatter the symbols among as many blanks, which are not copied")
    # Ten times the 40 that softmax takes to 95 % at 3e-2, over three search seeds, on one H200.
    num_steps = 400

    plots = (("symbol_accuracy", "length"), ("string_accuracy", "length"))
    headline = tuple(
        Headline("symbol_accuracy", "copy", axes=("length",), pick=pick, settings=settings, higher_is_better=True)
        for pick, settings in (("largest", TRAINED), ("smallest", {"beyond_training": True}))
    )
    primary = Primary(metric="symbol_accuracy", kind="accuracy", margin=0.01, settings=TRAINED, hardest=["length"])
    smoke = {
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 10, "batch_size": 8},
        **{"max_length": 4, "test_lengths": [2, 5], "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more = {"test_lengths": [2, 3, 5]}

    @property
    def settings(self) -> dict[str, Any]:
        return {"selective": True} if self.selective else {}

    @property
    def vocabulary_size(self) -> int:
        return BLANK + 1 if self.selective else BLANK

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        correct = {}
        for metric, settings in self.axes():
            if metric == "symbol_accuracy":
                correct_BL = correct_labels(model, self.test_sequences(seed, settings["length"], device))
                correct = {"symbol_accuracy": correct_BL, "string_accuracy": correct_BL.all(1)}
            yield accuracy(correct[metric], metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for length in self.test_lengths:
            shared = {**self.settings, "length": length, "beyond_training": length > self.max_length, "split": "test"}
            found.append(("symbol_accuracy", {**shared, "chance": 1 / NUM_SYMBOLS}))
            found.append(("string_accuracy", {**shared, "chance": (1 / NUM_SYMBOLS) ** length}))
        return found

    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        row_B = hashed(0, seed, SPLITS[split], index_B, length_B)
        hash_B = hashes_in_split(
            split,
            row_B,
            lambda hash_R, row_R: _strings(hash_R, length_B[row_R], longest),
            exempt_B=length_B < SHARED_LENGTHS,
        )
        symbols_BL = _strings(hash_B, length_B, longest)
        read_BS = _scattered(symbols_BL, hashed(hash_B, POSITIONS)) if self.selective else symbols_BL
        num_read_B = 2 * length_B if self.selective else length_B
        return _laid_out(read_BS, num_read_B, symbols_BL, length_B)


def _strings(hash_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
    """Return symbols (B, longest), ABSENT behind the end of each string."""
    column_L = torch.arange(longest, device=hash_B.device)
    symbols_BL = integers_below(hashed(hash_B[:, None], STRING, column_L), NUM_SYMBOLS)
    return symbols_BL.where(column_L < length_B[:, None], ABSENT)


def _scattered(symbols_BL: Tensor, hash_B: Tensor) -> Tensor:
    """Place the n symbols of each row, in order, at n random ones of its first 2n places (B, 2L), BLANK at the
    others."""
    length_B = (symbols_BL != ABSENT).sum(1)
    place_S = torch.arange(2 * symbols_BL.shape[1], device=hash_B.device)
    order_BS = shuffled(hash_B, place_S < 2 * length_B[:, None])
    # A place has a symbol if it is among the first n of a random order.
    taken_BS = order_BS.argsort(dim=1) < length_B[:, None]
    which_BS = (taken_BS.cumsum(1) - 1).clamp(min=0)
    return symbols_BL.gather(1, which_BS).where(taken_BS, BLANK)


def _laid_out(read_BS: Tensor, num_read_B: Tensor, symbols_BL: Tensor, length_B: Tensor) -> Batch:
    """Return <s>, the string, <sep>, the copy and padding, with the labels of the copy."""
    device, (num_rows, longest) = symbols_BL.device, symbols_BL.shape
    position_T = torch.arange(read_BS.shape[1] + longest + 3, device=device)
    num_read_B1, length_B1 = num_read_B[:, None], length_B[:, None]
    # One position past the end of each row takes absent symbols.
    tokens_BT = torch.full((num_rows, len(position_T) + 1), PADDING, device=device)
    tokens_BT[:, 0] = START
    place_S, column_L = position_T[: read_BS.shape[1]], position_T[:longest]
    tokens_BT.scatter_(1, (1 + place_S).where(place_S < num_read_B1, len(position_T)), read_BS)
    tokens_BT.scatter_(1, 1 + num_read_B1, SEPARATOR)
    is_label_BL = column_L < length_B1
    before_BL = 1 + num_read_B1 + column_L
    tokens_BT.scatter_(1, (before_BL + 1).where(is_label_BL, len(position_T)), symbols_BL)
    return Batch(
        tokens_BT[:, :-1].contiguous(),
        symbols_BL.where(is_label_BL, 0),
        is_label_BL.float(),
        before_BL.where(is_label_BL, 0),
    )
