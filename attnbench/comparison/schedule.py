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
        self._search_of: dict[Path, Search] = {}
        """By the folders of what was handed out."""
        self._running: set[Path] = set()
        self._to_ask = list(comparison.all_searches())
        """Searches that may have asked for trainings since they were looked at."""

    def known(self) -> list[Cell]:
        """Hand out what has become known."""
        searches, self._to_ask = self._to_ask, []
        return self._comparison.in_order([cell for search in searches for cell in self._of(search)])

    def ran(self, cells: Sequence[Cell]) -> None:
        """Take note that these have run, with results or without."""
        self._running.difference_update(cell.folder for cell in cells)
        for search in (self._search_of[cell.folder] for cell in cells):
            if not any(search is other for other in self._to_ask):
                self._to_ask.append(search)

    def _of(self, search: Search) -> list[Cell]:
        searched, scored = self._comparison.known(search)
        new = self._hand_out(search, searched)
        self._count([cell for cell in new if cell.folder not in self._counted])
        # Run again, a search may come to another rate.
        is_over = self._running.isdisjoint(cell.folder for cell in searched)
        return [*new, *(self._hand_out(search, scored) if is_over else [])]

    def _hand_out(self, search: Search, cells: Sequence[Cell]) -> list[Cell]:
        new = [cell for cell in self._comparison.wanted(cells) if cell.folder not in self._search_of]
        self._search_of |= {cell.folder: search for cell in new}
        self._running |= {cell.folder for cell in new if self._comparison.is_to_run(cell)}
        return new
