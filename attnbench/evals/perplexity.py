"""Perplexity with full context, over a whole split, by position in the window, and beyond the training length."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from attnbench.data.batches import evaluation_batches, evaluation_shape
from attnbench.evals.base import CheckpointEvaluation, Subject
from attnbench.evals.lib.token_scores import FULL_CONTEXT, Place, rows_without_numbers, score_rows
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import character_nats
from attnbench.results.metrics import Primary
from attnbench.results.rows import TEST_OF_BEST, Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option
from attnbench.training.log import watched

NO_TEST_SPLIT = "the corpus has no test split (data.test_fraction=0)"

SCORED = {**TEST_OF_BEST, **FULL_CONTEXT}
"""Settings of the scores that variants are compared by."""


class Perplexity(CheckpointEvaluation):
    """The language model on validation and test: with full context, over all positions, and by position.

    exp of (sum of nats over sum of tokens), also as nats and bits a character and as bits a byte of UTF-8; an unknown
    character costs eight bits a byte beside its nats.

    The split is cut into consecutive windows. Over all positions, every token but the split's first is predicted once.
    With full context (`context: full`), the last half of each window counts, and in place of each first half the last
    half of a window that lies half a window further on. Intervals of single rows are over blocks of text, or over
    authors where the corpus has them (data=books). `chance` is the perplexity of the training split's token
    frequencies.
    """

    extrapolation: list[int] = option(
        [2, 4, 8], "multiples of the training length at which the final model is measured too, on test", minimum=1
    )
    characters: int | None = option(
        None, "read the first characters of each split alone; null: all, which a CPU takes minutes for", minimum=2
    )
    batch_tokens: int = option(32768, "characters in one forward pass; changes the memory, not the result", minimum=1)

    plots = (("perplexity", "sequence_length"), ("nats_per_character", "position_bucket"))
    headline = tuple(
        Headline(metric, words, settings=SCORED, pick="each", judged_by="nats_per_character")
        for metric, words in (("perplexity", "test PPL"), ("bits_per_byte", "test bits/byte"))
    )
    primary = Primary(metric="nats_per_character", kind="nats", margin=math.log(1.01), settings=SCORED)
    smoke = {"extrapolation": [2], "batch_tokens": 512}
    one_more = {"extrapolation": [2, 4]}

    def failed(self, subject: Subject, status: str, reason: str) -> Iterator[Measurement]:
        for checkpoint, split in product(("best", "final"), ("validation", "test")):
            places = self._places(subject, split, checkpoint, subject.seq_len)
            yield from rows_without_numbers(places, status, reason)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Yield both splits for the best and the final checkpoint, then longer windows for the final one."""
        for checkpoint in ("best", "final"):
            model = subject.trained_model(checkpoint)
            for split in ("validation", "test"):
                places = self._places(subject, split, checkpoint, subject.seq_len)
                if not len(subject.corpus.tokens[split]):
                    yield from rows_without_numbers(places, "unsupported", NO_TEST_SPLIT)
                    continue
                yield from score_rows(places, *self._nats(model, subject, split, subject.seq_len))
            if checkpoint == "final":
                for multiple in self.extrapolation:
                    yield from self._longer(model, subject, multiple * subject.seq_len)

    def _longer(self, model: LanguageModel, subject: Subject, length: int) -> Iterator[Measurement]:
        places, num_test = self._places(subject, "test", "final", length), len(self._part(subject, "test")[0])
        if length > num_test:
            units = subject.corpus.tokenizer.units
            reason = f"of the test split {num_test} {units} are read" if num_test else NO_TEST_SPLIT
            yield from rows_without_numbers(places, "unsupported", reason)
            return
        scores = attempt(lambda: self._nats(model, subject, "test", length))
        if isinstance(scores, OutOfMemory):
            yield from rows_without_numbers(places, "out_of_memory", scores.reason)
            return
        yield from score_rows(places, *scores)

    def _nats(self, model: LanguageModel, subject: Subject, split: str, length: int) -> tuple[Tensor, Tensor]:
        """Return the nats of each token over all positions, and with full context."""
        batch_size, (tokens_N, _) = max(1, self.batch_tokens // length), self._part(subject, split)
        tokens_N = tokens_N.to(subject.device)

        def nats(start: int) -> Tensor:
            batches = evaluation_batches(tokens_N[start:], length, batch_size)
            number, num_rows = evaluation_shape(len(tokens_N) - start, length, batch_size)
            what = f"{split} T{length}{' shifted' * bool(start)}"
            return character_nats(model, watched(batches, number, num_rows * length, what), subject.precision)

        all_N = nats(0)
        return all_N, full_context(all_N, nats, length)

    def _part(self, subject: Subject, split: str) -> tuple[Tensor, dict[str, int]]:
        return subject.corpus.first_characters(split, self.characters)

    def _places(self, subject: Subject, split: str, checkpoint: str, length: int) -> list[Place]:
        tokens_N, part = self._part(subject, split)
        authors_N = subject.corpus.authors(split)
        axes = {"split": split, "checkpoint": checkpoint, "sequence_length": length, **part}
        return [
            Place(
                axes | context,
                length,
                subject.corpus,
                tokens_N[1 + start :],
                None if authors_N is None else authors_N[1 + start : len(tokens_N)],
            )
            for context, start in (({}, 0), (FULL_CONTEXT, length // 2))
        ]


def full_context(all_N: Tensor, nats: Callable[[int], Tensor], length: int) -> Tensor:
    """Return the nats of every token from half a window on, each at a position in the last half of its window: in turn
    from `all_N`, the nats of consecutive windows, and from windows half a window later, by `nats` of the text from an
    index on."""
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(len(all_N))[half:]
    full_N, is_shifted_N = all_N[half:].clone(), index_N % length < half
    if is_shifted_N.any():
        full_N[is_shifted_N] = nats(shift)[index_N[is_shifted_N] - shift]
    return full_N
