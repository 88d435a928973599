"""Random sequences for synthetic tasks, by a hash of counters, see `data.counters`.

The split of a sequence is a hash of its content. A sequence of another split is drawn again, so that splits cannot
overlap, whatever the seeds.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.settings.errors import UserError
from attnbench.training.step import Batch

SPLITS = {"train": 0, "validation": 1, "test": 2}

ABSENT = -1
"""A token behind the end of a content shorter than its row."""

LARGEST = 2**63 - 1

MAX_ATTEMPTS = 1000
"""An attempt hits the rarest split with probability 1/8: after this many the split has no content."""

ROWS_AT_ONCE = {"cpu": 2**13, "cuda": 2**16}
"""Sequences made together: bounds the memory, changes nothing else."""

ATTEMPTS_AT_ONCE = 32
"""Attempts of one sequence made together if few sequences are missing; changes the speed alone."""

LOGARITHM_BITS = 16
"""Bits of the uniform numbers that choose_by_power takes logarithms of."""


def integers_below(hash_: Tensor, bound: Tensor | int) -> Tensor:
    """Return integers uniform over 0 ... bound - 1, to 2^-40: 62 bits of the hash modulo the bound."""
    return (hash_ & (2**62 - 1)) % bound


def lengths_between(split: str, seed: int, index_B: Tensor, shortest: int, longest: int, *, purpose: int) -> Tensor:
    """Return a length for each sequence: drawn for training by a hash with `purpose`, in turn for other splits.

    Drawing the content again keeps the length: a rare split would otherwise get the shortest sequences.
    """
    number_B = index_B % (longest - shortest + 1)
    if split == "train":
        number_B = integers_below(hashed(0, seed, SPLITS[split], index_B, purpose), longest - shortest + 1)
    return shortest + number_B


def choose(hash_B: Tensor, num_items: int, num_chosen: int) -> Tensor:
    """Return different integers below `num_items` in random order, (B, num_chosen).

    Robert Floyd's method ("A sample of brilliance", 1987) draws each number from a range that grows by one, and takes
    the range's last one in place of a repeated number; then all are shuffled.
    """
    step_K = torch.arange(num_chosen, device=hash_B.device)
    last_K = num_items - num_chosen + step_K
    drawn_BK = integers_below(hashed(hash_B[:, None], 0, step_K), last_K + 1)
    for step in range(1, num_chosen):
        taken_B = (drawn_BK[:, :step] == drawn_BK[:, step, None]).any(1)
        drawn_BK[:, step] = torch.where(taken_B, last_K[step], drawn_BK[:, step])
    return drawn_BK.gather(1, shuffled(hashed(hash_B, 1), torch.ones_like(drawn_BK, dtype=torch.bool)))


def shuffled(hash_B: Tensor, present_BK: Tensor) -> Tensor:
    """Return column numbers of each row in random order, (B, K), absent ones last."""
    column_K = torch.arange(present_BK.shape[1], device=hash_B.device)
    # Stable: otherwise the order of equal numbers depends on the device.
    return hashed(hash_B[:, None], column_K).where(present_BK, LARGEST).argsort(dim=1, stable=True)


def choose_by_power(hash_B: Tensor, num_slots_B: Tensor, max_slots: int, num_chosen: int, power: float) -> Tensor:
    """Draw different slots one after another with p(slot) ∝ slot^-power, 0 <= power <= 1, among those left; slots count
    from 1.

    An exponential race: each slot arrives at time E / p, with E from the exponential distribution of rate 1 (Efraimidis
    and Spirakis, 2006). Times are integers, from a table made on the CPU: logarithms of two devices differ in the last
    bit. A row has `num_slots_B` slots, at least `num_chosen`. Returns (B, num_chosen), in the order of arrival.
    """
    slot_S = torch.arange(1, max_slots + 1, device=hash_B.device)
    exponential_N = _exponential_table(hash_B.device)
    # The last of 2^15 slots arrives at 12 × 2^32 times 2^15 × 2^12 at most, below 2^63.
    inverse_weight_S = (torch.arange(1, max_slots + 1, dtype=torch.float64) ** power * 2**12).round().long()
    column_BS = hashed(hash_B[:, None], slot_S) & (2**LOGARITHM_BITS - 1)
    time_BS = exponential_N[column_BS] * inverse_weight_S.to(hash_B.device)
    time_BS = time_BS.where(slot_S <= num_slots_B[:, None], LARGEST)
    return 1 + time_BS.argsort(dim=1, stable=True)[:, :num_chosen]


@cache
def _exponential_table(device: torch.device) -> Tensor:
    """Return -log of the middles of 2^16 equal parts of 0 ... 1, in units of 2^-32."""
    middle_N = (torch.arange(2**LOGARITHM_BITS, dtype=torch.float64) + 0.5) / 2**LOGARITHM_BITS
    return (-middle_N.log() * 2**32).round().long().to(device)


def split_of(content_BT: Tensor) -> Tensor:
    """Return the number in SPLITS of each content's split, (B,): 6/8 train, 1/8 validation, 1/8 test."""
    position_T = torch.arange(content_BT.shape[1], device=content_BT.device)
    hash_BT = hashed(0, position_T, content_BT)
    eighth_B = hashed(torch.where(content_BT == ABSENT, 0, hash_BT).sum(1), 0) & 7
    return torch.where(eighth_B < 3, eighth_B, 0)


