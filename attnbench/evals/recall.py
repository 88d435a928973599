# pyright: reportArgumentType=false, reportOptionalOperand=false
# pyright: reportOptionalSubscript=false
# A null has the value of the preset once a probe is made.
"""Multi-query associative recall: small models that look up, later on, pairs they have read (arXiv 2312.04927)."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch

from attnbench.evals.lib.recall_cells import LABEL, CellProbe
from attnbench.evals.lib.recall_sizes import FILLERS, PRESETS
from attnbench.evals.lib.recall_strings import mixed_strings, recall_strings
from attnbench.evals.lib.rows import without_number
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.mixers.base import state_bytes
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.options import option
from attnbench.training.step import Batch


class Recall(CellProbe):
    """Associative recall (MQAR): small models look up pairs that they have read, many queries at once.

    Three pairs, length 14:

        input   k3 v3 k1 v1 k7 v7 .  .  k1 .  k7 .  k3 .
        target  .  .  .  .  .  .  .  .  v1 .  v7 .  v3 .

    Without a feed-forward no width is solved to match a model. Training and validation alternate over the cell's
    numbers of pairs. lib/recall_strings.py makes the sequences.

    With a `mixture` one model is trained on several cells, in each epoch on all batches of the first, then on those of
    the next (Arora et al., 2024; arXiv 2402.18668); see lib/sequences.py. Its selection is over all cells alike.
    """

    vocabulary_size: int | None = option(None, "half keys (one of them the blank), half values", minimum=4)
    filler: str | None = option(
        None, "between queries: blank (a symbol) | random (values) | vocabulary (any symbols)", choices=FILLERS
    )

    not_in_content = ("preset", "cells", "widths", "num_train", "budgets", "filler")
    plots = (("accuracy", "num_pairs"), ("accuracy", "width"))
    headline = (
        Headline("accuracy", "recall", axes=(*LABEL, "width"), label=LABEL, pick="each", higher_is_better=True),
        Headline(
            "mean_accuracy", "recall, mean of cells", axes=("width",), label=(), pick="each", higher_is_better=True
        ),
    )
    primary = Primary(metric="accuracy", kind="accuracy", margin=0.01, hardest=[*LABEL, "-width"])
    smoke = {
        **{"preset": "small", "cells": [[16, 2]], "widths": [16], "num_train": 64, "num_test": 16},
        **{"num_steps": 10, "batch_size": 8, "learning_rates": [1e-2]},
    }
    one_more = {"cells": [[8, 2], [16, 2]]}

    @property
    def _form(self) -> dict[str, Any]:
        order = PRESETS[self.preset].get("query_order")
        filler = {"random_filler": self.filler == "random", "query_order": order}
        if self.filler == "vocabulary":
            filler["vocabulary_filler"] = True
        return {"vocabulary_size": self.vocabulary_size, **filler}

    def content(self) -> dict[str, Any]:
        cell = {"length": self.cells[0][0], "pairs": self.pairs} if self.mixture is None else {}
        return {**super().content(), **cell, **self._form}

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        given = (split, seed, start, count, device)
        if self.mixture is None:
            return recall_strings(*given, length=self.cells[0][0], pairs=self.pairs, **self._form)
        return mixed_strings(*given, [cell[:2] for cell in self.mixture], **self._form)

    def test_sequences(self, seed: int, pairs: int, device: torch.device, length: int | None = None) -> Batch:
        length = length or self.cells[0][0]
        return recall_strings("test", seed, 0, self.num_test, device, length=length, pairs=[pairs], **self._form)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        rows, axes = [], self.axes()
        for (length, pairs), (metric, settings) in zip(self.scored_cells, axes, strict=False):
            batch = self.test_sequences(seed, pairs, device, length)
            rows.append(accuracy(correct_labels(model, batch), metric, settings))
            yield rows[-1]
        for metric, settings in axes[len(rows) :]:
            if metric == "mean_accuracy":
                yield Measurement(metric=metric, value=fmean(row.value for row in rows), unit="", settings=settings)
            elif num_bytes := published_bytes(model):
                yield Measurement(metric=metric, value=num_bytes, unit="B", settings=settings)
            else:
                reason = "no layer has a state of fixed size"
                yield without_number(metric, "B", settings, "unsupported", reason)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        chance = {"split": "test", "chance": 1 / (self.vocabulary_size - self.vocabulary_size // 2)}
        found = []
        for length, pairs in self.scored_cells:
            cell = {**self.settings, "sequence_length": length, "num_pairs": pairs}
            found.append(("accuracy", {**cell, **chance, "chance_among_pairs": 1 / pairs}))
        if self.test_cells is not None:
            found.append(("mean_accuracy", {**self.settings, **chance}))
        return found + ([("published_bytes", self.settings)] if self.mixture is not None else [])


def published_bytes(model: LanguageModel) -> int:
    """Return the bytes of a state as Arora et al. (2024) count them, in their figure 2; 0 without one of fixed size.

    They count one layer's memory in float32 and three numbers a channel for its convolution, whether it has one or not;
    if two layers have a memory, as of Mamba-2, these alone.
    """
    mixers = [block.mixer for block in model.layers if block.mixer.state_memory]
    if model.backend_without_state or not mixers:
        return 0
    states = [mixer.init_state(1, 1, torch.float32) for mixer in mixers]
    memories = [
        state_bytes(getattr(state, name) for name in mixer.state_memory)
        for mixer, state in zip(mixers, states, strict=True)
    ]
    return sum(memories) + (4 * 3 * model.embedding.weight.shape[1] if len(memories) == 1 else 0)
