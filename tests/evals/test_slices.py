"""Slices of perplexity: tokens that end an n-gram which their context has already."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.data.corpus import Lengths
from attnbench.evals.lib import slices
from attnbench.evals.lib.slices import repeated, slice_rows
from attnbench.evals.lib.token_scores import Place, context_starts, full_context


def naive(text: list[int], starts: list[int], ngram: int) -> list[bool]:
    found = []
    for end, start in zip(range(len(text) - len(starts), len(text)), starts, strict=True):
        grams = [tuple(text[place : place + ngram]) for place in range(start, end - ngram + 1)]
        found.append(end - ngram + 1 >= start and tuple(text[end - ngram + 1 : end + 1]) in grams)
    return found


def test_an_example_written_by_hand():
    """In "the then" the second h and e end bigrams that stand before, if their context has the first ones."""
    text = torch.tensor([ord(letter) for letter in "the then"])
    assert repeated(text, torch.zeros(7, dtype=torch.long), 2).tolist() == [False] * 4 + [True, True, False]
    assert repeated(text, torch.tensor([0] * 4 + [1, 1, 1]), 2).tolist() == [False] * 5 + [True, False]
    assert not repeated(text, torch.full((7,), 2), 2).any()
    assert not repeated(text[:2], torch.zeros(1, dtype=torch.long), 3).any()


@pytest.mark.parametrize(("ngram", "length"), [(1, 7), (2, 8), (3, 16)])
def test_tokens_are_those_of_a_search_through_their_context(ngram, length, monkeypatch):
    monkeypatch.setattr(slices, "AT_ONCE", 50)
    text = torch.randint(4, (300,), generator=torch.Generator().manual_seed(0))
    starts = context_starts(299, length)
    assert repeated(text, starts, ngram).tolist() == naive(text.tolist(), starts.tolist(), ngram)


@pytest.mark.parametrize("length", [7, 8])
def test_a_context_begins_where_full_context_begins_it(length):
    def starts(start: int) -> torch.Tensor:
        return start + torch.arange(100 - start) // length * length

    assert torch.equal(context_starts(100, length), full_context(starts(0), starts, length))


def scored(text: torch.Tensor, max_count: int | None, train: torch.Tensor) -> dict[tuple[str, str], float | None]:
    corpus: Any = SimpleNamespace(
        tokens={"train": train},
        count=lambda tokens_N: torch.tensor([len(tokens_N)]),
        lengths=lambda split, count_V: Lengths(
            num_tokens=2 * int(count_V), num_characters=int(count_V), num_bytes=1.0, num_unknown_bytes=0.0
        ),
        train_count_V=torch.tensor([1]),
    )
    place = Place({"split": "test", "checkpoint": "final"}, 8, corpus, text[1:])
    nats, starts = torch.arange(len(text) - 1).double(), torch.zeros(len(text) - 1, dtype=torch.long)
    rows = slice_rows(place, nats, text, starts, 2, max_count)
    return {(row.metric, row.settings["slice"]): row.value for row in rows}


def test_the_rows_are_the_means_of_both_slices_and_their_shares():
    text = torch.tensor([1, 2, 3, 1, 2, 3])
    found = scored(text, None, text)
    # Tokens 4 and 5 end (1, 2) and (2, 3); two tokens take one character.
    assert found == {
        ("token_share", "repeated"): 0.4,
        ("nats_per_character", "repeated"): 2 * 3.5,
        ("token_share", "other"): 0.6,
        ("nats_per_character", "other"): 2 * 1.0,
    }


def test_n_grams_that_are_frequent_in_training_are_among_the_others(monkeypatch):
    monkeypatch.setattr(slices, "AT_ONCE", 3)
    text, train = torch.tensor([1, 2, 3, 1, 2, 3]), torch.tensor([0, 1, 2, 1, 2, 1, 2, 3, 0], dtype=torch.uint8)
    # (1, 2) comes three times in training, (2, 3) once.
    shares = {count: scored(text, count, train)["token_share", "repeated"] for count in (3, 2, 1)}
    assert shares == {3: 0.4, 2: 0.2, 1: 0.2}
    assert scored(text[:3], 1, train) == {
        ("token_share", "repeated"): 0.0,
        ("token_share", "other"): 1.0,
        ("nats_per_character", "other"): 2 * 0.5,
    }
