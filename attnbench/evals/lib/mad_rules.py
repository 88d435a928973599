"""Tasks after MAD (Poli et al., arXiv 2403.17844)."""

from abc import ABC, abstractmethod
from itertools import product

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.task_data import choose, integers_below, shuffled
from attnbench.training.step import Batch

UNITS, KEYS, VALUES, LENGTHS, NOISE, QUERIES = range(6)
"""Purposes of a hash, as its first counter."""


class MadRule(ABC):
    num_answers: int

    @abstractmethod
    def vocabulary_size(self, length: int) -> int: ...

    @abstractmethod
    def batch(self, hash_B: Tensor, seed: int, length: int) -> Batch: ...


class NoisyRecall(MadRule):
    """Keys with their value in this sequence, again and again, and noise between the pairs.

    Keys are 0 ... 7, values 8 ... 15, noise 16 ... 31. A unit is one symbol of noise with probability 1/5, otherwise a
    pair of a uniform key. A value is a label if the key was seen before. Noise fills the end.
    """

    num_keys = num_answers = 8
    num_noise = 16

    def vocabulary_size(self, length: int) -> int:
        return 2 * self.num_keys + self.num_noise

    def batch(self, hash_B: Tensor, seed: int, length: int) -> Batch:
        # L is the length.
        column_T = torch.arange(length, device=hash_B.device)
        is_pair_BU = integers_below(hashed(hash_B[:, None], UNITS, column_T), 5) > 0
        key_BU = integers_below(hashed(hash_B[:, None], KEYS, column_T), self.num_keys)
        value_BU = self.num_keys + integers_below(hashed(hash_B[:, None], VALUES, key_BU), self.num_keys)
        width_BU = 1 + is_pair_BU.long()
        start_BU = width_BU.cumsum(1) - width_BU
        is_pair_BU &= start_BU + 2 <= length
        noise_BT = integers_below(
            hashed(hash_B[:, None], NOISE, torch.arange(length + 1, device=hash_B.device)), self.num_noise
        )
        # One position past the end takes absent symbols.
        tokens_BT = 2 * self.num_keys + noise_BT
        tokens_BT.scatter_(1, start_BU.where(is_pair_BU, length), key_BU)
        tokens_BT.scatter_(1, (start_BU + 1).where(is_pair_BU, length), value_BU)
        asked_BU = is_pair_BU & _seen_before(key_BU, is_pair_BU, self.num_keys)
        return Batch(
            tokens_BT[:, :-1].contiguous(), value_BU.where(asked_BU, 0), asked_BU.float(), start_BU.where(asked_BU, 0)
        )


class FuzzyRecall(MadRule):
    """Eight keys of one to three symbols, with values of one to three, again and again.

    Symbols of keys are 0 ... 7, of values 8 ... 15. A key's first symbol t tells its length, 1 + t % 3, so that no key
    begins another; all sets of eight of the 155 keys are equally likely. Every symbol of a value is a label if its key
    was seen before. Symbol 16 fills the end.
    """

    num_symbols = num_answers = num_pairs = 8
    longest = 3

    def vocabulary_size(self, length: int) -> int:
        return 2 * self.num_symbols + 1

    def batch(self, hash_B: Tensor, seed: int, length: int) -> Batch:
        # L is 3 × half the length.
        device, num_units = hash_B.device, length // 2
        codes = [c for n in range(1, 4) for c in product(range(self.num_symbols), repeat=n) if 1 + c[0] % 3 == n]
        code_CJ = torch.tensor([(*code, 0, 0)[: self.longest] for code in codes], device=device)
        width_C = torch.tensor([len(code) for code in codes], device=device)
        unit_U, symbol_J = torch.arange(num_units, device=device), torch.arange(self.longest, device=device)
        pair_P = torch.arange(self.num_pairs, device=device)

        code_BP = choose(hashed(hash_B, KEYS), len(codes), self.num_pairs)
        value_BPJ = integers_below(hashed(hash_B[:, None, None], VALUES, pair_P[:, None], symbol_J), self.num_symbols)
        value_width_BP = 1 + integers_below(hashed(hash_B[:, None], LENGTHS, pair_P), self.longest)
        pair_BU = integers_below(hashed(hash_B[:, None], UNITS, unit_U), self.num_pairs)
        code_BU, value_width_BU = code_BP.gather(1, pair_BU), value_width_BP.gather(1, pair_BU)
        key_width_BU, key_BUJ = width_C[code_BU], code_CJ[code_BU]
        value_BUJ = self.num_symbols + value_BPJ.gather(1, pair_BU[..., None].expand(-1, -1, self.longest))

        end_BU = (key_width_BU + value_width_BU).cumsum(1)
        fits_BU1, start_BU1 = (end_BU <= length)[..., None], (end_BU - key_width_BU - value_width_BU)[..., None]
        is_key_BUJ = fits_BU1 & (symbol_J < key_width_BU[..., None])
        is_value_BUJ = fits_BU1 & (symbol_J < value_width_BU[..., None])
        value_at_BUJ = start_BU1 + key_width_BU[..., None] + symbol_J
        # One position past the end takes absent symbols.
        tokens_BT = torch.full((len(hash_B), length + 1), 2 * self.num_symbols, device=device)
        tokens_BT.scatter_(1, (start_BU1 + symbol_J).where(is_key_BUJ, length).flatten(1), key_BUJ.flatten(1))
        tokens_BT.scatter_(1, value_at_BUJ.where(is_value_BUJ, length).flatten(1), value_BUJ.flatten(1))
        seen_BU = _seen_before(pair_BU, fits_BU1[..., 0], self.num_pairs)
        asked_BL = (is_value_BUJ & seen_BU[..., None]).flatten(1)
        return Batch(
            tokens_BT[:, :-1].contiguous(),
            value_BUJ.flatten(1).where(asked_BL, 0),
            asked_BL.float(),
            (value_at_BUJ - 1).flatten(1).where(asked_BL, 0),
        )


