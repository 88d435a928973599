"""Perplexity with full context, over a whole split, by position in the window, and beyond the training length."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.data.batches import evaluation_batches, evaluation_shape
from attnbench.data.corpus import Corpus, Lengths
from attnbench.evals.base import CheckpointEvaluation, Subject
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import character_nats, perplexity
from attnbench.results.metrics import Primary
from attnbench.results.rows import TEST_OF_BEST, Measurement
from attnbench.results.tables import Headline
from attnbench.settings.errors import UserError
from attnbench.training.log import watched

NO_TEST_SPLIT = "the corpus has no test split (data.test_fraction=0)"

UNITS = {"perplexity": "1", "bits_per_character": "bit", "nats_per_character": "nat", "bits_per_byte": "bit"}

FULL_CONTEXT = {"context": "full"}
"""Setting of the scores of tokens that are predicted from at least half a window each."""

SCORED = {**TEST_OF_BEST, **FULL_CONTEXT}
"""Settings of the scores that variants are compared by."""

NUM_BLOCKS = 20
"""Blocks of text that an interval is taken over: longer ones than articles, so that they are about independent."""


class Perplexity(CheckpointEvaluation):
    """exp of (sum of nats over sum of tokens), also as nats and bits a character and as bits a byte of UTF-8.

    Of data.tokenizer=characters, where a token is a character, the first three are one number. Bits a byte are
    comparable whatever the tokenizer; a character that it does not know costs eight bits a byte beside its nats.

    The split is cut into windows that follow each other. Over all positions, every token but the split's first is
    predicted once, from those before it in its window. With full context, the last half of each window counts, and the
    last half of windows that lie half a window further on in place of each first half: every token from half a
    window on is predicted once, from half a window to a whole one (`context: full` in the rows). Intervals of single
    rows are over blocks of text. `chance` is what the frequencies of the training split's tokens reach.

    Args:
        extrapolation: multiples of the training length at which the final model is measured too, on the test split.
        characters: of each split that are read, the first ones; None: all. Rows of a part name it.
        batch_tokens: tokens in one forward pass; changes the memory, not the result.

    Raises:
        UserError: a multiple that is no positive whole number, or fewer than two characters.
    """

    plots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("perplexity", "sequence_length"),
        ("nats_per_character", "position_bucket"),
    )
    headline: ClassVar[tuple[Headline, ...]] = tuple(
        Headline(metric, words, settings=SCORED, pick="each", judged_by="nats_per_character")
        for metric, words in (("perplexity", "test PPL"), ("bits_per_byte", "test bits/byte"))
    )
    primary: ClassVar[Primary] = Primary(
        metric="nats_per_character", kind="nats", margin=math.log(1.01), settings=SCORED
    )
    smoke: ClassVar[dict[str, Any]] = {"extrapolation": [2], "batch_tokens": 512}
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
            places = self._places(subject, split, checkpoint, subject.seq_len)
            yield from _without_numbers(places, status, reason)

    def run(self, subject: Subject) -> Iterator[Measurement]:
        """Both splits for the final and the best checkpoint, then longer windows for the final one."""
        for checkpoint in ("best", "final"):
            model = subject.trained_model(checkpoint)
            for split in ("validation", "test"):
                places = self._places(subject, split, checkpoint, subject.seq_len)
                if not len(subject.corpus.tokens[split]):
                    yield from _without_numbers(places, "unsupported", NO_TEST_SPLIT)
                    continue
                yield from _measurements(places, *self._nats(model, subject, split, subject.seq_len))
            if checkpoint == "final":
                for multiple in self.extrapolation:
                    yield from self._longer(model, subject, multiple * subject.seq_len)

    def _longer(self, model: LanguageModel, subject: Subject, length: int) -> Iterator[Measurement]:
        """Yield the rows of windows longer than those that were trained on."""
        places, num_test = self._places(subject, "test", "final", length), len(self._part(subject, "test")[0])
        if length > num_test:
            units = subject.corpus.tokenizer.units
            reason = f"of the test split {num_test} {units} are read" if num_test else NO_TEST_SPLIT
            yield from _without_numbers(places, "unsupported", reason)
            return
        scores = attempt(lambda: self._nats(model, subject, "test", length))
        if isinstance(scores, OutOfMemory):
            yield from _without_numbers(places, "out_of_memory", scores.reason)
            return
        yield from _measurements(places, *scores)

    def _nats(self, model: LanguageModel, subject: Subject, split: str, length: int) -> tuple[Tensor, Tensor]:
        """Return the nats of each token over all positions, and with full context; see `full_context`."""
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

    def _places(self, subject: Subject, split: str, checkpoint: str, length: int) -> list["Place"]:
        """Return where the scores of a split belong: over all positions, and with full context."""
        tokens_N, part = self._part(subject, split)
        axes = {"split": split, "checkpoint": checkpoint, "sequence_length": length, **part}
        return [
            Place(axes | context, length, subject.corpus, tokens_N[1 + start :])
            for context, start in (({}, 0), (FULL_CONTEXT, length // 2))
        ]


@dataclass(slots=True)
class Place:
    """Tokens that are scored, (N,), and the settings of their scores."""

    axes: dict[str, Any]
    length: int
    corpus: Corpus
    tokens_N: Tensor
    unigram: float | None = field(init=False)
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        count_V = self.corpus.count(self.tokens_N)
        self.lengths = self.corpus.lengths(self.axes["split"], count_V)
        self.unigram = unigram_nats(self.corpus.train_count_V, count_V)

    def settings(self, metric: str) -> dict[str, Any]:
        """Return the settings of the metric's row, the level of chance among them."""
        if self.unigram is None:
            return self.axes
        return {**self.axes, "chance": round(_in(metric, self.unigram, self.lengths), 6)}


