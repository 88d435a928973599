"""Trainings of a plan as they become known: the steps of each search of a learning rate, then what is scored at it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attnbench.comparison.cells import Cell
from attnbench.comparison.plan import Comparison
from attnbench.comparison.search import Search


class Schedule:
    """Hands out the trainings of a plan, each once, those too that are done already.

    A search goes on once its own trainings have run: if all waited for the longest training of a step, a node's GPUs
    would be idle meanwhile.

    Args:
        counted: trainings of searches that the caller knows of.
        count: told of each other one when it is handed out.
    """

    def __init__(
        self, comparison: Comparison, counted: Iterable[Cell], *, count: Callable[[Sequence[Cell]], None]
    ) -> None:
        self._comparison, self._count = comparison, count
        self._counted = {cell.folder for cell in counted}
        self._handed_out: set[Path] = set()
        self._running: dict[Path, Search] = {}
        """By folder, trainings of searches that were handed out and have not run."""
        self._to_ask = list(comparison.all_searches())
        """Searches that may ask for more than when they were looked at, which reads all their results."""

    def known(self) -> list[Cell]:
        """Hand out what has become known."""
        searches, self._to_ask = self._to_ask, []
        return self._comparison.in_order([cell for search in searches for cell in self._of(search)])

    def ran(self, cells: Sequence[Cell]) -> None:
        """Take note that these have run, with results or without."""
        for cell in cells:
            search = self._running.pop(cell.folder, None)
            if search is not None and not self._runs(search):
                self._to_ask.append(search)

    def _runs(self, search: Search) -> bool:
        return any(search is other for other in self._running.values())

    def _of(self, search: Search) -> list[Cell]:
        searched, scored = self._comparison.searched_and_scored(search)
        new = self._hand_out(searched)
        self._count([cell for cell in new if cell.folder not in self._counted])
        self._running |= {cell.folder: search for cell in new if self._comparison.is_to_run(cell)}
        # Run again, a search may come to another rate.
        return [*new, *([] if self._runs(search) else self._hand_out(scored))]

    def _hand_out(self, cells: Sequence[Cell]) -> list[Cell]:
        new = [cell for cell in self._comparison.wanted(cells) if cell.folder not in self._handed_out]
        self._handed_out |= {cell.folder for cell in new}
        return new
