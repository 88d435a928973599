# pyright: reportArgumentType=false, reportOptionalIterable=false, reportOptionalOperand=false
# pyright: reportOptionalSubscript=false, reportReturnType=false
# A null has the value of the preset once a probe is made.
"""Probes whose tasks are cells, a sequence length with a number of pairs, each at several widths."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from attnbench.evals.base import Probe
from attnbench.evals.lib.recall_sizes import (
    BUDGETS,
    PRESETS,
    batch_size,
    budget,
    check_cells,
    check_mixture,
    check_test_cells,
)
from attnbench.settings.check import check_value
from attnbench.settings.options import option
from attnbench.settings.schema import ModelSettings

LABEL = ("sequence_length", "num_pairs")


class CellProbe(Probe, ABC):
    """A model for each cell and width, or one for a mixture of cells at each width."""

    preset: str = option(
        "zoology", "small | zoology | zoology_full | published; a null takes its value", choices=[*PRESETS]
    )
    # [64, [3, 5, 8]] is one model trained on all three numbers of pairs, and scored on each.
    cells: list | None = option([[256, 16], [512, 64]], "[length, pairs], or [length, list of pairs]")
    mixture: list | None = option(
        None, "in place of cells: one model, of [length, pairs, training sequences] of each cell, taken in this order"
    )
    test_cells: list | None = option(None, "[length, pairs] that one model is scored at; null: those it is trained on")
    widths: list | None = option([64], "of the models; every cell is run at each; null: the preset's")
    head_width: int | None = option(None, "channels a head; null: one head", minimum=1)
    feed_forward_width: int | None = option(None, "hidden channels of the SwiGLU; null: none", minimum=0)
    num_train: int | None = option(None, "sequences, taken in a new order every epoch", minimum=1)
    num_test: int | None = option(None, "sequences for each number of pairs", minimum=1)
    num_steps: int | None = option(None, "the most that a training makes; null: its cell's in budgets", minimum=1)
    budgets: dict[str, dict[str, int]] = option(
        BUDGETS, "steps by preset and cell: ten times softmax's to 95 %; zoology_full: 64 epochs, as Arora et al."
    )
    batch_size: int | None = option(None, "sequences a step", minimum=1)
    check_interval_steps: int | None = option(
        None, "steps between looks at validation data, whose rows then have rise_share; null: 20, later 100", minimum=1
    )

    former = {"mixture": None, "test_cells": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name, value) is None:
                setattr(self, name, value)
        check_value("eval.recall.widths", self.widths, kind=list[int], distinct=True, minimum=1)
        check_value("eval.recall.budgets", [n for steps in self.budgets.values() for n in steps.values()], minimum=1)
        if self.mixture is not None:
            check_mixture(self.mixture, self.vocabulary_size, self.num_steps)
            self.cells = [[max(cell[0] for cell in self.mixture), sorted({cell[1] for cell in self.mixture})]]
        check_cells(self.cells, self.vocabulary_size)
        check_test_cells(self.test_cells, self.cells, self.vocabulary_size)
        for task in self.tasks() if self.mixture is None else []:
            check_value("eval.recall.num_train", self.num_train, minimum=task.batch_size)

    def tasks(self) -> Sequence[Self]:
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

    @property
    def parts(self) -> Sequence[Self]:
        return [replace(self, mixture=[cell]) for cell in self.mixture or []]

    @property
    def pairs(self) -> list[int]:
        return pairs if isinstance(pairs := self.cells[0][1], list) else [pairs]

    @property
    def scored_cells(self) -> list[list[int]]:
        trained = self.mixture or [[self.cells[0][0], pairs] for pairs in self.pairs]
        return self.test_cells or [cell[:2] for cell in trained]

    @property
    def settings(self) -> dict[str, Any]:
        if self.mixture is not None or self.test_cells is not None:
            return {"width": self.widths[0]}
        length, pairs = self.cells[0]
        settings = {"sequence_length": length, "width": self.widths[0]}
        # A model of several numbers of pairs names each in the rows of its scores alone.
        return settings if isinstance(pairs, list) else {**settings, "num_pairs": pairs}

    @property
    def model(self) -> ModelSettings:
        width = self.widths[0]
        return self._model(width, self.head_width or width, self.feed_forward_width or 0, name=f"recall-{width}")

    @property
    def num_train_sequences(self) -> int:
        return self.num_train if self.mixture is None else sum(number for *_, number in self.mixture)
