"""Sequences of the needle task: pairs of key and value in filler, and the key of one pair again at the end."""

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.task_data import ABSENT, choose, integers_below, shuffled

KEY, VALUE, FILLER, DISTRACTORS = range(2, 6)
"""Purposes of a hash, as its first counter."""


def needle_strings(
    hash_B: Tensor,
    length_B: Tensor,
    place_B: Tensor,
    *,
    longest: int,
    num_keys: int,
    num_values: int,
    num_filler: int,
    num_distractors: int,
) -> tuple[Tensor, Tensor]:
    """Return sequences (B, longest), ABSENT behind the end of each, and the value that is asked for (B, 1).

    The queried pair is unit `place_B` of a sequence whose units are pairs and single symbols.
    """
    num_pairs, device = 1 + num_distractors, hash_B.device
    position_T, pair_P = torch.arange(longest, device=device), torch.arange(1, num_pairs, device=device)
    key_BP = integers_below(hashed(hash_B, KEY), num_keys)[:, None]
    value_BP = integers_below(hashed(hash_B, VALUE), num_values)[:, None]
    unit_BP = place_B[:, None]
    if num_pairs > 1:
        further_BP = choose(hashed(hash_B, KEY, 1), num_keys - 1, num_pairs - 1)
        key_BP = torch.cat([key_BP, (key_BP + 1 + further_BP) % num_keys], dim=1)
        other_BP = integers_below(hashed(hash_B[:, None], VALUE, pair_P), num_values)
        value_BP = torch.cat([value_BP, other_BP], dim=1)
        is_free_BT = (position_T < length_B[:, None] - 1 - num_pairs) & (position_T != unit_BP)
        chosen_BP = shuffled(hashed(hash_B, DISTRACTORS), is_free_BT)[:, : num_pairs - 1]
        unit_BP = torch.cat([unit_BP, chosen_BP], dim=1)
    # Each pair before a unit moves it by one position.
    place_BP = unit_BP + (unit_BP[:, None] < unit_BP[:, :, None]).sum(2)
    value_BP = num_keys + value_BP
    filler_BT = integers_below(hashed(hash_B[:, None], FILLER, position_T), num_filler or num_values)
    tokens_BT = num_keys + (num_values if num_filler else 0) + filler_BT
    tokens_BT = tokens_BT.scatter(1, place_BP, key_BP).scatter(1, 1 + place_BP, value_BP)
    tokens_BT = tokens_BT.scatter(1, length_B[:, None] - 1, key_BP[:, :1])
    return tokens_BT.where(position_T < length_B[:, None], ABSENT), value_BP[:, :1]
