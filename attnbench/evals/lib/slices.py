"""Slices of perplexity: tokens that complete an n-gram which their context has already, and the others (Zoology, arXiv
2312.04927, section 3)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.token_scores import Place, measurement
from attnbench.results.rows import Measurement

AT_ONCE = 2**22
"""N-grams that are hashed together: bounds the memory, changes nothing else."""


def slice_rows(
    place: Place, nats_N: Tensor, text_N: Tensor, starts_N: Tensor, ngram: int, max_count: int | None
) -> Iterator[Measurement]:
    """Yield nats a character, and the share of tokens, of the two slices.

    Args:
        nats_N: of each scored token, the last of `text_N`.
        text_N: the split's tokens that are read.
        starts_N: index in `text_N` of the first token of the context of each scored token.
        max_count: most occurrences of the n-gram in the training split; None: any number.
    """
    is_repeated_N = repeated(text_N, starts_N, ngram)
    if max_count is not None:
        train_N = place.corpus.tokens["train"]
        is_repeated_N = is_repeated_N & ~_frequent(text_N, is_repeated_N, train_N, ngram, max_count)
    for name, inside_N in (("repeated", is_repeated_N), ("other", ~is_repeated_N)):
        settings: dict[str, Any] = {**place.axes, "slice": name}
        share = float(inside_N.double().mean())
        yield Measurement(metric="token_share", value=share, unit="", settings=settings, num_samples=len(inside_N))
        if inside_N.any():
            # Each token has the mean length over all, as in the buckets of positions.
            yield measurement("nats_per_character", nats_N[inside_N], settings, place.lengths)


def repeated(text_N: Tensor, starts_N: Tensor, ngram: int) -> Tensor:
    """Return for each of the last len(starts_N) tokens if the n-gram that it ends begins earlier in its context too,
    (N,) bool."""
    number = len(starts_N)
    if len(text_N) < ngram:
        return torch.zeros(number, dtype=torch.bool)
    hash_G = _hashes(text_N, ngram)
    # A stable order puts equal n-grams side by side, earlier ones first.
    order_G = hash_G.argsort(stable=True)
    is_same_G = hash_G[order_G[1:]] == hash_G[order_G[:-1]]
    before_G = torch.full_like(order_G, -1)
    before_G[order_G[1:]] = order_G[:-1].where(is_same_G, -1)
    # An n-gram stands at its first token here; a token has that which it ends.
    before_N = torch.cat([torch.full((ngram - 1,), -1), before_G])[-number:]
    return before_N >= starts_N


def _frequent(text_N: Tensor, is_repeated_N: Tensor, train_N: Tensor, ngram: int, max_count: int) -> Tensor:
    """Return which repeated tokens end an n-gram with more than `max_count` occurrences in the training split."""
    ends_R = len(text_N) - len(is_repeated_N) + is_repeated_N.nonzero().flatten()
    known_U, index_R = _hashes(text_N, ngram)[ends_R - ngram + 1].unique(return_inverse=True)
    count_U = torch.zeros(len(known_U), dtype=torch.long)
    for start in range(0, len(train_N) - ngram + 1, AT_ONCE) if len(known_U) else ():
        hash_G = _hashes(train_N[start : start + AT_ONCE + ngram - 1], ngram)
        place_G = torch.searchsorted(known_U, hash_G).clamp(max=len(known_U) - 1)
        count_U += place_G[known_U[place_G] == hash_G].bincount(minlength=len(known_U))
    frequent_N = torch.zeros_like(is_repeated_N)
    frequent_N[is_repeated_N] = count_U[index_R] > max_count
    return frequent_N


def _hashes(text_N: Tensor, ngram: int) -> Tensor:
    """Return a hash of each n-gram by its first token, (N - n + 1,) int64."""
    number, text_N = len(text_N) - ngram + 1, text_N.long()
    return torch.cat(
        [
            hashed(0, *(text_N[start + n : min(start + AT_ONCE, number) + n] for n in range(ngram)))
            for start in range(0, number, AT_ONCE)
        ]
    )
