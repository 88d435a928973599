from collections.abc import Iterator
from typing import Any

import torch

from attnbench.evals.lib.ladder import LadderProbe
from attnbench.evals.lib.recall_sizes import MAX_LENGTH
from attnbench.evals.lib.recall_strings import recall_strings
from attnbench.evals.lib.rows import lacks_state, without_number
from attnbench.machine.precision import dtype_of, resolve_precision
from attnbench.mixers.base import state_bytes
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.training.step import Batch


class LadderRecall(LadderProbe):
    """Small models that look up pairs, as many as they can; one model is trained on all numbers of pairs in turn.

    Multi-query associative recall (arXiv 2312.04927), with its blanks between queries; 3 pairs, length 14:

        input   k3 v3 k1 v1 k7 v7 .  .  k1 .  k7 .  k3 .
        target  .  .  .  .  .  .  .  .  v1 .  v7 .  v3 .

    `pairs_recalled` is the largest number of pairs times their scaled accuracy, and `pairs_per_kib` the same for each
    KiB of the decoding state of one sequence.
    """

    pairs: list[int] = option(
        [8, 16, 32, 64, 128, 256], "levels: pairs of a sequence, each twice the one before", distinct=True, minimum=1
    )
    length: int = option(1024, "symbols of every sequence; at least four times the most pairs", minimum=4)
    vocabulary_size: int = option(8192, "half keys (one of them the blank), half values", minimum=4)
    width, head_width, feed_forward_width = 64, 64, 0
    num_steps, batch_size, num_test = 2000, 32, 500

    axis, level_option = "num_pairs", "pairs"
    plots = (("accuracy", "num_pairs"),)
    headline = tuple(
        Headline(metric, words, axes=("levels",), label=(), higher_is_better=True)
        for metric, words in (("pairs_recalled", "pairs recalled"), ("pairs_per_kib", "pairs per KiB"))
    )
    smoke = {
        **{"pairs": [1, 2], "length": 16, "vocabulary_size": 32, "width": 16, "head_width": 16},
        **{"num_steps": 10, "batch_size": 8, "num_test": 16, "learning_rates": [1e-2]},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        group = f"eval.{self.name}"
        self.check_doubling()
        most = self.pairs[-1]
        check_value(f"{group}.length", self.length, minimum=4 * most, maximum=MAX_LENGTH)
        check_value(f"{group}.vocabulary_size", self.vocabulary_size, minimum=2 * most + 2)

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary_size - self.vocabulary_size // 2)

    def level_settings(self, level: int) -> dict[str, Any]:
        return {"chance_among_pairs": 1 / level}

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return self._strings(split, seed, start, count, device, self.pairs)

    def test_sequences(self, seed: int, level: int, device: torch.device) -> Batch:
        return self._strings("test", seed, 0, self.num_test, device, [level])

    def _strings(self, split: str, seed: int, start: int, count: int, device: torch.device, pairs: list[int]) -> Batch:
        form: dict[str, Any] = {"length": self.length, "vocabulary_size": self.vocabulary_size}
        form |= {"random_filler": False, "query_order": None}
        return recall_strings(split, seed, start, count, device, pairs=pairs, **form)

    def summed(self, scaled: dict[int, float], model: LanguageModel) -> Iterator[Measurement]:
        yield from super().summed(scaled, model)
        (recalled, settings), (per_kib, _) = self.axes()[-2:]
        num_pairs = max(pairs * value for pairs, value in scaled.items())
        yield Measurement(metric=recalled, value=num_pairs, unit="", settings=settings)
        num_bytes, reason = 0, lacks_state(model)
        if reason is None:
            dtype = dtype_of(resolve_precision(self.precision, model.embedding.weight.device.type))
            num_bytes = sum(state_bytes(state) for state in model.init_state(1, self.length, dtype))
        if not num_bytes:
            yield without_number(per_kib, "", settings, "unsupported", reason or "it keeps no state")
            return
        yield Measurement(metric=per_kib, value=num_pairs / (num_bytes / 1024), unit="", settings=settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        over_all = {**self.settings, "split": "test", "levels": len(self.levels)}
        return [*super().axes(), ("pairs_recalled", over_all), ("pairs_per_kib", over_all)]
