import logging
import math
from collections.abc import Iterator
from itertools import product

from torch import Tensor

from attnbench.data.batches import evaluation_batches, evaluation_shape
from attnbench.evals.base import CheckpointEvaluation, Subject
from attnbench.evals.lib.slices import slice_rows
from attnbench.evals.lib.token_scores import (
    FULL_CONTEXT,
    Place,
    context_starts,
    full_context,
    rows_without_numbers,
    score_rows,
)
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import character_nats
from attnbench.results.metrics import Primary
from attnbench.results.rows import TEST_OF_BEST, Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option
from attnbench.training.log import watched

log = logging.getLogger(__name__)

NO_TEST_SPLIT = "the corpus has no test split (data.test_fraction=0)"

SCORED = {**TEST_OF_BEST, **FULL_CONTEXT}
"""Settings of the scores that variants are compared by."""


class Perplexity(CheckpointEvaluation):
    """The language model on validation and test: with full context, over all positions, and by position.

    exp of (sum of nats over sum of tokens), also as nats and bits a character and as bits a byte of UTF-8; an unknown
    character costs eight bits a byte beside its nats. Every token predicts the next:

        input   t h e _ r i v e
        target  h e _ r i v e r

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
    slice_ngram: int | None = option(
        None,
        "nats, too, of test tokens that end an n-gram of so many tokens which their context has already, and of the "
        "others; Zoology's is of 2 BPE tokens; null: none",
        minimum=1,
    )
    slice_max_count: int | None = option(
        None, "of those n-grams, occurrences in the training split at most; Zoology's is 1250; null: any", minimum=1
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
                nats = self._nats(model, subject, split, subject.seq_len)
                yield from score_rows(places, *nats)
                if self.slice_ngram is not None and (checkpoint, split) == ("final", "test"):
                    yield from self._slices(places[1], nats[1], self._part(subject, split)[0])
            if checkpoint == "final":
                for multiple in self.extrapolation:
                    yield from self._longer(model, subject, multiple * subject.seq_len)

    def _slices(self, place: Place, full_N: Tensor, text_N: Tensor) -> Iterator[Measurement]:
        assert self.slice_ngram is not None
        if len(full_N):
            starts_N = context_starts(len(text_N) - 1, place.length)
            yield from slice_rows(place, full_N, text_N, starts_N, self.slice_ngram, self.slice_max_count)

    def _longer(self, model: LanguageModel, subject: Subject, length: int) -> Iterator[Measurement]:
        places, num_test = self._places(subject, "test", "final", length), len(self._part(subject, "test")[0])
        units = subject.corpus.tokenizer.units
        if length > num_test:
            reason = f"of the test split {num_test} {units} are read" if num_test else NO_TEST_SPLIT
            yield from rows_without_numbers(places, "unsupported", reason)
            return
        log.info(f"perplexity at {length:,} {units} (trained: {subject.seq_len:,})")
        scores = attempt(lambda: self._nats(model, subject, "test", length))
        if isinstance(scores, OutOfMemory):
            yield from rows_without_numbers(places, "out_of_memory", scores.reason)
            return
        yield from score_rows(places, *scores)

    def _nats(self, model: LanguageModel, subject: Subject, split: str, length: int) -> tuple[Tensor, Tensor]:
        """Return nats over all positions, and with full context."""
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