def hashes_in_split(
    split: str, row_B: Tensor, content: Callable[[Tensor, Tensor], Tensor], exempt_B: Tensor | None = None
) -> Tensor:
    """Return for each row the first of its hashes whose content belongs to the split, (B,); raise UserError after
    MAX_ATTEMPTS.

    Args:
        row_B: a hash of the row's seed, split and index. Attempt n has `hashed(row, n)`.
        content: makes tokens (R, T) of R hashes and the numbers of their rows.
        exempt_B: rows that take their first content, whatever its split.
    """
    hash_B = hashed(row_B, 0)
    pending_R = torch.arange(len(row_B), device=row_B.device)
    if exempt_B is not None:
        pending_R = pending_R[~exempt_B]
    attempt = 0
    while len(pending_R) and attempt < MAX_ATTEMPTS:
        # Few rows make several attempts at once, which saves rounds.
        num_attempts = max(1, min(ATTEMPTS_AT_ONCE, ROWS_AT_ONCE[row_B.device.type] // len(pending_R)))
        attempt_A = torch.arange(num_attempts, device=row_B.device)
        hash_RA = hashed(row_B[pending_R, None], attempt + attempt_A)
        contents = content(hash_RA.flatten(), pending_R.repeat_interleave(num_attempts))
        belongs_RA = (split_of(contents) == SPLITS[split]).view_as(hash_RA)
        first_R = torch.where(belongs_RA, attempt_A, num_attempts).amin(1)
        found_R = first_R < num_attempts
        hash_B[pending_R[found_R]] = hash_RA[found_R, first_R[found_R]]
        pending_R = pending_R[~found_R]
        attempt += num_attempts
    if not len(pending_R):
        return hash_B
    raise UserError(f"{split} data: no sequence of it in {MAX_ATTEMPTS} draws; the task has too few different ones")


def in_pieces(make: Callable[[Tensor], Batch], start: int, count: int, device: torch.device) -> Batch:
    """Make the sequences start ... start + count - 1; `make` makes those of indices (B,)."""
    indices = torch.arange(start, start + count, device=device).split(ROWS_AT_ONCE[device.type])
    return joined([make(index_B) for index_B in indices])


def joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    parts = (torch.cat(tensors) if tensors[0] is not None else None for tensors in zip(*pieces, strict=True))
    return Batch(*parts)  # pyright: ignore[reportArgumentType]


def in_turn(batches: Sequence[Batch], start: int) -> Batch:
    """Take sequence n, counted from `start`, from batch n modulo their number, filled with zeros to the widest."""
    row_B = torch.arange(len(batches[0].tokens_BT), device=batches[0].tokens_BT.device)
    turn_B = (start + row_B) % len(batches)

    def mixed(parts: Sequence[Tensor]) -> Tensor:
        width = max(part.shape[1] for part in parts)
        return torch.stack([F.pad(part, (0, width - part.shape[1])) for part in parts])[turn_B, row_B]

    return Batch(*(mixed(parts) for parts in zip(*(batch[:4] for batch in batches), strict=True)))
