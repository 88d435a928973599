"""Perplexity over a whole split, by position in the block, and beyond the training length."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

from torch import Tensor

from attnbench.data.batches import evaluation_batches, first_characters, num_evaluation_batches
from attnbench.evals.base import CheckpointEvaluation, Subject
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.loss import perplexity, split_nats
from attnbench.results.metrics import Primary
from attnbench.results.rows import TEST_OF_BEST, Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.training.log import watched

NO_TEST_SPLIT = "the corpus has no test split (data.test_fraction=0)"

UNITS = {"perplexity": "1", "bits_per_character": "bit", "nats_per_character": "nat"}


class Perplexity(CheckpointEvaluation):
    """exp of (sum of nats over sum of characters), also as nats and as bits a character.

    Every character but a split's first is predicted once, from those before it in its block.

    Args:
        extrapolation: multiples of the training length at which the final model is measured too, on the test split.
        characters: of each split that are read, the first ones; None: all. Rows of a part name it.
        batch_tokens: characters in one forward pass; changes the memory, not the result.

    Raises:
        UserError: a multiple that is no positive whole number, or fewer than two characters.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("perplexity", "sequence_length"),
        ("nats_per_character", "position_bucket"),
    )
    headline: ClassVar[tuple[Headline, ...]] = (Headline("perplexity", "test PPL", settings=TEST_OF_BEST, pick="each"),)
    primary: ClassVar[Primary] = Primary(
        metric="nats_per_character", kind="nats", margin=math.log(1.01), settings=TEST_OF_BEST
    )
    smoke: ClassVar[dict[str, Any]] = {"extrapolation": [2], "batch_tokens": 4096}
    one_more: ClassVar[dict[str, Any]] = {"extrapolation": [2, 4]}

    def __init__(self, *, extrapolation: list, characters: int | None, batch_tokens: int) -> None:
        if not all(type(multiple) is int and multiple > 0 for multiple in extrapolation):
            raise UserError(f"eval.perplexity.extrapolation={extrapolation}: must be positive whole numbers")
        if characters is not None and characters < 2:
            raise UserError(f"eval.perplexity.characters={characters}: must be at least 2, or null for all")
        self.extrapolation = extrapolation
        self.characters = characters
        self.batch_tokens = batch_tokens

    def failed(self, subject: Subject, status: str, reason: str) -> Iterator[Measurement]:
        """Both splits for both checkpoints, at the training length."""
        for checkpoint, split in product(("best", "final"), ("validation", "test")):
            axes = self._axes(subject, split, checkpoint, subject.seq_len)
            yield from without_numbers(UNITS, axes, status, reason)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Both splits for the final and the best checkpoint, then positions and longer blocks for the final one."""
        for checkpoint in ("best", "final"):
            model = subject.trained_model(checkpoint)
            for split in ("validation", "test"):
                axes = self._axes(subject, split, checkpoint, subject.seq_len)
                if not len(subject.corpus.tokens[split]):
                    yield from without_numbers(UNITS, axes, "unsupported", NO_TEST_SPLIT)
                    continue
                nats_T, count_T = self._nats(model, subject, split, subject.seq_len)
                yield from _measurements(float(nats_T.sum()), round(float(count_T.sum())), axes)
                if (checkpoint, split) == ("final", "test"):
                    yield from _by_position(nats_T, count_T, axes)
            if checkpoint == "final":
                for multiple in self.extrapolation:
                    length = multiple * subject.seq_len
                    axes = self._axes(subject, "test", "final", length)
                    num_test = len(self._part(subject, "test")[0])
                    if length > num_test:
                        reason = f"of the test split {num_test} characters are read" if num_test else NO_TEST_SPLIT
                        yield from without_numbers({"perplexity": UNITS["perplexity"]}, axes, "unsupported", reason)
                        continue
                    result = attempt(lambda length=length, model=model: self._nats(model, subject, "test", length))
                    if isinstance(result, OutOfMemory):
                        yield from without_numbers(UNITS, axes, "out_of_memory", result.reason)
                        continue
                    nats_T, count_T = result
                    yield from _measurements(float(nats_T.sum()), round(float(count_T.sum())), axes)

    def _nats(self, model: Any, subject: Subject, split: str, length: int) -> tuple[Tensor, Tensor]:
        batch_size, (tokens_N, _) = max(1, self.batch_tokens // length), self._part(subject, split)
        batches = evaluation_batches(tokens_N.to(subject.device), length, batch_size)
        number = num_evaluation_batches(len(tokens_N), length, batch_size)
        return split_nats(model, watched(batches, number, batch_size * length, f"{split} T{length}"), subject.precision)

    def _part(self, subject: Subject, split: str) -> tuple[Tensor, dict[str, int]]:
        return first_characters(subject.corpus.tokens[split], self.characters)

    def _axes(self, subject: Subject, split: str, checkpoint: str, length: int) -> dict[str, Any]:
        part = self._part(subject, split)[1]
        return {"split": split, "checkpoint": checkpoint, "sequence_length": length, **part}


def _measurements(nats: float, count: int, axes: dict[str, Any]) -> Iterator[Measurement]:
    mean = nats / count
    values = {"perplexity": perplexity(mean), "bits_per_character": mean / math.log(2), "nats_per_character": mean}
    for metric, value in values.items():
        yield _measurement(metric, value, mean, axes, count)


def _measurement(metric: str, value: float, mean: float, axes: dict[str, Any], count: int) -> Measurement:
    unit = UNITS[metric]
    if math.isfinite(value):
        return Measurement(metric=metric, value=value, unit=unit, settings=axes, num_samples=count)
    reason = f"{mean:.4g} nats a character"
    return Measurement(metric=metric, value=None, unit=unit, settings=axes, status="diverged", reason=reason)


def _by_position(nats_T: Tensor, count_T: Tensor, axes: dict[str, Any]) -> Iterator[Measurement]:
    """Nats a character in the buckets 0, 1, 2-3, 4-7, ... of positions in the block."""
    start, stop = 0, 1
    while start < len(nats_T):
        end = min(stop, len(nats_T))
        count = round(float(count_T[start:end].sum()))
        mean = float(nats_T[start:end].sum()) / count
        bucket = {**axes, "position_bucket": f"{start}-{end - 1}"}
        yield _measurement("nats_per_character", mean, mean, bucket, count)
        start, stop = stop, 2 * stop
