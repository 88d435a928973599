"""The sizes of associative recall: presets, and what must fit together."""

from dataclasses import dataclass
from typing import Any

from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError

MAX_LENGTH = 2**15
"""Positions of a sequence: choose_by_power counts in whole numbers, which overflow beyond."""

DRAWN = "drawn"
"""Order of queries in which the first pair has the slot that is drawn first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Settings of a preset, see Recall."""

    cells: list[Any]
    widths: list[int]
    vocabulary_size: int
    num_train: int
    num_test: int
    batch_sizes: dict[int, int]
    """Sequences a step, by the length from which on it is so."""
    filler: str
    query_order: str | None = None
    """See RecallTask."""

    def batch_size(self, length: int) -> int:
        """Return the sequences a step at a length."""
        return self.batch_sizes[max(start for start in self.batch_sizes if start <= length)]


def _small_sizes(cell: list[Any], width: int) -> Sizes:
    return Sizes(
        cells=[cell],
        widths=[width],
        vocabulary_size=64,
        num_train=20_000,
        num_test=3_000,
        batch_sizes={0: 64},
        filler="random",
    )


ZOOLOGY_CELLS = [[64, 4], [128, 8], [256, 16], [512, 64]]
ZOOLOGY_WIDTHS = [64, 128, 256, 512]


PRESETS = {
    "small": _small_sizes([32, 4], width=32),
    "published": _small_sizes([64, [3, 5, 8, 10, 15]], width=64),
    "zoology": Sizes(
        cells=ZOOLOGY_CELLS,
        widths=ZOOLOGY_WIDTHS,
        vocabulary_size=8192,
        num_train=50_000,
        num_test=1_000,
        batch_sizes={0: 256, 512: 128},
        filler="blank",
    ),
    "zoology_full": Sizes(
        cells=ZOOLOGY_CELLS,
        widths=ZOOLOGY_WIDTHS,
        vocabulary_size=8192,
        num_train=100_000,
        num_test=3_000,
        batch_sizes={0: 512, 256: 256, 512: 128},
        filler="blank",
        query_order=DRAWN,
    ),
}
"""small is learnt on a CPU in a minute; published has the numbers of pairs of that table, at which language models that
were never trained to recall are at chance; zoology is the task of Arora et al. (2024), at which mixers part.

zoology_full has the sequences, batches, filler, order of queries and steps (64 epochs) of their figure 2. Theirs beside
it are rates from 1e-4 to 1e-2, and learned positions and a dropout of 0.1 for attention."""


def check_sizes(sizes: Sizes) -> None:
    counts = {name: getattr(sizes, name) for name in ("num_train", "num_test")}
    check_counts("eval.recall", **counts)
    check_counts("eval.recall", 4, vocabulary_size=sizes.vocabulary_size)
    check_value("eval.recall.filler", sizes.filler, choices=("blank", "random"))
    check_value("eval.recall.widths", sizes.widths, kind=list[int], distinct=True, minimum=1)
    if not sizes.cells:
        raise UserError("eval.recall.cells=[]: must name a cell, as [[256, 16]]; null takes the preset's")
    for cell in sizes.cells:
        _check_cell(cell, sizes.vocabulary_size)
    # An epoch has a batch at least.
    check_counts("eval.recall", max(sizes.batch_size(length) for length, _ in sizes.cells), num_train=sizes.num_train)
    keys = [(length, 0 if isinstance(pairs, list) else pairs) for length, pairs in sizes.cells]
    if len(set(keys)) < len(keys):
        raise UserError(
            f"eval.recall.cells={sizes.cells}: each cell may stand once, and one list of pairs at each length"
        )


def budget(budgets: dict[str, dict[str, int]], preset: str, cell: list[Any]) -> int:
    """Look up the most steps of a training, by preset and cell: {"small": {"32x4": 1500}}.

    Of a cell of several numbers of pairs the largest stands in its name.

    Raises:
        UserError: the yaml has none for this cell.
    """
    length, pairs = cell
    name = f"{length}x{max(pairs) if isinstance(pairs, list) else pairs}"
    if name not in budgets.get(preset, {}):
        raise UserError(
            f"eval.recall.cells: {cell} has no budget in preset {preset}; eval.recall.num_steps=1500 gives it one, "
            f"or ++eval.recall.budgets.{preset}.{name}=1500"
        )
    return budgets[preset][name]


def _check_cell(cell: Any, vocabulary_size: int) -> None:
    name = f"eval.recall.cells: {cell}"
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
            " eval.recall.cells=null takes the preset's cells"
        )
