"""Interfaces of evaluations, whose fields are their settings.

A `CheckpointEvaluation` reads a trained model. A `SystemEvaluation` measures its own models in a separate process. A
`Probe` declares small models that are trained on synthetic data. A `bench.base.Bench` measures an operator.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch

from attnbench.mixers.around import Gate
from attnbench.mixers.layers import INITIAL_DEVIATION
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.combinations import can_end_early
from attnbench.settings.errors import UserError
from attnbench.settings.options import Options, option
from attnbench.settings.registry import is_own
from attnbench.settings.schema import BFLOAT16_WEIGHTS, PRECISIONS, ModelSettings
from attnbench.training.prepare import Run
from attnbench.training.step import Batch

NUM_SELECTION = 500
"""Validation sequences whose `scoring.mean_accuracy` is a training's `selection`, by which rates are chosen."""


Subject = Run
"""The run that an evaluation measures, with its corpus, its settings, and models that it builds or loads."""


class Evaluation(Options):
    """A measurement. Its fields are the schema of its yaml, see `settings.options`."""

    name: ClassVar[str]
    """The class's name in messages and probes' models: state_tracking."""

    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(metric, axis in settings) pairs that a report draws."""

    headline: ClassVar[tuple[Headline, ...]] = ()
    """Columns of a summary; by default one of the first metric."""

    primary: ClassVar[Primary | None] = None
    """The metric that verdicts are about; None: every number is descriptive."""

    smoke: ClassVar[dict[str, Any]] = {}
    """Settings that finish on a CPU in a second."""

    one_more: ClassVar[dict[str, Any]] = {}
    """Changes to `smoke`: an axis with one value more, which may change no other row; empty without an axis."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Judge an evaluation from outside attnbench at the largest value of its plots' axes by default."""
        super().__init_subclass__(**given)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        primary = cls.primary
        if primary is not None and not primary.hardest and not is_own(cls.__module__):
            axes = [axis for metric, axis in cls.plots if metric == primary.metric and axis not in primary.settings]
            cls.primary = replace(primary, hardest=axes)