def full_context(all_N: Tensor, nats: Callable[[int], Tensor], length: int) -> Tensor:
    """Return the nats of every token from half a window on, each at a position in the last half of its window.

    Half-windows of the text come in turn from the windows behind `all_N` and from those that begin half a window later.

    Args:
        all_N: nats of each token in windows one after the other.
        nats: the same of the text from an index on.
    """
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(len(all_N))[half:]
    full_N, is_shifted_N = all_N[half:].clone(), index_N % length < half
    if is_shifted_N.any():
        full_N[is_shifted_N] = nats(shift)[index_N[is_shifted_N] - shift]
    return full_N


def unigram_nats(train_count_V: Tensor, count_V: Tensor) -> float | None:
    """Return the nats a token of the tokens' frequencies in the training split, each counted once more than it stands
    there; None for no tokens.

    Args:
        count_V: how often each token is among those that are scored.
    """
    if not count_V.any():
        return None
    share_V, count_V = (train_count_V + 1).double(), count_V.double()
    return float(-(count_V * (share_V / share_V.sum()).log()).sum() / count_V.sum())


def block_interval(nats_N: Tensor, length: int) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean over NUM_BLOCKS equal blocks of a text, each at least a window long;
    None for fewer than two blocks, or blocks that do not differ."""
    from scipy.stats import sem, t

    blocks = nats_N.double().tensor_split(max(1, min(NUM_BLOCKS, len(nats_N) // length)))
    means = [float(block.mean()) for block in blocks]
    error = float(sem(means)) if len(means) > 1 else 0.0
    if not 0 < error < math.inf:
        return None
    low, high = t.interval(0.95, len(means) - 1, loc=float(nats_N.double().mean()), scale=error)
    return float(low), float(high)


def _without_numbers(places: Iterable[Place], status: str, reason: str) -> Iterator[Measurement]:
    for place, (metric, unit) in product(places, UNITS.items()):
        settings = place.settings(metric)
        yield Measurement(metric=metric, value=None, unit=unit, settings=settings, status=status, reason=reason)


def _measurements(places: Iterable[Place], all_N: Tensor, full_N: Tensor) -> Iterator[Measurement]:
    for place, nats_N in zip(places, (all_N, full_N), strict=True):
        if not len(nats_N):
            units = place.corpus.tokenizer.units
            reason = f"{len(all_N) + 1} {units} are read, and no window of {place.length} is half full"
            yield from _without_numbers([place], "unsupported", reason)
            continue
        ends = block_interval(nats_N, place.length)
        for metric in UNITS:
            yield _measurement(metric, nats_N, place.settings(metric), place.lengths, ends)
        if place.axes["split"] == "test" and place.axes["checkpoint"] == "final" and nats_N is all_N:
            yield from _by_position(nats_N, place)


def _measurement(
    metric: str,
    nats_N: Tensor,
    settings: dict[str, Any],
    lengths: Lengths,
    ends: tuple[float, float] | None = None,
) -> Measurement:
    mean, unit = float(nats_N.double().mean()), UNITS[metric]
    value = _in(metric, mean, lengths)
    if not math.isfinite(value):
        reason = f"{mean:.4g} nats a token"
        return Measurement(metric=metric, value=None, unit=unit, settings=settings, status="diverged", reason=reason)
    low, high = (_in(metric, end, lengths) for end in ends) if ends is not None else (None, None)
    if high == math.inf:
        low = high = None
    return Measurement(
        metric=metric, value=value, unit=unit, settings=settings, low=low, high=high, num_samples=len(nats_N)
    )


def _in(metric: str, nats: float, lengths: Lengths) -> float:
    """Convert nats a token into the metric."""
    if metric == "perplexity":
        return perplexity(nats)
    if metric == "bits_per_byte":
        return lengths.bits_per_byte(nats)
    nats = lengths.nats_per_character(nats)
    return nats / math.log(2) if metric == "bits_per_character" else nats


def _by_position(nats_N: Tensor, place: Place) -> Iterator[Measurement]:
    """Nats a character in the buckets 0, 1, 2-3, 4-7, ... of positions in the window."""
    position_N = torch.arange(len(nats_N)) % place.length
    start, stop = 0, 1
    while start < min(place.length, len(nats_N)):
        end = min(stop, place.length)
        bucket = {**place.axes, "position_bucket": f"{start}-{end - 1}"}
        inside_N = nats_N[(start <= position_N) & (position_N < end)]
        # Of tokens as long as those of all positions are in the mean.
        yield _measurement("nats_per_character", inside_N, bucket, place.lengths)
        start, stop = stop, 2 * stop
