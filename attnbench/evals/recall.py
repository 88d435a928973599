# pyright: reportArgumentType=false, reportOptionalIterable=false, reportOptionalOperand=false
# pyright: reportOptionalSubscript=false, reportReturnType=false
# A null has the value of the preset once a probe is made.
"""Multi-query associative recall: small models that look up, later on, pairs they have read (arXiv 2312.04927)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnbench.evals.base import Probe
from attnbench.evals.lib.recall_sizes import BUDGETS, FILLERS, PRESETS, RATE_FROM, batch_size, budget, check_cells
from attnbench.evals.lib.recall_strings import recall_strings
from attnbench.evals.lib.scoring import accuracy, correct_labels
from attnbench.model.language_model import LanguageModel
from attnbench.results.metrics import Primary
from attnbench.results.rows import Measurement
from attnbench.results.tables import Headline
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import Batch

LABEL = ("sequence_length", "num_pairs")


class Recall(Probe):
    """Small models that look up what they have read, many queries at once; a model for each cell and width.

    Without a feed-forward no width is solved to match a model. Training and validation alternate over the cell's
    numbers of pairs. lib/recall_strings.py makes the sequences.
    """

    preset: str = option(
        "zoology", "small | zoology | zoology_full | published; null below takes its value", choices=[*PRESETS]
    )
    # [64, [3, 5, 8]] is one model trained on all three numbers of pairs, and scored on each.
    cells: list | None = option([[256, 16], [512, 64]], "[length, pairs], or [length, list of pairs]")
    widths: list | None = option([64], "of the models; every cell is run at each; null: the preset's")
    head_width: int | None = option(None, "channels a head; null: one head", minimum=1)
    feed_forward_width: int | None = option(None, "hidden channels of the SwiGLU; null: none", minimum=0)
    vocabulary_size: int | None = option(None, "half keys (one of them the blank), half values", minimum=4)
    num_train: int | None = option(None, "sequences, taken in a new order every epoch", minimum=1)
    num_test: int | None = option(None, "sequences for each number of pairs", minimum=1)
    num_steps: int | None = option(None, "the most that a training makes; null: its cell's in budgets", minimum=1)
    budgets: dict[str, dict[str, int]] = option(
        BUDGETS, "steps by preset and cell: ten times softmax's to 95 %; zoology_full: 64 epochs, as Arora et al."
    )
    batch_size: int | None = option(None, "sequences a step", minimum=1)
    filler: str | None = option(
        None, "between queries: blank (a symbol) | random (values) | vocabulary (any symbols)", choices=FILLERS
    )
    reuse_rate: bool = option(False, "true: (512,64) takes the rate of (256,16) at the same width, without a search")
    check_interval_steps: int | None = option(
        None, "steps between looks at validation data, whose rows then have rise_share; null: 20, later 100", minimum=1
    )

    plots = (("accuracy", "num_pairs"), ("accuracy", "width"))
    headline = (
        Headline("accuracy", "recall", axes=(*LABEL, "width"), label=LABEL, pick="each", higher_is_better=True),
    )
    primary = Primary(metric="accuracy", kind="accuracy", margin=0.01, hardest=[*LABEL, "-width"])
    smoke = {
        **{"preset": "small", "cells": [[16, 2]], "widths": [16], "num_train": 64, "num_test": 16},
        **{"num_steps": 10, "batch_size": 8, "learning_rates": [1e-2]},
    }
    one_more = {"cells": [[8, 2], [16, 2]]}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name, value) is None:
                setattr(self, name, value)
        check_value("eval.recall.widths", self.widths, kind=list[int], distinct=True, minimum=1)
        check_value("eval.recall.budgets", [n for steps in self.budgets.values() for n in steps.values()], minimum=1)
        check_cells(self.cells, self.vocabulary_size)
        for task in self.tasks():
            check_value("eval.recall.num_train", self.num_train, minimum=task.batch_size)

    def tasks(self) -> Sequence["Recall"]:
        if len(self.cells) == len(self.widths) == 1 and self.num_steps and self.batch_size:
            return [self]
        return [
            replace(
                self,
                cells=[cell],
                widths=[width],
                num_steps=self.num_steps or budget(self.budgets, self.preset, cell),
                batch_size=self.batch_size or batch_size(self.preset, cell[0]),
            )
            for width in self.widths
            for cell in self.cells
        ]

    def rate_source(self, task: "Probe") -> "Probe | None":
        length, pairs = (task.settings.get(name) for name in LABEL)
        wanted = {"width": task.settings["width"]} | dict(zip(LABEL, RATE_FROM.get((length, pairs), ()), strict=False))
        return next((it for it in self.tasks() if self.reuse_rate and it.settings == wanted), None)

    @property
    def pairs(self) -> list[int]:
        return pairs if isinstance(pairs := self.cells[0][1], list) else [pairs]

    @property
    def settings(self) -> dict[str, Any]:
        length, pairs = self.cells[0]
        settings = {"sequence_length": length, "width": self.widths[0]}
        # A model of several numbers of pairs names each in the rows of its scores alone.
        return settings if isinstance(pairs, list) else {**settings, "num_pairs": pairs}

    @property
    def _form(self) -> dict[str, Any]:
        order = PRESETS[self.preset].get("query_order")
        filler = {"random_filler": self.filler == "random", "query_order": order}
        if self.filler == "vocabulary":
            filler["vocabulary_filler"] = True
        return {"length": self.cells[0][0], "vocabulary_size": self.vocabulary_size, **filler}

    def content(self) -> dict[str, Any]:
        apart = ("preset", "cells", "widths", "num_train", "budgets", "filler", "reuse_rate")
        content = {name: value for name, value in super().content().items() if name not in apart}
        return {**content, "pairs": self.pairs, **self._form}

    @property
    def model(self) -> ModelSettings:
        width = self.widths[0]
        return self._model(width, self.head_width or width, self.feed_forward_width or 0, name=f"recall-{width}")

    @property
    def num_train_sequences(self) -> int:
        return self.num_train

    def sequences(self, split: str, seed: int, start: int, count: int, device: torch.device) -> Batch:
        return recall_strings(split, seed, start, count, device, pairs=self.pairs, **self._form)

    def test_sequences(self, seed: int, pairs: int, device: torch.device) -> Batch:
        return recall_strings("test", seed, 0, self.num_test, device, pairs=[pairs], **self._form)

    def score(self, model: LanguageModel, seed: int, device: torch.device) -> Iterator[Measurement]:
        for pairs, (metric, settings) in zip(self.pairs, self.axes(), strict=True):
            yield accuracy(correct_labels(model, self.test_sequences(seed, pairs, device)), metric, settings)

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        chance = {"split": "test", "chance": 1 / (self.vocabulary_size - self.vocabulary_size // 2)}
        return [
            ("accuracy", {**self.settings, "num_pairs": pairs, **chance, "chance_among_pairs": 1 / pairs})
            for pairs in self.pairs
        ]