class CheckpointEvaluation(Evaluation, ABC):
    @abstractmethod
    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Yield each number as soon as it is known."""

    def failed(self, subject: Subject, status: str, reason: str) -> Iterator[Measurement]:
        """Yield rows without numbers in place of the compared scores after a failed training."""
        yield from ()


class SystemEvaluation(Evaluation, ABC):
    own_sizes: ClassVar[bool] = False
    """True if its models have their own sizes, so that its rows are not of the run's model."""

    @property
    def trains(self) -> bool:
        """True if its numbers depend on the text."""
        return False

    @abstractmethod
    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Yield each number as soon as it is known, also a row for a setting that does not fit."""


class Probe(Evaluation, ABC):
    """Small models trained from scratch on synthetic sequences. `tasks` narrows a probe to each of its models;
    everything else here is about one."""

    num_layers: int = option(2, "blocks", minimum=1)
    num_steps: int = option(1000, "the most that a training makes", minimum=1)
    fixed_steps: bool = option(False, "true: all steps; false: once solved the rate falls and it ends")
    stop_at: float | None = option(
        None,
        "with fixed_steps, accuracy on validation data that ends a training at once; null: none",
        above=0,
        maximum=1,
    )
    batch_size: int = option(64, "sequences a step", minimum=1)
    warmup_steps: int | None = option(None, "steps in which the learning rate rises from 0; null: 50", minimum=0)
    decay_fraction: float | None = option(
        None,
        "share of the steps over which the rate falls in a line at the end; 0: it stays; null: 0.2, and with "
        "fixed_steps a cosine over all",
        minimum=0,
        maximum=1,
    )
    final_rate_fraction: float | None = option(
        None, "the rate ends at this share of its peak; null: 0.1", minimum=0, maximum=1
    )
    rate_interval_steps: int | None = option(
        None, "the rate changes at every so many steps alone: an epoch's, say; null: at each", minimum=1
    )
    weight_decay: float | None = option(None, "AdamW's; null: 0.1", minimum=0)
    beta1: float | None = option(None, "AdamW's, of the mean of gradients; null: 0.9", minimum=0, below=1)
    beta2: float | None = option(None, "AdamW's, of the mean of their squares; null: 0.95", minimum=0, below=1)
    epsilon: float | None = option(None, "AdamW's; null: 1e-8", above=0)
    clip_norm: float | None = option(
        None, "longer gradients are shortened to this norm; 0: none are; null: 1", minimum=0
    )
    num_test: int = option(1000, "test sequences of each kind", minimum=1)
    conv_size: int | None = option(
        4,
        "taps of the short convolution, of mixers that have one, unless a variant names it; null: as each mixer's yaml",
        minimum=0,
    )
    output_gate: Gate | None = option(
        "none",
        "none | silu | sigmoid, of mixers that have a gate, unless a variant names it; null: as each mixer's yaml",
    )
    initial_deviation: float | None = option(
        None, "of the projections' weights; null: 0.02 × sqrt(768 / width), GPT-2's carried to this width", above=0
    )
    norm: str | None = option(None, "of the residual stream: layer (with a bias); null: RMS norm", choices=("layer",))
    untied: bool = option(False, "true: the logits have weights of their own, not the embedding's")
    embedding_dropout: float | None = option(
        None, "share of the embedding's elements that a training step drops; null: none", above=0, below=1
    )
    doubled_residual: bool = option(False, "true: a block without feed-forward ends with x + norm(x), as in Zoology")
    learning_rates: list[float] = option(
        [1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        "half decades; chosen on validation data, see docs/protocol.md",
        distinct=True,
        rising=True,
        above=0,
    )
    precision: str = option(
        "float32",
        "float32 | tf32 | bfloat16 | bfloat16_weights (weights, gradients and moments too)",
        choices=("auto", *PRECISIONS, BFLOAT16_WEIGHTS),
    )

    length_buckets: ClassVar[bool] = False
    """Batches have sequences of about one length, cut behind their last label. Changes each step's mean loss."""
    former: ClassVar[dict[str, Any]] = {}
    """Options that came later, at the values that leave a training as it was; those stay out of its identity."""
    not_in_content: ClassVar[tuple[str, ...]] = ()
    """Options that `content` leaves out, because its other entries state them."""
    check_interval_steps: ClassVar[int | None] = None
    """Steps between two looks at validation data, whose rows then say how fast accuracy rose; None: as `solving`."""

    def __post_init__(self) -> None:
        self.learning_rates = [float(rate) for rate in self.learning_rates]
        group = f"eval.{self.name}"
        if self.stop_at is not None and not self.fixed_steps:
            raise UserError(f"{group}.stop_at={self.stop_at}: needs {group}.fixed_steps=true")
        if self.doubled_residual and getattr(self, "feed_forward_width", None):
            raise UserError(f"{group}.doubled_residual=true: needs models without, {group}.feed_forward_width=0")
        if not self.fixed_steps and self.decay_fraction is not None and not can_end_early(self.decay_fraction):
            raise UserError(
                f"{group}.decay_fraction={self.decay_fraction}: must be above 0 and at most 0.5, or "
                f"{group}.fixed_steps=true"
            )

    def tasks(self) -> Sequence["Probe"]:
        """Return the probe narrowed to each model that it trains; each has its own learning rate."""
        return [self]

    @property
    def settings(self) -> dict[str, Any]:
        """Axes that tell a task from the probe's others, in all its rows: {"delay": 4}."""
        return {}

    @property
    @abstractmethod
    def model(self) -> ModelSettings: ...

    @property
    @abstractmethod
    def vocabulary_size(self) -> int: ...

    @property
    def num_train_sequences(self) -> int:
        return self.num_steps * self.batch_size

    @property
    def parts(self) -> Sequence["Probe"]:
        """Return the probe narrowed to the batches of each shape, in the order of an epoch; none: all have one
        shape."""
        return ()

    @property
    def mixer_options(self) -> dict[str, Any]:
        """Wishes, like {"conv_size": 4}: a mixer without such an option goes without, and its rows say so."""
        wishes = {"conv_size": self.conv_size, "output_gate": self.output_gate}
        return {name: value for name, value in wishes.items() if value is not None}

    @property
    def training(self) -> dict[str, Any]:
        """Settings of the training that are unusual for probes."""
        return {name: value for name in OF_TRAINING if (value := getattr(self, name)) is not None}

    @abstractmethod
    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """Make sequences start ... start + count - 1 of a split (train, validation, test), a function of (split, seed,
        index).

        Returns tokens (B, T), targets (B, L), weight (B, L) with 0 for absent labels, positions (B, L): of one shape
        for every `start`.
        """

    @abstractmethod
    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """Yield the scores on test data, with chance levels and numbers of labels."""

    @abstractmethod
    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return metric and settings of every score, for the rows of a failed training."""

    def content(self) -> dict[str, Any]:
        """Return everything that decides a task's numbers, except its model."""
        apart = {*NOT_OF_TASK, *self.not_in_content, "width", "head_width", "feed_forward_width"}
        given = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in apart}
        own = {name: value for name, value in given.items() if name not in self.former or value != self.former[name]}
        derived = ("settings", "vocabulary_size", "num_train_sequences", "length_buckets", "check_interval_steps")
        return {**own, **{name: getattr(self, name) for name in derived}, "mixer_options": self.mixer_options}

    def _model(self, width: int, head_width: int, feed_forward_width: int, name: str = "") -> ModelSettings:
        # GPT-2's 0.02 is for a width of 768. Scores of a narrow model would start so near to 0 that some seeds lose
        # hundreds of steps.
        deviation = INITIAL_DEVIATION * (768 / width) ** 0.5
        return ModelSettings(
            name=name or self.name,
            dim=width,
            num_layers=self.num_layers,
            head_width=head_width,
            feed_forward_width=feed_forward_width,
            initial_deviation=deviation if self.initial_deviation is None else self.initial_deviation,
            norm=self.norm,
            untied=self.untied,
            dropout=self.embedding_dropout,
            dropout_of="embedding" if self.embedding_dropout else None,
            doubled_residual=self.doubled_residual,
        )


OF_TRAINING = ("warmup_steps", "decay_fraction", "final_rate_fraction", "rate_interval_steps", "weight_decay")
OF_TRAINING += ("beta1", "beta2", "epsilon", "clip_norm")
"""Options of a probe that are settings of its training."""

NOT_OF_TASK = ("num_layers", "conv_size", "output_gate", "initial_deviation", "norm", "untied", "learning_rates")
NOT_OF_TASK += ("embedding_dropout", "doubled_residual", "precision", *OF_TRAINING)
"""Options of a probe's model, wishes and training."""


class SizedProbe(Probe, ABC):
    """A probe whose models have one size, given by its options."""

    width: int = option(64, "of the model", minimum=1)
    head_width: int = option(32, "channels a head", minimum=1)
    feed_forward_width: int = option(168, "hidden channels of the SwiGLU; 0 for none", minimum=0)

    @property
    def model(self) -> ModelSettings:
        return self._model(self.width, self.head_width, self.feed_forward_width)
