"""Sequences of associative recall: pairs of key and value, then some of the keys again as queries."""

from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.recall_sizes import DRAWN
from attnbench.evals.lib.task_data import (
    SPLITS,
    choose,
    choose_by_power,
    hashes_in_split,
    in_pieces,
    in_turn,
    integers_below,
    shuffled,
)
from attnbench.training.step import Batch

BLANK = 0

NEARNESS = 0.99
"""p(slot) ∝ slot^-0.99: most queries follow the pairs soon, as words recur in text."""

KEYS, VALUES, SLOTS, QUERIES, FILLER = range(5)
"""Purposes of a hash, as its first counter."""


def recall_strings(
    split: str,
    seed: int,
    start: int,
    count: int,
    device: torch.device,
    *,
    pairs: list[int],
    length: int,
    vocabulary_size: int,
    random_filler: bool,
    query_order: str | None,
    vocabulary_filler: bool = False,
    nearness: float = NEARNESS,
) -> Batch:
    """Make sequences, as the example of evals/recall.py.

    Symbol 0 is the blank, the rest of the lower half of the vocabulary are keys, the upper half values. Keys of a
    sequence are different, and so are its values. Each key is a query once, in random order. The positions after the
    pairs are cut into slots of two, of which a query takes the first; slots count from 1 and are drawn without
    replacement with p(slot) ∝ slot^-nearness; by default it is slot^(a - 1), a = 0.01. All other positions hold blanks,
    random values (which may be those of pairs), or any symbols of the vocabulary (also keys of pairs and the blank):

        input   k3 v3 k1 v1 k7 v7 v2 k9 k1 v7 k7 k3 k3 v5

    With the query order DRAWN, that of Arora et al., the first pair has the slot that is drawn first, and so on.
    Sequences take the numbers of `pairs` in turn; L is the largest.
    """
    pairs_N, most, half = torch.tensor(pairs, device=device), max(pairs), vocabulary_size // 2
    num_values = vocabulary_size - half

    def build(hash_B: Tensor, pairs_B: Tensor) -> Batch:
        pairs_B1, column_P = pairs_B[:, None], torch.arange(most, device=hash_B.device)
        present_BP = column_P < pairs_B1
        key_BP = BLANK + 1 + choose(hashed(hash_B, KEYS), half - 1, most)
        value_BP = half + choose(hashed(hash_B, VALUES), num_values, most)
        slot_BP = choose_by_power(hashed(hash_B, SLOTS), length // 2 - pairs_B, length // 2, most, nearness)
        asked_BP = column_P.expand_as(key_BP)
        if query_order != DRAWN:
            asked_BP = shuffled(hashed(hash_B, QUERIES), present_BP)
        query_BP = 2 * (pairs_B1 + slot_BP - 1)
        # One position past the end of each row takes absent symbols.
        tokens_BT = torch.full((len(hash_B), length + 1), BLANK, device=hash_B.device)
        if random_filler or vocabulary_filler:
            hash_BT = hashed(hash_B[:, None], FILLER, torch.arange(length + 1, device=hash_B.device))
            lowest = 0 if vocabulary_filler else half
            tokens_BT = lowest + integers_below(hash_BT, vocabulary_size - lowest)
        for position_BP, token_BP in (
            (2 * column_P, key_BP),
            (2 * column_P + 1, value_BP),
            (query_BP, key_BP.gather(1, asked_BP)),
        ):
            tokens_BT.scatter_(1, position_BP.where(present_BP, length), token_BP)
        return Batch(
            tokens_BT[:, :-1].contiguous(),
            value_BP.gather(1, asked_BP).where(present_BP, 0),
            present_BP.float(),
            query_BP.where(present_BP, 0),
        )

    def make(index_B: Tensor) -> Batch:
        pairs_B = pairs_N[index_B % len(pairs)]
        row_B = hashed(0, seed, SPLITS[split], index_B, pairs_B)
        hash_B = hashes_in_split(split, row_B, lambda hash_R, row_R: build(hash_R, pairs_B[row_R]).tokens_BT)
        return build(hash_B, pairs_B)

    return in_pieces(make, start, count, device)


def mixed_strings(
    split: str, seed: int, start: int, count: int, device: torch.device, cells: list[list[int]], **form: Any
) -> Batch:
    """Make sequences of cells in turn, [length, pairs] each; blanks fill shorter ones at the end. `form`: as
    `recall_strings`."""
    # Own indices: two lengths with equal pairs would have the same keys and values.
    given = [(length, pairs, start + (length << 32)) for length, pairs in cells]
    return in_turn(
        [
            recall_strings(split, seed, first, count, device, pairs=[pairs], length=length, **form)
            for length, pairs, first in given
        ],
        start,
    )
