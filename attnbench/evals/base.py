"""The interfaces of evaluations: classes with typed settings that turn a subject or a small training into measurements.

Three kinds, by what they need. A `CheckpointEvaluation` reads a trained model. A `SystemEvaluation` times or weighs
models of its own, so the runner gives it a process of its own. A `Probe` declares tasks: small models trained from
scratch on synthetic data; it does not train them itself, because learning rates and seeds are the runner's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch

from attnbench.data.corpus import Corpus
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.registry import is_own
from attnbench.settings.schema import ModelSettings, TrainSettings
from attnbench.training.step import Batch


class Subject(Protocol):
    """A mixer to evaluate: in a model of a certain size, with a seed, on a device, on a corpus."""

    device: torch.device
    precision: str
    compile: bool
    """True where training steps are compiled."""
    corpus: Corpus

    @property
    def mixer(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def train(self) -> TrainSettings: ...

    def builder(self, model: ModelSettings | None = None, seed: int | None = None) -> Callable[[], LanguageModel]:
        """Return a builder of the model with initial weights, matched at its size; it can be sent to another process.

        Args:
            model: another size; None for the run's own.
            seed: of the weights; None for the run's own.

        Raises:
            UserError: the mixer cannot be matched or built at that size.
        """
        ...

    def new_model(self, model: ModelSettings | None = None, seed: int | None = None) -> LanguageModel:
        """Build the model that `builder` is of."""
        ...

    def trained_model(self, which: str = "final") -> LanguageModel:
        """Load the trained model, of the `final` or the `best` checkpoint."""
        ...


class Evaluation:
    """The constructor's signature is the schema of the yaml: keyword-only, typed, no **kwargs."""

    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(metric, axis in settings) pairs that a report draws."""

    headline: ClassVar[tuple[Headline, ...]] = ()
    """Columns of a summary; none: one of the first metric."""

    primary: ClassVar[Primary | None] = None
    """The metric that verdicts are about; None: all that it measures is descriptive."""

    smoke: ClassVar[dict[str, Any]] = {}
    """Settings that finish on a CPU in a second."""

    one_more: ClassVar[dict[str, Any]] = {}
    """Changes to `smoke`: an axis with one value more, which may change no other row; empty where there is no axis."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Judge an evaluation from outside attnbench at the largest value of its plots' axes, unless it says where."""
        super().__init_subclass__(**given)
        primary = cls.primary
        if primary is not None and not primary.hardest and not is_own(cls.__module__):
            axes = [axis for metric, axis in cls.plots if metric == primary.metric and axis not in primary.settings]
            cls.primary = replace(primary, hardest=axes)


class CheckpointEvaluation(Evaluation, ABC):
    """Evaluation that measures a trained model."""

    @abstractmethod
    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Yield each number as soon as it is known; the caller stamps whose it is and writes it."""

    def failed(self, subject: Subject, status: str, reason: str) -> Iterator[Measurement]:
        """Yield rows without numbers in place of the scores that are compared, where the training itself failed."""
        yield from ()


class SystemEvaluation(Evaluation, ABC):
    """Evaluation that times or weighs models with initial weights; a separate process, alone on its device, runs it."""

    own_sizes: ClassVar[bool] = False
    """True where its models have sizes of their own, so that its rows are not of the run's model."""

    @property
    def trains(self) -> bool:
        """True where it trains models, so that its numbers depend on the text and not on its speed alone."""
        return False

    @abstractmethod
    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Yield each number as soon as it is known; what does not fit is a row, and the next setting starts clean."""


NUM_SELECTION = 500
"""Validation sequences whose `scoring.mean_accuracy` is a training's `selection`: rates are chosen by it, and it tells
when the task is solved."""


@dataclass(slots=True, kw_only=True)
class Task(ABC):
    """One small model to train from scratch on synthetic sequences, and how it is scored."""

    settings: dict[str, Any]
    """Axes that tell it from the other tasks of its probe, in all its rows: {"sequence_length": 256, ...}."""
    model: ModelSettings
    """Always applied, whatever size the run has: width, depth, head width, feed-forward (0: none)."""
    vocabulary_size: int
    num_steps: int
    """The most that a training makes."""
    batch_size: int
    num_train_sequences: int
    """Training takes them in a new order every epoch."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Wishes, like {"conv_size": 4}: a mixer without such a setting does not get it, and its rows say so."""
    fixed_steps: bool = False
    """All steps are made, with a cosine; otherwise a training that has solved the task ends, see `solving`."""
    length_buckets: bool = False
    """The sequences of a training batch are of about one length, so that little of it is padding. Changes the result:
    each step's loss is a mean over the labels of its lengths. What stands behind a sequence's last label is cut off."""
    check_interval_steps: int | None = None
    """Steps between two looks at validation data, whose rows then say how fast accuracy rose; None: as `solving`."""

    @abstractmethod
    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        """Sequences start ... start + count - 1 of a split (train, validation, test), in bulk, on the device.

        A function of (split, seed, index) alone: the same on every device, whatever was asked for before.

        Returns:
            tokens (B, T), targets (B, L), weight (B, L) with 0 for absent labels, positions (B, L): all of one shape
            for every `start`.
        """

    @abstractmethod
    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        """The scores on test data, each with its chance level in the settings and its labels as num_samples."""

    @abstractmethod
    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """Metric and settings of every score, so that a training that gave none has rows that say why."""


class Probe(Evaluation, ABC):
    """Small models trained from scratch.

    Attributes:
        learning_rates: the grid; the runner chooses by `selection` on seeds that are not scored.
        precision: of the training, as train.precision.
    """

    learning_rates: list[float]
    precision: str

    @abstractmethod
    def tasks(self) -> list[Task]:
        """One or several; each has a rate of its own."""

    def rate_source(self, task: Task) -> Task | None:
        """Another of its tasks whose rate this one takes over without a search of its own; None: it searches."""
        return None
