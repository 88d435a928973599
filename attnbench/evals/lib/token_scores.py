"""Scores of a text's tokens in four units, with intervals and chance levels."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnbench.data.corpus import Corpus, Lengths
from attnbench.evals.lib.rows import without_number
from attnbench.model.loss import perplexity
from attnbench.results.rows import Measurement

UNITS = {"perplexity": "1", "bits_per_character": "bit", "nats_per_character": "nat", "bits_per_byte": "bit"}

FULL_CONTEXT = {"context": "full"}
"""Setting of the scores of tokens that are predicted from at least half a window each."""

NUM_BLOCKS = 20
"""Blocks of text that an interval is taken over: longer than articles, so that they are about independent."""


@dataclass(slots=True)
class Place:
    axes: dict[str, Any]
    length: int
    corpus: Corpus
    tokens_N: Tensor
    authors_N: Tensor | None = None
    """Number of the author of each token."""
    unigram: float | None = field(init=False)
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        count_V = self.corpus.count(self.tokens_N)
        self.lengths = self.corpus.lengths(self.axes["split"], count_V)
        self.unigram = unigram_nats(self.corpus.train_count_V, count_V)

    def settings(self, metric: str) -> dict[str, Any]:
        if self.unigram is None:
            return self.axes
        return {**self.axes, "chance": round(_in(metric, self.unigram, self.lengths), 6)}


def full_context(all_N: Tensor, nats: Callable[[int], Tensor], length: int) -> Tensor:
    """Return the nats of every token from half a window on, each in the last half of its window: in turn from `all_N`,
    the nats of consecutive windows, and from windows half a window later, by `nats` of the text from an index on."""
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(len(all_N))[half:]
    full_N, is_shifted_N = all_N[half:].clone(), index_N % length < half
    if is_shifted_N.any():
        full_N[is_shifted_N] = nats(shift)[index_N[is_shifted_N] - shift]
    return full_N


def context_starts(number: int, length: int) -> Tensor:
    """Return where the window of each token of `full_context` begins."""
    half, shift = length // 2, length - length // 2
    index_N = torch.arange(number)[half:]
    shift_N = torch.where(index_N % length < half, shift, 0)
    return (index_N - shift_N) // length * length + shift_N


def unigram_nats(train_count_V: Tensor, count_V: Tensor) -> float | None:
    """Return the nats a token by the training split's frequencies plus one; None for no tokens."""
    if not count_V.any():
        return None
    share_V, count_V = (train_count_V + 1).double(), count_V.double()
    return float(-(count_V * (share_V / share_V.sum()).log()).sum() / count_V.sum())


def block_interval(nats_N: Tensor, length: int) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean over equal blocks, each at least a window."""
    from scipy.stats import sem, t

    blocks = nats_N.double().tensor_split(max(1, min(NUM_BLOCKS, len(nats_N) // length)))
    means = [float(block.mean()) for block in blocks]
    error = float(sem(means)) if len(means) > 1 else 0.0
    if not 0 < error < math.inf:
        return None
    low, high = t.interval(0.95, len(means) - 1, loc=float(nats_N.double().mean()), scale=error)
    return float(low), float(high)


def author_interval(nats_N: Tensor, authors_N: Tensor) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean over authors, the blocks here.

    Their texts differ in length, so that the mean is a ratio of two sums over authors; its standard error is the linear
    one (Cochran, Sampling Techniques, 1977, section 6.3).
    """
    from scipy.stats import t

    _, index_N = authors_N.unique(return_inverse=True)
    size_A, mean = index_N.bincount(), float(nats_N.double().mean())
    excess_A = index_N.bincount(weights=nats_N.double()) - mean * size_A
    number = len(size_A)
    error = math.sqrt(float(excess_A.square().sum()) * number / max(1, number - 1)) / len(nats_N)
    if number < 2 or not 0 < error < math.inf:
        return None
    low, high = t.interval(0.95, number - 1, loc=mean, scale=error)
    return float(low), float(high)


def rows_without_numbers(places: Iterable[Place], status: str, reason: str) -> Iterator[Measurement]:
    for place, (metric, unit) in product(places, UNITS.items()):
        yield without_number(metric, unit, place.settings(metric), status, reason)


def score_rows(places: Iterable[Place], all_N: Tensor, full_N: Tensor) -> Iterator[Measurement]:
    for place, nats_N in zip(places, (all_N, full_N), strict=True):
        if not len(nats_N):
            units = place.corpus.tokenizer.units
            reason = f"{len(all_N) + 1} {units} are read, and no window of {place.length} is half full"
            yield from rows_without_numbers([place], "unsupported", reason)
            continue
        authors_N = place.authors_N
        ends = block_interval(nats_N, place.length) if authors_N is None else author_interval(nats_N, authors_N)
        for metric in UNITS:
            yield measurement(metric, nats_N, place.settings(metric), place.lengths, ends)
        if place.axes["split"] == "test" and place.axes["checkpoint"] == "final" and nats_N is all_N:
            yield from _by_position(nats_N, place)


def measurement(
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
    if metric == "perplexity":
        return perplexity(nats)
    if metric == "bits_per_byte":
        return lengths.bits_per_byte(nats)
    nats = lengths.nats_per_character(nats)
    return nats / math.log(2) if metric == "bits_per_character" else nats


def _by_position(nats_N: Tensor, place: Place) -> Iterator[Measurement]:
    """Yield nats a character in the buckets 0, 1, 2-3, 4-7, ... of positions in the window."""
    position_N = torch.arange(len(nats_N)) % place.length
    start, stop = 0, 1
    while start < min(place.length, len(nats_N)):
        end = min(stop, place.length)
        bucket = {**place.axes, "position_bucket": f"{start}-{end - 1}"}
        inside_N = nats_N[(start <= position_N) & (position_N < end)]
        # Each token has the mean length over all positions.
        yield measurement("nats_per_character", inside_N, bucket, place.lengths)
        start, stop = stop, 2 * stop
