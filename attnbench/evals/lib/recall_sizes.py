"""The sizes of associative recall: presets, budgets, and what must fit together."""

from typing import Any

from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError

MAX_CELLS = 8
"""Cells of a mixture: a captured step has a recording for each."""

MAX_LENGTH = 2**15
"""Positions of a sequence: the integers of choose_by_power overflow beyond."""

FILLERS = ("blank", "random", "vocabulary")

DRAWN = "drawn"
"""Order of queries in which the first pair has the slot that is drawn first."""

SMALL: dict[str, Any] = {"vocabulary_size": 64, "num_train": 20_000, "num_test": 3_000, "filler": "random"}
ZOOLOGY: dict[str, Any] = {
    "cells": [[64, 4], [128, 8], [256, 16], [512, 64]],
    "widths": [64, 128, 256, 512],
    "vocabulary_size": 8192,
    "filler": "blank",
}
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"cells": [[32, 4]], "widths": [32], **SMALL},
    "published": {"cells": [[64, [3, 5, 8, 10, 15]]], "widths": [64], **SMALL},
    "zoology": {**ZOOLOGY, "num_train": 50_000, "num_test": 1_000},
    "zoology_full": {**ZOOLOGY, "num_train": 100_000, "num_test": 3_000, "query_order": DRAWN},
}
"""Values of the settings that are null. small is learnt on a CPU in a minute; published has numbers of pairs at which
language models without recall training are at chance; zoology, the task of Arora et al. (2024), separates mixers.

zoology_full has the sequences, batches, filler, order of queries and steps (64 epochs) of their figure 2. They also
used rates from 1e-4 to 1e-2, and learned positions and a dropout of 0.1 for attention.
"""

BATCH_SIZES = {
    "small": {0: 64},
    "published": {0: 64},
    "zoology": {0: 256, 512: 128},
    "zoology_full": {0: 512, 256: 256, 512: 128},
}
"""Sequences a step, by preset and the smallest length for which it holds."""

BUDGETS = {
    # 160 at 3e-2, the best rate, on a CPU.
    "small": {"32x4": 1600},
    # plan=published takes all steps; softmax takes 160 at 1e-2.
    "published": {"64x15": 1500},
    # On one H200: 60 at 3e-2, 60 at 1e-1, 100 at 3e-2; 240 at 1e-2 on a CPU; 500, 1100 and 500 at 1e-2.
    "zoology": {"64x4": 600, "128x8": 600, "256x16": 1000, "256x32": 2400, "512x64": 5000},
    # 64 epochs of 100,000 sequences, as Arora et al.
    "zoology_full": {"64x4": 12500, "128x8": 12500, "256x16": 25000, "512x64": 50000},
}
"""The most steps by preset and cell: ten times the median over three search seeds that softmax with rotary positions
takes to 95 %, in the comments."""


def batch_size(preset: str, length: int) -> int:
    sizes = BATCH_SIZES[preset]
    return sizes[max(start for start in sizes if start <= length)]


def check_cells(cells: list[Any], vocabulary_size: int, option: str = "cells") -> None:
    if not cells:
        raise UserError(f"eval.recall.{option}=[]: must name a cell, as [[256, 16]]; null takes the usual ones")
    for cell in cells:
        _check_cell(cell, vocabulary_size, option)
    keys = [(length, 0 if isinstance(pairs, list) else pairs) for length, pairs in cells]
    if len(set(keys)) < len(keys):
        raise UserError(f"eval.recall.{option}={cells}: each cell may stand once, and one list of pairs at each length")


def check_mixture(mixture: list[Any], vocabulary_size: int, num_steps: int | None) -> None:
    name = f"eval.recall.mixture={mixture}"
    if not mixture or len(mixture) > MAX_CELLS or any(not isinstance(it, list) or len(it) != 3 for it in mixture):
        raise UserError(f"{name}: must be 1 to {MAX_CELLS} cells of [length, pairs, training sequences]")
    check_cells([cell[:2] for cell in mixture], vocabulary_size, "mixture")
    for length, pairs, number in mixture:
        given = f"eval.recall.mixture: [{length}, {pairs}, {number}]"
        check_value(f"{given}: pairs", pairs, kind=int)
        check_value(f"{given}: training sequences", number, kind=int, minimum=1)
    if num_steps is None:
        raise UserError(f"{name}: has no budget; eval.recall.num_steps=1500 gives it one")


def check_test_cells(test_cells: list[Any] | None, cells: list[Any], vocabulary_size: int) -> None:
    if test_cells is None:
        return
    check_cells(test_cells, vocabulary_size, "test_cells")
    for length, pairs in test_cells:
        check_value(f"eval.recall.test_cells: [{length}, {pairs}]: pairs", pairs, kind=int)
    if len(cells) > 1:
        raise UserError(
            f"eval.recall.test_cells={test_cells}: are of one model, and eval.recall.cells={cells} are {len(cells)}"
        )


def budget(budgets: dict[str, dict[str, int]], preset: str, cell: list[Any]) -> int:
    """Look up the most steps of a training: {"small": {"32x4": 1500}}."""
    length, pairs = cell
    name = f"{length}x{max(pairs) if isinstance(pairs, list) else pairs}"
    if name not in budgets.get(preset, {}):
        raise UserError(
            f"eval.recall.cells: {cell} has no budget in preset {preset}; eval.recall.num_steps=1500 gives it one, "
            f"or ++eval.recall.budgets.{preset}.{name}=1500"
        )
    return budgets[preset][name]


def _check_cell(cell: Any, vocabulary_size: int, option: str) -> None:
    name = f"eval.recall.{option}: {cell}"
    if not (isinstance(cell, list) and len(cell) == 2):
        raise UserError(f"{name}: must be [length, pairs], both positive whole numbers")
    length, pairs = cell
    check_value(f"{name}: length", length, kind=int, minimum=1)
    given = pairs if isinstance(pairs, list) else [pairs]
    check_value(f"{name}: pairs", given, kind=list[int], distinct=True, minimum=1)
    most = max(pairs) if isinstance(pairs, list) else pairs
    if not 4 * most <= length <= MAX_LENGTH:
        raise UserError(f"{name}: {most} pairs and as many slots need a length of {4 * most} to {MAX_LENGTH}")
    if most > vocabulary_size // 2 - 1:
        raise UserError(
            f"{name}: {most} pairs need a vocabulary_size of {2 * most + 2} and it is {vocabulary_size};"
            f" eval.recall.{option}=null takes the usual cells"
        )
