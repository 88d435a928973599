"""Copying: small models that repeat a string they have read, also one longer than any they were trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import NUM_SELECTION, Probe, Task
from attnbench.evals.lib.options import check_training, mixer_wishes, probe_deviation
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.task_data import (
    ABSENT,
    SPLITS,
    hashes_in_split,
    in_pieces,
    integers_below,
    lengths_between,
    shuffled,
)
from attnbench.mixers.around import Gate
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch

NUM_SYMBOLS = 26
START, SEPARATOR, PADDING, BLANK = range(NUM_SYMBOLS, NUM_SYMBOLS + 4)
"""Tokens beside the symbols 0 ... 25; BLANK only in selective copy."""

SHARED_LENGTHS = 4
"""Strings shorter than this may be in several splits: there are too few of them to keep some from training."""

LENGTH, STRING, POSITIONS = range(3)
"""Purposes of a hash, as its first counter."""


@dataclass(slots=True, kw_only=True)
class CopyTask(Task):
    """Strings of 26 symbols, uniform and independent, behind a separator once more; n = 4, trained up to 5:

        input   <s> c a b d <sep> c a b d <pad> <pad> <pad>
        target   .  . . . .   c   a b d .   .     .     .

    Scored are the n positions whose next symbol belongs to the copy. A batch of strings of up to n symbols has 2n + 3
    positions. In selective copy the string stands in order, but at n random ones of 2n places, among blanks, and a
    batch has 3n + 3 positions:

        input   <s> . c . . a b . d <sep> c a b d <pad> ...

    Training lengths are uniform over 1 ... max_length; sequence i of validation has length 1 + i % max_length, and
    all of a test one length. A string of a given length is a function of (split, seed, index).
    """

    max_length: int
    test_lengths: list[int]
    num_test: int
    selective: bool

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """See Task; L is max_length."""

        def make(index_B: Tensor) -> Batch:
            length_B = lengths_between(split, seed, index_B, 1, self.max_length, purpose=LENGTH)
            return self._batch(split, seed, index_B, length_B, self.max_length)

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Symbol and whole-string accuracy at each test length."""
        for length in self.test_lengths:
            correct_BL = correct_labels(model, self.test_sequences(seed, length, device))
            correct = {"symbol_accuracy": correct_BL, "string_accuracy": correct_BL.all(1)}
            for metric, settings in self._axes(length):
                yield accuracy(correct[metric], metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """See Task."""
        return [axes for length in self.test_lengths for axes in self._axes(length)]

    def _axes(self, length: int) -> list[tuple[str, dict[str, Any]]]:
        chances = {"symbol_accuracy": 1 / NUM_SYMBOLS, "string_accuracy": (1 / NUM_SYMBOLS) ** length}
        shared = {**self.settings, "length": length, "beyond_training": length > self.max_length, "split": "test"}
        return [(metric, {**shared, "chance": chance}) for metric, chance in chances.items()]

    def test_sequences(self, seed: int, length: int, device: torch.device) -> Batch:
        """The test strings of one length, in a batch that is no longer than they need."""
        return in_pieces(
            lambda index_B: self._batch("test", seed, index_B, torch.full_like(index_B, length), length),
            start=0,
            count=self.num_test,
            device=device,
        )

    def _batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
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
    """Symbols (B, longest), ABSENT behind the end of each string."""
    column_L = torch.arange(longest, device=hash_B.device)
    symbols_BL = integers_below(hashed(hash_B[:, None], STRING, column_L), NUM_SYMBOLS)
    return symbols_BL.where(column_L < length_B[:, None], ABSENT)


def _scattered(symbols_BL: Tensor, hash_B: Tensor) -> Tensor:
    """The n symbols of each row, in order, at n random ones of its first 2n places (B, 2L), BLANK at the others."""
    length_B = (symbols_BL != ABSENT).sum(1)
    place_S = torch.arange(2 * symbols_BL.shape[1], device=hash_B.device)
    order_BS = shuffled(hash_B, place_S < 2 * length_B[:, None])
    # A place is taken by a symbol if it is among the first n of a random order.
    taken_BS = order_BS.argsort(dim=1) < length_B[:, None]
    which_BS = (taken_BS.cumsum(1) - 1).clamp(min=0)
    return symbols_BL.gather(1, which_BS).where(taken_BS, BLANK)


def _laid_out(read_BS: Tensor, num_read_B: Tensor, symbols_BL: Tensor, length_B: Tensor) -> Batch:
    """<s>, what is read, <sep>, the copy, then padding: S + L + 3 positions, with the labels of the copy."""
    device, (num_rows, longest) = symbols_BL.device, symbols_BL.shape
    position_T = torch.arange(read_BS.shape[1] + longest + 3, device=device)
    num_read_B1, length_B1 = num_read_B[:, None], length_B[:, None]
    # One position past the end of each row takes what is absent.
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


class Copy(Probe):
    """A small model trained to copy strings, tested on strings of several lengths.

    Args:
        width: of the model; with `num_layers`, `head_width` and `feed_forward_width` always applied.
        conv_size, output_gate: of every mixer that has them; null leaves each its own.
        num_steps: the most that a training makes.
        fixed_steps: all of them, with a cosine; false: a training ends once it has solved its task, see `solving`.
        max_length: training strings have 1 to `max_length` symbols, at most 500.
        test_lengths: symbols of the test strings; each length has a batch and rows of its own.
        num_test: test strings of each length.
        selective: see CopyTask.
        initial_deviation: of the projections; null: see options.probe_deviation.

    Raises:
        UserError: a value out of its range.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (("symbol_accuracy", "length"), ("string_accuracy", "length"))
    headline: ClassVar[tuple[Headline, ...]] = tuple(
        Headline(
            "symbol_accuracy",
            "copy",
            axes=("length",),
            pick=pick,
            settings={"beyond_training": is_beyond},
            higher_is_better=True,
        )
        for pick, is_beyond in (("largest", False), ("smallest", True))
    )
    primary: ClassVar[Primary] = Primary(
        metric="symbol_accuracy",
        kind="accuracy",
        margin=0.01,
        settings={"beyond_training": False},
        hardest=["length"],
    )
    smoke: ClassVar[dict[str, Any]] = {
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 10, "batch_size": 8},
        **{"max_length": 4, "test_lengths": [2, 5], "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more: ClassVar[dict[str, Any]] = {"test_lengths": [2, 3, 5]}

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        head_width: int,
        feed_forward_width: int,
        conv_size: int | None,
        output_gate: Gate | None,
        num_steps: int,
        fixed_steps: bool,
        batch_size: int,
        max_length: int,
        test_lengths: list,
        num_test: int,
        selective: bool,
        initial_deviation: float | None,
        learning_rates: list,
        precision: str,
    ) -> None:
        counts = {"width": width, "num_layers": num_layers, "head_width": head_width, "num_steps": num_steps}
        check_counts("eval.copy", **counts, batch_size=batch_size, max_length=max_length, num_test=num_test)
        check_counts("eval.copy", 0, feed_forward_width=feed_forward_width, conv_size=conv_size)
        if max_length > NUM_SELECTION:
            raise UserError(f"eval.copy.max_length={max_length}: must be at most {NUM_SELECTION}")
        check_value("eval.copy.test_lengths", test_lengths, kind=list[int], distinct=True, minimum=1)
        check_training("eval.copy", learning_rates, precision)
        self.learning_rates, self.precision = [float(rate) for rate in learning_rates], precision
        self._task = CopyTask(
            settings={"selective": True} if selective else {},
            model=ModelSettings(
                name="copy",
                dim=width,
                num_layers=num_layers,
                head_width=head_width,
                feed_forward_width=feed_forward_width,
                initial_deviation=probe_deviation("eval.copy", initial_deviation, width),
            ),
            vocabulary_size=BLANK + 1 if selective else BLANK,
            num_steps=num_steps,
            batch_size=batch_size,
            num_train_sequences=num_steps * batch_size,
            mixer_options=mixer_wishes(conv_size, output_gate),
            fixed_steps=fixed_steps,
            max_length=max_length,
            test_lengths=test_lengths,
            num_test=num_test,
            selective=selective,
        )

    def tasks(self) -> list[Task]:
        """One."""
        return [self._task]