class Compression(MadRule):
    """Random symbols 0 ... 15, a separator, and then the number of each place, in random order, for its symbol."""

    num_answers = 16

    def vocabulary_size(self, length: int) -> int:
        return self.num_answers + 1 + length

    def batch(self, hash_B: Tensor, seed: int, length: int) -> Batch:
        # L is the length, of 2 × length + 1 positions.
        column_L = torch.arange(length, device=hash_B.device)
        symbol_BL = integers_below(hashed(hash_B[:, None], VALUES, column_L), self.num_answers)
        place_BL = shuffled(hashed(hash_B, QUERIES), torch.ones_like(symbol_BL, dtype=torch.bool))
        separator_B1 = torch.full_like(hash_B, self.num_answers)[:, None]
        tokens_BT = torch.cat([symbol_BL, separator_B1, self.num_answers + 1 + place_BL], dim=1)
        position_BL = (length + 1 + column_L).expand_as(symbol_BL)
        return Batch(
            tokens_BT, symbol_BL.gather(1, place_BL), torch.ones(symbol_BL.shape, device=hash_B.device), position_BL
        )


class Memorise(MadRule):
    """MAD's own memorisation: keys 0 ... n - 1 with n = (vocabulary - 1) // 2, a different value for each behind them,
    and the last symbol, which asks for the value. The values are a function of the training's seed, the same in all
    splits."""

    def __init__(self, num_symbols: int) -> None:
        self.num_symbols, self.num_answers = num_symbols, (num_symbols - 1) // 2

    def vocabulary_size(self, length: int) -> int:
        return self.num_symbols

    def values(self, seed: int, key_BL: Tensor) -> Tensor:
        """Return the value of each key, from 0."""
        is_value_1V = torch.ones(1, self.num_symbols - 1 - self.num_answers, dtype=torch.bool, device=key_BL.device)
        zero_1 = torch.zeros(1, dtype=torch.long, device=key_BL.device)
        return shuffled(hashed(0, seed, VALUES, zero_1), is_value_1V)[0][key_BL]

    def batch(self, hash_B: Tensor, seed: int, length: int) -> Batch:
        # L is half the length.
        column_L = torch.arange(length // 2, device=hash_B.device)
        key_BL = integers_below(hashed(hash_B[:, None], KEYS, column_L), self.num_answers)
        value_BL = self.num_answers + self.values(seed, key_BL)
        tokens_BT = torch.stack([key_BL, torch.full_like(key_BL, self.num_symbols - 1)], dim=2).flatten(1)
        weight_BL = torch.ones(key_BL.shape, device=hash_B.device)
        return Batch(tokens_BT, value_BL, weight_BL, (2 * column_L + 1).expand_as(key_BL))


class Memorisation(Memorise):
    """The same with 128 keys, whose values are drawn one by one: two keys may share one."""

    def __init__(self) -> None:
        super().__init__(num_symbols=257)

    def values(self, seed: int, key_BL: Tensor) -> Tensor:
        return integers_below(hashed(0, seed, VALUES, key_BL), self.num_answers)


def _seen_before(item_BU: Tensor, is_there_BU: Tensor, num_items: int) -> Tensor:
    """Return where the same item stands further left, (B, U)."""
    count_BUN = (item_BU[..., None] == torch.arange(num_items, device=item_BU.device)) & is_there_BU[..., None]
    earlier_BUN = count_BUN.long().cumsum(1) - count_BUN.long()
    return earlier_BUN.gather(2, item_BU[..., None])[..., 0] > 0


MAD_RULES: dict[str, MadRule] = {
    "fuzzy_recall": FuzzyRecall(),
    "noisy_recall": NoisyRecall(),
    "compression": Compression(),
    "memorisation": Memorisation(),
}
"""Tasks by name; MAD's selective copying is copy's option, its in-context recall is recall at length 32."""
