"""The interface of an evaluation: a class with typed settings that turns a subject into measurements."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch

from attnbench.data import Corpus
from attnbench.model import LanguageModel
from attnbench.results import Measurement


class Subject(Protocol):
    """What is evaluated: a mixer in a model of a certain size, with a seed, on a device, on a corpus."""

    mixer: str
    seed: int
    seq_len: int
    device: torch.device
    precision: str
    corpus: Corpus

    def new_model(self, **changes: Any) -> LanguageModel:
        """A model with initial weights; `changes` to its ModelSettings."""
        ...

    def trained_model(self, which: str = "final") -> LanguageModel:
        """The trained model, of the `final` or the `best` checkpoint."""
        ...


class Evaluation(ABC):
    """The constructor's signature is the schema of the yaml: keyword-only, typed, no **kwargs."""

    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(metric, axis in settings) pairs that a report draws."""

    smoke: ClassVar[dict[str, Any]] = {}
    """Settings that finish on a CPU in a second."""

    @abstractmethod
    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Each number as soon as it is known; the caller stamps whose it is and writes it."""
