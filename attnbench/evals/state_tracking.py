"""State tracking: whether small models keep a state that every symbol changes, on strings longer than trained on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import NUM_SELECTION, Probe, Task
from attnbench.evals.lib.options import check_training, mixer_wishes, probe_deviation
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.state_rules import RULES
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, in_pieces, lengths_between
from attnbench.mixers.around import Gate
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch

SHARED_BITS = 10
"""Lengths with fewer than 2^10 strings may have one in several splits: too few to keep some from training."""

LENGTH, STRING = range(2)
"""Purposes of a hash, as its first counter."""


@dataclass(slots=True, kw_only=True)
class StateTrackingTask(Task):
    """Strings whose every step changes a state, which is to be told after each of them:

        parity                   input   0 1 1 0 1            target  0 1 0 0 1
        mod_arithmetic           input   3 + 4 * 2 - 1        target  3 . 2 . 1 . 0
        mod_arithmetic_brackets  input   ( 3 * ( 4 + 2 ) )    target  . . . . . . . 1 3
        s3, a5, s5               input   x1 x2 x3             target  x1 x2∘x1 x3∘x2∘x1
        s5_swaps                 the same with inputs that move two of the five points, or none

    Arithmetic is modulo 5. A string's length counts its labels: bits, permutations, numbers, pairs of brackets.
    Training lengths are uniform over min_length ... max_length; sequence i of validation has length number i of
    these, round and round. Tests have one length each. Steps are uniform and independent.

    Others' generators ask for fewer labels: Grazzi et al. (arXiv 2411.12537) and Delétang et al. (2207.02098) ask for
    the answer behind the end of a string, and count the symbols of arithmetic as its length; here the value so far, or
    of what a bracket closes, is asked for as well. Liu et al. (2210.10749) ask at each position, as here.
    """

    rule: str
    min_length: int
    max_length: int
    multiples: list[int]
    """Test lengths, in multiples of max_length."""
    num_test: int

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """See Task; L is max_length."""

        def make(index_B: Tensor) -> Batch:
            length_B = lengths_between(split, seed, index_B, self.min_length, self.max_length, purpose=LENGTH)
            return self._batch(split, seed, index_B, length_B, self.max_length)

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Accuracy at each test length, over all positions and over the last quarter."""
        for multiple in self.multiples:
            correct_BL = correct_labels(model, self.test_sequences(seed, multiple * self.max_length, device))
            first = {"all": 0, "last_quarter": correct_BL.shape[1] * 3 // 4}
            for metric, settings in self._axes(multiple):
                yield accuracy(correct_BL[:, first[settings["positions"]] :], metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """See Task."""
        return [axes for multiple in self.multiples for axes in self._axes(multiple)]

    def _axes(self, multiple: int) -> list[tuple[str, dict[str, Any]]]:
        length = {"length": multiple * self.max_length, "training_lengths": multiple}
        shared = {**self.settings, **length, "split": "test", "chance": RULES[self.rule].chance}
        return [("accuracy", {**shared, "positions": positions}) for positions in ("all", "last_quarter")]

    def test_sequences(self, seed: int, length: int, device: torch.device) -> Batch:
        """The test strings of one length."""
        return in_pieces(
            lambda index_B: self._batch("test", seed, index_B, torch.full_like(index_B, length), length),
            start=0,
            count=self.num_test,
            device=device,
        )

    def _batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        rule = RULES[self.rule]

        hash_B = hashes_in_split(
            split,
            hashed(0, seed, SPLITS[split], index_B, STRING, length_B),
            lambda hash_R, row_R: rule.tokens(hashed(hash_R, STRING), length_B[row_R], longest),
            exempt_B=length_B * math.log2(rule.num_inputs) < SHARED_BITS,
        )
        tokens_BT, states_BL, positions_BL = rule.strings(hashed(hash_B, STRING), length_B, longest)
        is_label_BL = torch.arange(longest, device=hash_B.device) < length_B[:, None]
        # Behind the end stands symbol 0, which nothing before it can see.
        tokens_BT = tokens_BT.where(tokens_BT != ABSENT, 0)
        return Batch(tokens_BT, states_BL.where(is_label_BL, 0), is_label_BL.float(), positions_BL)


class StateTracking(Probe):
    """Small models trained to track states, one for each rule, tested on strings of several times the length.

    Args:
        rules: kinds of strings, see StateTrackingTask.
        width: of the model; with `num_layers`, `head_width` and `feed_forward_width` always applied.
        conv_size, output_gate: of every mixer that has them; null leaves each its own.
        num_steps: the most that a training makes.
        fixed_steps: all of them, with a cosine; false: a training ends once it has solved its task, see `solving`.
        length_buckets: the strings of a training batch are of about one length, see Task.
        min_length, max_length: labels of training strings, at most 500 lengths.
        multiples: test lengths, in multiples of `max_length`.
        num_test: test strings of each length.
        initial_deviation: of the projections; null: see options.probe_deviation.

    Raises:
        UserError: a value out of its range.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (("accuracy", "length"),)
    headline: ClassVar[tuple[Headline, ...]] = (
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
    primary: ClassVar[Primary] = Primary(
        metric="accuracy",
        kind="accuracy",
        margin=0.01,
        settings={"positions": "last_quarter", "training_lengths": 2},
        hardest=["length"],
    )
    smoke: ClassVar[dict[str, Any]] = {
        **{"rules": ["parity"], "width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 10},
        **{"batch_size": 8, "max_length": 8, "multiples": [1, 2], "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more: ClassVar[dict[str, Any]] = {"rules": ["parity", "s3"]}

    def __init__(
        self,
        *,
        rules: list,
        width: int,
        num_layers: int,
        head_width: int,
        feed_forward_width: int,
        conv_size: int | None,
        output_gate: Gate | None,
        num_steps: int,
        fixed_steps: bool,
        batch_size: int,
        length_buckets: bool,
        min_length: int,
        max_length: int,
        multiples: list,
        num_test: int,
        initial_deviation: float | None,
        learning_rates: list,
        precision: str,
    ) -> None:
        group = "eval.state_tracking"
        counts = {"width": width, "num_layers": num_layers, "head_width": head_width, "num_steps": num_steps}
        check_counts(group, **counts, batch_size=batch_size, num_test=num_test, min_length=min_length)
        check_counts(group, 0, feed_forward_width=feed_forward_width, conv_size=conv_size)
        # A last quarter of shorter strings would be empty.
        check_counts(group, 4, max_length=max_length)
        if not min_length <= max_length < min_length + NUM_SELECTION:
            raise UserError(
                f"{group}.max_length={max_length}: must be at least min_length={min_length},"
                f" and less than {NUM_SELECTION} above it"
            )
        check_value(f"{group}.multiples", multiples, kind=list[int], distinct=True, minimum=1)
        # In lists a word of any type can be looked for.
        known = [*RULES]
        if not rules or any(rule not in known or rules.count(rule) > 1 for rule in rules):
            raise UserError(f"{group}.rules={rules}: must be one or several of {', '.join(RULES)}, each once")
        check_training(group, learning_rates, precision)
        self.learning_rates, self.precision = [float(rate) for rate in learning_rates], precision
        model = ModelSettings(
            name="state_tracking",
            dim=width,
            num_layers=num_layers,
            head_width=head_width,
            feed_forward_width=feed_forward_width,
            initial_deviation=probe_deviation(group, initial_deviation, width),
        )
        self._tasks: list[Task] = [
            StateTrackingTask(
                settings={"rule": rule},
                model=model,
                vocabulary_size=RULES[rule].num_symbols,
                num_steps=num_steps,
                batch_size=batch_size,
                num_train_sequences=num_steps * batch_size,
                mixer_options=mixer_wishes(conv_size, output_gate),
                fixed_steps=fixed_steps,
                length_buckets=length_buckets,
                rule=rule,
                min_length=min_length,
                max_length=max_length,
                multiples=multiples,
                num_test=num_test,
            )
            for rule in rules
        ]

    def tasks(self) -> list[Task]:
        """In the order of `rules`."""
        return list(self._tasks)
