"""Probes on strings of several lengths."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from attnbench.evals.base import NUM_SELECTION, SizedProbe
from attnbench.evals.lib.task_data import in_pieces, lengths_between
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.options import option
from attnbench.training.step import Batch

LENGTH = 0
"""Purpose of the hash that draws a length; a probe's own purposes follow."""


class StringProbe(SizedProbe, ABC):
    """Training lengths are uniform over min_length ... max_length; validation takes these lengths in turn; tests have
    one length each. A string is a function of (split, seed, index)."""

    not_in_content = ("num_train",)
    min_length: ClassVar[int] = 1
    validated_on: ClassVar[str] = "all trained lengths mixed"
    """In words, where validation data and a test differ."""
    max_length: int = option(40, "and of the longest", minimum=1)
    num_train: int | None = option(
        None, "training strings, taken in a new order every epoch; null: new ones at each step", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value(f"eval.{self.name}.num_train", self.num_train_sequences, minimum=self.batch_size)
        word = f"eval.{self.name}.max_length={self.max_length}"
        if self.max_length < self.min_length:
            raise UserError(f"{word}: must be at least min_length={self.min_length}")
        if self.max_length >= self.min_length + NUM_SELECTION:
            raise UserError(f"{word}: must be at most {self.min_length + NUM_SELECTION - 1}")

    @property
    def num_train_sequences(self) -> int:
        return super().num_train_sequences if self.num_train is None else self.num_train

    @abstractmethod
    def batch(self, split: str, seed: int, index_B: Tensor, length_B: Tensor, longest: int) -> Batch:
        """Make the strings of these indices and lengths, with room for `longest`."""

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return self._strings(split, seed, start, count, device, self.min_length, self.max_length)

    def test_sequences(self, seed: int, lengths: int | list[int], device: torch.device) -> Batch:
        """Make the test strings of one length, or of the range `lengths` in turn."""
        shortest, longest = (lengths, lengths) if isinstance(lengths, int) else lengths
        return self._strings("test", seed, 0, self.num_test, device, shortest, longest)

    def _strings(
        self, split: str, seed: int, start: int, count: int, device: torch.device, shortest: int, longest: int
    ) -> Batch:
        def make(index_B: Tensor) -> Batch:
            length_B = lengths_between(split, seed, index_B, shortest, longest, purpose=LENGTH)
            return self.batch(split, seed, index_B, length_B, longest)

        return in_pieces(make, start, count, device)
