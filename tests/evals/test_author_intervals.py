"""Intervals of a text's nats over its authors, where the corpus has them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.data.corpus import Lengths
from attnbench.evals.lib.token_scores import author_interval, block_interval, score_rows
from attnbench.evals.perplexity import Perplexity


def test_over_blocks_of_equal_length_it_is_their_interval_and_wider_where_authors_differ():
    nats_N = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks_N = torch.arange(400) // 20
    assert author_interval(nats_N, blocks_N) == pytest.approx(block_interval(nats_N, 20), rel=1e-12)
    authors_N = torch.arange(400) // 150
    ends = author_interval(nats_N + 0.5 * authors_N, authors_N)
    narrow = block_interval(nats_N + 0.5 * authors_N, 20)
    assert ends is not None
    assert narrow is not None
    assert ends[0] < narrow[0] < narrow[1] < ends[1]
    assert author_interval(nats_N, torch.zeros(400, dtype=torch.int64)) is None


@pytest.mark.parametrize("number", [60, 40])
def test_each_predicted_token_counts_for_its_own_author(number):
    """Also of a part of the split, and with full context, which leaves the first half of a window out."""
    authors_N = torch.tensor([0] * 20 + [1] * 15 + [0] * 10 + [2] * 15)
    corpus: Any = SimpleNamespace(
        first_characters=lambda split, wanted: (torch.zeros(number, dtype=torch.int64), {}),
        authors=lambda split: authors_N,
        count=lambda tokens_N: torch.tensor([len(tokens_N)]),
        lengths=lambda split, count_V: Lengths(
            num_tokens=int(count_V.sum()), num_characters=int(count_V.sum()), num_bytes=1.0, num_unknown_bytes=0.0
        ),
        train_count_V=torch.tensor([1]),
    )
    subject: Any = SimpleNamespace(corpus=corpus)
    places = Perplexity()._places(subject, "test", "best", 4)
    nats = [torch.rand(len(place.tokens_N), dtype=torch.float64) for place in places]
    rows = [row for row in score_rows(places, *nats) if row.metric == "nats_per_character"]
    for start, row, nats_N in zip((1, 3), rows, nats, strict=True):
        assert len(nats_N) == number - start
        assert (row.low, row.high) == pytest.approx(author_interval(nats_N, authors_N[start:number]))
    corpus.authors = lambda split: None
    rows = [
        row
        for row in score_rows(Perplexity()._places(subject, "test", "best", 4), *nats)
        if row.metric == "nats_per_character"
    ]
    assert (rows[0].low, rows[0].high) == pytest.approx(block_interval(nats[0], 4))
