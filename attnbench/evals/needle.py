"""Needle: small models name the one value that they read somewhere in a long text of other symbols."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import NUM_SELECTION, Probe, Task
from attnbench.evals.lib.options import check_training, mixer_wishes, probe_deviation
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, in_pieces, integers_below, lengths_between
from attnbench.mixers.around import Gate
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch

NUM_KEYS = NUM_VALUES = 16
NUM_FILLER = 32

LENGTH, DEPTH, KEY, VALUE, FILLER = range(5)
"""Purposes of a hash, as its first counter."""


@dataclass(slots=True, kw_only=True)
class NeedleTask(Task):
    """Filler in which one key and its value stand, and the key once more at the end; length 10, at a depth of 40 %:

        input   f7 f2 k3 v9 f7 f1 f4 f2 f8 k3
        target  .  .  .  .  .  .  .  .  .  v9

    Keys are 0 ... 15, values 16 ... 31, filler 32 ... 63, each uniform and independent. At depth d the key stands
    behind the share d / 100 of the other n - 3 symbols, rounded down. In training every length from min_length to
    max_length and every place is equally likely; sequence i of validation has length number i of these, round and
    round. A test has one length and one depth. Needles in a haystack of text (Kamradt, 2023) are sentences, and are
    asked of a model trained on text; these are symbols of a model trained to find them.

    The task needs no key: one symbol of a sequence is a value, and a model that names it, whatever key is asked for,
    scores 1.0. It measures how long and over how much filler a model keeps one symbol, and no association.
    """

    min_length: int
    max_length: int
    test_lengths: list[int]
    depths: list[int]
    """Places of the pair in tests, in percent of the filler: 0 at the start."""
    num_test: int
    """Test sequences at each length and depth."""

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """See Task; L is 1."""

        def make(index_B: Tensor) -> Batch:
            length_B = lengths_between(split, seed, index_B, self.min_length, self.max_length, purpose=LENGTH)
            place_B = integers_below(hashed(0, seed, SPLITS[split], index_B, DEPTH), length_B - 2)
            return _batch(split, seed, index_B, length_B, place_B, self.max_length)

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Accuracy at each test length and depth."""
        for metric, settings in self.axes():
            batch = self.test_sequences(seed, settings["length"], settings["depth"], device)
            yield accuracy(correct_labels(model, batch), metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """See Task."""
        shared = {**self.settings, "split": "test", "chance": 1 / NUM_VALUES}
        return [
            ("accuracy", {**shared, "length": length, "depth": depth, "beyond_training": length > self.max_length})
            for length in self.test_lengths
            for depth in self.depths
        ]

    def test_sequences(self, seed: int, length: int, depth: int, device: torch.device) -> Batch:
        """The test sequences of one length and depth."""
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
    # Behind the end stands symbol 0, which nothing before it can see.
    return Batch(
        tokens_BT.where(tokens_BT != ABSENT, 0),
        tokens_BT.gather(1, 1 + place_B[:, None]),
        torch.ones(len(hash_B), 1, device=hash_B.device),
        length_B[:, None] - 1,
    )


def _tokens(hash_B: Tensor, length_B: Tensor, place_B: Tensor, longest: int) -> Tensor:
    """Sequences (B, longest), ABSENT behind the end of each."""
    position_T = torch.arange(longest, device=hash_B.device)
    key_B1 = integers_below(hashed(hash_B, KEY), NUM_KEYS)[:, None]
    value_B1 = NUM_KEYS + integers_below(hashed(hash_B, VALUE), NUM_VALUES)[:, None]
    filler_BT = integers_below(hashed(hash_B[:, None], FILLER, position_T), NUM_FILLER)
    tokens_BT = NUM_KEYS + NUM_VALUES + filler_BT
    tokens_BT = tokens_BT.scatter(1, place_B[:, None], key_B1).scatter(1, 1 + place_B[:, None], value_B1)
    tokens_BT = tokens_BT.scatter(1, length_B[:, None] - 1, key_B1)
    return tokens_BT.where(position_T < length_B[:, None], ABSENT)


class Needle(Probe):
    """A small model keeps the one value that it reads; needs no key; tested over depth and length.

    Args:
        width: of the model; with `num_layers`, `head_width` and `feed_forward_width` always applied.
        conv_size, output_gate: of every mixer that has them; null leaves each its own.
        num_steps: the most that a training makes.
        fixed_steps: all of them, with a cosine; false: a training ends once it has solved its task, see `solving`.
        min_length, max_length: positions of training sequences, at most 500 lengths.
        test_lengths: positions; each with each of `depths` has a batch and a row of its own.
        depths: of the pair, in percent.
        num_test: test sequences of each length and depth.
        initial_deviation: of the projections; null: see options.probe_deviation.

    Raises:
        UserError: a value out of its range.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (("accuracy", "length"), ("accuracy", "depth"))
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("accuracy", "needle", axes=("length", "depth"), label=("length", "depth"), higher_is_better=True),
    )
    primary: ClassVar[Primary] = Primary(
        metric="accuracy",
        kind="accuracy",
        margin=0.01,
        settings={"beyond_training": False},
        hardest=["length", "-depth"],
    )
    smoke: ClassVar[dict[str, Any]] = {
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 5, "batch_size": 8},
        **{"min_length": 8, "max_length": 12, "test_lengths": [12, 24], "depths": [0, 100], "num_test": 16},
        **{"learning_rates": [1e-2]},
    }
    one_more: ClassVar[dict[str, Any]] = {"depths": [0, 50, 100]}

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
        min_length: int,
        max_length: int,
        test_lengths: list,
        depths: list,
        num_test: int,
        initial_deviation: float | None,
        learning_rates: list,
        precision: str,
    ) -> None:
        group = "eval.needle"
        counts = {"width": width, "num_layers": num_layers, "head_width": head_width, "num_steps": num_steps}
        check_counts(group, **counts, batch_size=batch_size, num_test=num_test)
        # Shorter ones may be too few for three splits.
        check_counts(group, 4, min_length=min_length)
        check_counts(group, 0, feed_forward_width=feed_forward_width, conv_size=conv_size)
        if not min_length <= max_length < min_length + NUM_SELECTION:
            raise UserError(
                f"{group}.max_length={max_length}: must be at least min_length={min_length},"
                f" and less than {NUM_SELECTION} above it"
            )
        check_value(f"{group}.test_lengths", test_lengths, kind=list[int], distinct=True, minimum=4)
        check_value(f"{group}.depths", depths, kind=list[int], distinct=True, minimum=0)
        if max(depths) > 100:
            raise UserError(f"{group}.depths={depths}: must be at most 100")
        check_training(group, learning_rates, precision)
        self.learning_rates, self.precision = [float(rate) for rate in learning_rates], precision
        self._task = NeedleTask(
            settings={},
            model=ModelSettings(
                name="needle",
                dim=width,
                num_layers=num_layers,
                head_width=head_width,
                feed_forward_width=feed_forward_width,
                initial_deviation=probe_deviation(group, initial_deviation, width),
            ),
            vocabulary_size=NUM_KEYS + NUM_VALUES + NUM_FILLER,
            num_steps=num_steps,
            batch_size=batch_size,
            num_train_sequences=num_steps * batch_size,
            mixer_options=mixer_wishes(conv_size, output_gate),
            fixed_steps=fixed_steps,
            min_length=min_length,
            max_length=max_length,
            test_lengths=test_lengths,
            depths=depths,
            num_test=num_test,
        )

    def tasks(self) -> list[Task]:
        """One."""
        return [self._task]
