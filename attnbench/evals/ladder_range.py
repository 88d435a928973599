from typing import Any

import torch

from attnbench.evals.lib.ladder import LadderProbe
from attnbench.evals.lib.recall_sizes import MAX_LENGTH
from attnbench.evals.lib.recall_strings import recall_strings
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.training.step import Batch


class LadderRange(LadderProbe):
    """Small models that look up pairs in longer sequences than they were trained on.

    The first level is the trained length. Filler is random values; 2 pairs, length 12:

        input   k3 v3 k1 v1 v9 v2 v5 v5 k1 v7 k3 v2
        target  .  .  .  .  .  .  .  .  v1 .  v3 .

    Queries have uniform places behind the pairs. By recall's own rule most queries come soon behind the pairs: in 4,096
    symbols over half of them would be no farther away than in the 256 that were trained on.
    """

    num_pairs: int = option(16, "pairs of every sequence", minimum=1)
    lengths: list[int] = option(
        [256, 512, 1024, 2048, 4096],
        "levels: symbols, each twice the one before; trained on is the first alone",
        distinct=True,
        minimum=4,
    )
    vocabulary_size: int = option(8192, "half keys (one of them the blank), half values", minimum=4)
    width, head_width, feed_forward_width = 64, 64, 0
    num_steps, batch_size, num_test = 2000, 64, 500

    axis, level_option = "sequence_length", "lengths"
    plots = (("accuracy", "sequence_length"),)
    smoke = {
        **{"num_pairs": 2, "lengths": [8, 16], "vocabulary_size": 32, "width": 16, "head_width": 16},
        **{"num_steps": 10, "batch_size": 8, "num_test": 16, "learning_rates": [1e-2]},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        group = f"eval.{self.name}"
        self.check_doubling()
        check_value(f"{group}.lengths", self.lengths, minimum=4 * self.num_pairs, maximum=MAX_LENGTH)
        check_value(f"{group}.vocabulary_size", self.vocabulary_size, minimum=2 * self.num_pairs + 2)

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary_size - self.vocabulary_size // 2)

    def level_settings(self, level: int) -> dict[str, Any]:
        return {"beyond_training": level > self.lengths[0], "chance_among_pairs": 1 / self.num_pairs}

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return self._strings(split, seed, start, count, device, self.lengths[0])

    def test_sequences(self, seed: int, level: int, device: torch.device) -> Batch:
        return self._strings("test", seed, 0, self.num_test, device, level)

    def _strings(self, split: str, seed: int, start: int, count: int, device: torch.device, length: int) -> Batch:
        form: dict[str, Any] = {"vocabulary_size": self.vocabulary_size, "random_filler": True, "query_order": None}
        return recall_strings(
            split, seed, start, count, device, pairs=[self.num_pairs], length=length, nearness=0.0, **form
        )
