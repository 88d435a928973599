from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnbench.data.counters import hashed
from attnbench.evals.lib.ladder import LadderProbe
from attnbench.evals.lib.task_data import ABSENT, SPLITS, hashes_in_split, in_pieces, shuffled
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.training.step import Batch


class LadderCopy(LadderProbe):
    """Small models that repeat different symbols in order; one model is trained on all lengths in turn.

    No symbol comes twice in a string, so that each is predicted by looking up the one before it; length 4:

        input   c a d b <sep> c a d
        target  . . . . c     a d b

    Symbols are 0 ... n - 1 in a random order, of which a string has the first; n is the separator and n + 1 fills the
    end. Each symbol is predicted from the right ones before it.
    """

    lengths: list[int] = option(
        [32, 64, 128, 256, 512], "levels: symbols of a string, each twice the one before", distinct=True, minimum=2
    )
    num_symbols: int = option(512, "different symbols, at least those of the longest string", minimum=2)
    length_buckets: bool = option(
        False, "true: the strings of a step are of about one length, so that little is padded; changes the result"
    )
    width, head_width, feed_forward_width = 64, 64, 0
    num_steps, batch_size, num_test = 2000, 32, 500

    axis, level_option = "length", "lengths"
    plots = (("accuracy", "length"),)
    smoke = {
        **{"lengths": [2, 4], "num_symbols": 32, "width": 16, "head_width": 16},
        **{"num_steps": 10, "batch_size": 8, "num_test": 16, "learning_rates": [1e-2]},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_doubling()
        check_value(f"eval.{self.name}.num_symbols", self.num_symbols, minimum=self.lengths[-1])

    @property
    def chance(self) -> float:
        return 1 / self.num_symbols

    def level_settings(self, level: int) -> dict[str, Any]:
        # The mean of 1 / (symbols that are left) over the string.
        return {"chance_among_symbols": sum(1 / left for left in range(1, level + 1)) / level}

    @property
    def vocabulary_size(self) -> int:
        return self.num_symbols + 2

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return self._strings(split, seed, start, count, device, self.lengths)

    def test_sequences(self, seed: int, level: int, device: torch.device) -> Batch:
        return self._strings("test", seed, 0, self.num_test, device, [level])

    def _strings(
        self, split: str, seed: int, start: int, count: int, device: torch.device, lengths: Sequence[int]
    ) -> Batch:
        lengths_N, longest = torch.tensor(lengths, device=device), max(lengths)
        column_L = torch.arange(longest, device=device)

        def symbols(hash_B: Tensor, length_B: Tensor) -> Tensor:
            every_BS = torch.ones(len(hash_B), self.num_symbols, dtype=torch.bool, device=device)
            return shuffled(hash_B, every_BS)[:, :longest].where(column_L < length_B[:, None], ABSENT)

        def make(index_B: Tensor) -> Batch:
            length_B = lengths_N[index_B % len(lengths)]
            row_B = hashed(0, seed, SPLITS[split], index_B, length_B)
            hash_B = hashes_in_split(split, row_B, lambda hash_R, row_R: symbols(hash_R, length_B[row_R]))
            symbols_BL, length_B1 = symbols(hash_B, length_B), length_B[:, None]
            is_label_BL = symbols_BL != ABSENT
            # One position past the end takes the symbols that a shorter string lacks, and the copy's last symbol.
            tokens_BT = torch.full((len(hash_B), 2 * longest + 1), self.num_symbols + 1, device=device)
            tokens_BT[:, :longest] = symbols_BL.where(is_label_BL, self.num_symbols + 1)
            tokens_BT.scatter_(1, length_B1, self.num_symbols)
            place_BL = (length_B1 + 1 + column_L).where(column_L < length_B1 - 1, 2 * longest)
            tokens_BT.scatter_(1, place_BL, symbols_BL)
            return Batch(
                tokens_BT[:, :-1].contiguous(),
                symbols_BL.where(is_label_BL, 0),
                is_label_BL.float(),
                (length_B1 + column_L).where(is_label_BL, 0),
            )

        return in_pieces(make, start, count, device)
