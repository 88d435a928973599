"""Four of MAD's tasks: recall with fuzzy keys or among noise, compression, and memorisation of fixed facts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.base import Probe, Task
from attnbench.evals.lib.mad_rules import MAD_RULES
from attnbench.evals.lib.options import check_training, mixer_wishes, probe_deviation
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.evals.lib.task_data import SPLITS, hashes_in_split, in_pieces
from attnbench.mixers.around import Gate
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch


@dataclass(slots=True, kw_only=True)
class MadTask(Task):
    """Sequences of one of the rules of lib/mad_rules.py, whose docstrings define them:

        noisy_recall   input  k3 v1 ~ k5 v2 k3 v1 ~ k5 v2     target  . . . . . v1 . . v2 .
        fuzzy_recall   input  k3 v1 v4 k1 k6 v2 k3 v1 v4      target  . . . . . . v1 v4 .
        compression    input  a c b <c> 2 0 1                 target  . . . . b a c
        memorisation   input  k7 _ k2 _                       target  . v3 . v9

    Where MAD's own differ: its noise replaces no symbol at a known rate a unit, its fuzzy keys may begin each other,
    so that a model cannot tell where one ends; its compression decodes one position's output with a perceptron, here
    the model itself is asked, so that attention may look back and only a recurrent state has to compress.
    """

    rule: str
    length: int
    num_test: int

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """See Task."""
        rule = MAD_RULES[self.rule]

        def make(index_B: Tensor) -> Batch:
            hash_B = hashes_in_split(
                split,
                hashed(0, seed, SPLITS[split], index_B),
                lambda hash_R, _: rule.batch(hash_R, seed, self.length).tokens_BT,
            )
            return rule.batch(hash_B, seed, self.length)

        return in_pieces(make, start, count, device)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Accuracy over all labels."""
        batch = self.sequences("test", seed, 0, self.num_test, device)
        assert batch.weight_BT is not None
        yield accuracy(correct_labels(model, batch)[batch.weight_BT > 0], *self.axes()[0])

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """See Task."""
        return [("accuracy", {**self.settings, "split": "test", "chance": 1 / MAD_RULES[self.rule].num_answers})]


class Mad(Probe):
    """Small models trained on tasks after MAD, one for each.

    Args:
        cells: pairs [task, length], the length in positions, of compression in symbols to keep.
        width: of the model; with `num_layers`, `head_width` and `feed_forward_width` always applied.
        conv_size, output_gate: of every mixer that has them; null leaves each its own.
        num_steps: the most that a training makes.
        fixed_steps: all of them, with a cosine; false: a training ends once it has solved its task, see `solving`.
        num_train: sequences, which every epoch takes in a new order.
        num_test: test sequences.
        initial_deviation: of the projections; null: see options.probe_deviation.

    Raises:
        UserError: a value out of its range.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (("accuracy", "rule"),)
    headline: ClassVar[tuple[Headline, ...]] = (
        Headline("accuracy", "MAD", axes=("rule",), label=("rule",), pick="each", higher_is_better=True),
    )
    primary: ClassVar[Primary] = Primary(metric="accuracy", kind="accuracy", margin=0.01)
    smoke: ClassVar[dict[str, Any]] = {
        **{"cells": [["noisy_recall", 56], ["memorisation", 8]]},
        **{"width": 16, "head_width": 8, "feed_forward_width": 0, "num_steps": 5, "batch_size": 8},
        **{"num_train": 64, "num_test": 16, "learning_rates": [1e-2]},
    }
    one_more: ClassVar[dict[str, Any]] = {"cells": [["fuzzy_recall", 56], ["noisy_recall", 56], ["memorisation", 8]]}

    def __init__(
        self,
        *,
        cells: list,
        width: int,
        num_layers: int,
        head_width: int,
        feed_forward_width: int,
        conv_size: int | None,
        output_gate: Gate | None,
        num_steps: int,
        fixed_steps: bool,
        batch_size: int,
        num_train: int,
        num_test: int,
        initial_deviation: float | None,
        learning_rates: list,
        precision: str,
    ) -> None:
        counts = {"width": width, "num_layers": num_layers, "head_width": head_width, "num_steps": num_steps}
        check_counts("eval.mad", **counts, batch_size=batch_size, num_test=num_test)
        check_counts("eval.mad", batch_size, num_train=num_train)
        check_counts("eval.mad", 0, feed_forward_width=feed_forward_width, conv_size=conv_size)
        # A list, in which a word of any type can be looked for.
        names = [*MAD_RULES]
        if not cells or any(not (isinstance(cell, list) and len(cell) == 2 and cell[0] in names) for cell in cells):
            raise UserError(
                f"eval.mad.cells={cells}: must be a list of [task, length], tasks of {', '.join(MAD_RULES)}"
            )
        if len({name for name, _ in cells}) < len(cells):
            raise UserError(f"eval.mad.cells={cells}: each task may stand once")
        for name, length in cells:
            # Nine pairs of six symbols fit, so that a key comes twice; a sequence without a label has no accuracy.
            check_value(f"eval.mad.cells: {name}: length", length, kind=int, minimum=54 if name in RECALLS else 8)
        check_training("eval.mad", learning_rates, precision)
        self.learning_rates, self.precision = [float(rate) for rate in learning_rates], precision
        model = ModelSettings(
            name="mad",
            dim=width,
            num_layers=num_layers,
            head_width=head_width,
            feed_forward_width=feed_forward_width,
            initial_deviation=probe_deviation("eval.mad", initial_deviation, width),
        )
        self._tasks: list[Task] = [
            MadTask(
                settings={"rule": name},
                model=model,
                vocabulary_size=MAD_RULES[name].vocabulary_size(length),
                num_steps=num_steps,
                batch_size=batch_size,
                num_train_sequences=num_train,
                mixer_options=mixer_wishes(conv_size, output_gate),
                fixed_steps=fixed_steps,
                rule=name,
                length=length,
                num_test=num_test,
            )
            for name, length in cells
        ]

    def tasks(self) -> list[Task]:
        """In the order of `cells`."""
        return list(self._tasks)


RECALLS = ("fuzzy_recall", "noisy_recall")
"""Tasks whose labels need a key to come twice."""
