"""Result rows as tables for a terminal of 80 columns; rows of different corpora never share one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from attnbench.results.rows import Identity, ResultRow, is_complete, read_results, same_corpus
from attnbench.settings.documents import MOST_JSON_BYTES, read_bounded
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import markdown_text, printable

LABELS = {"variant": "variant", "backend": "backend", "parameters": "params"}
"""Columns that every table has, and what stands above them."""

DISTINCTIONS = ("seq_len", "seed", "experiment", "model", "precision", "device", "num_devices", "commit")
"""Columns that a table gets only where its rows differ in them, so that no difference is hidden."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricColumn:
    """A column of numbers: those of an evaluation's `metric` whose settings contain `settings`."""

    header: str
    evaluation: str
    metric: str
    settings: dict[str, Any] = field(default_factory=dict)

    def takes(self, row: ResultRow) -> bool:
        """Whether the row's number belongs into this column."""
        measurement = row.measurement
        is_own = row.identity.evaluation == self.evaluation and measurement.metric == self.metric
        return is_own and self.settings.items() <= measurement.settings.items()


@dataclass(slots=True, kw_only=True, frozen=True)
class Grid:
    """A table before it is drawn: its title, its headers, and its cells as text."""

    title: str
    headers: list[str]
    num_labels: int
    """How many columns, from the left, say whose line it is."""
    lines: list[list[str]]


def read_folders(folders: Sequence[Path], *, last_only: bool = False) -> list[ResultRow]:
    """All rows of the runs in `folders`, those of their cells too.

    Args:
        last_only: of an evaluation that a run has with several settings, only what was measured last, and to its end.
    """
    everywhere = [place for folder in folders for place in (folder, *_cells_of(folder))]
    files = [path for place in dict.fromkeys(everywhere) for path in sorted((place / "results").glob("*.jsonl"))]
    if last_only:
        by_time = sorted(filter(is_complete, files), key=lambda path: path.stat().st_mtime_ns)
        last = {(path.parent, path.stem.rpartition("-")[0]): path for path in by_time}
        files = [path for path in files if path in last.values()]
    return [row for path in files for row in read_results(path)]


def _cells_of(folder: Path) -> list[Path]:
    """Where else a run has results: one folder a line of its cells.txt, from the experiment's folder."""
    path = folder / "cells.txt"
    if not path.exists():
        return []
    try:
        lines = [Path(line) for line in read_bounded(path, MOST_JSON_BYTES).splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for line in lines:
        if line.is_absolute() or ".." in line.parts:
            raise UserError(f"{path}: {line} lies outside of the experiment")
    return [folder.parent / line for line in lines]


def comparison_tables(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> list[Table]:
    """One comparison_table for each corpus, in the order in which the rows name them."""
    by_corpus: dict[str | None, list[ResultRow]] = {}
    for row in rows:
        by_corpus.setdefault(row.identity.corpus, []).append(row)
    return [comparison_table(group, columns) for group in by_corpus.values()]


def comparison_table(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> Table:
    """A grid drawn for a terminal; see `grid`."""
    return terminal_table(grid(rows, columns))


def terminal_table(drawn: Grid) -> Table:
    """A grid for a terminal."""
    table = Table(title=Text(drawn.title), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, header in enumerate(drawn.headers):
        left = index < drawn.num_labels and header != LABELS["parameters"]
        table.add_column(Text(header), justify="left" if left else "right", overflow="fold")
    for line in drawn.lines:
        table.add_row(*map(Text, line))
    return table


def markdown_table(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> str:
    """A grid as Markdown; see `grid`."""
    return markdown_grid(grid(rows, columns))


def markdown_grid(drawn: Grid) -> str:
    """A grid as Markdown."""
    marks = ["---" if index < drawn.num_labels else "--:" for index in range(len(drawn.headers))]
    lines = [[markdown_text(cell) for cell in line] for line in (drawn.headers, marks, *drawn.lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def grid(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> Grid:
    """One line per variant and whatever else the rows differ in, titled with the corpus.

    A cell without a number shows its status, and a dash where nothing was measured.

    Raises:
        UserError: the rows come from several corpora, or two of them belong into one cell.
    """
    rows = list(rows)
    corpus = same_corpus(rows)
    shown = [row for row in rows if any(column.takes(row) for column in columns)]
    differing = [name for name in DISTINCTIONS if len({getattr(row.identity, name) for row in shown}) > 1]
    names = [*LABELS, *differing]
    lines: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in shown:
        lines.setdefault(tuple(getattr(row.identity, name) for name in names), []).append(row)
    return Grid(
        title=printable(corpus if corpus is not None else "no corpus"),
        headers=[*(LABELS.get(name, name) for name in names), *(printable(column.header) for column in columns)],
        num_labels=len(names),
        lines=[
            [_label(group[0].identity, name) for name in names] + [_cell(group, column) for column in columns]
            for group in lines.values()
        ],
    )


def format_number(value: float) -> str:
    """Four significant digits; whole numbers with thousands separated from 1,000 up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _label(identity: Identity, name: str) -> str:
    value = getattr(identity, name)
    if value is None:
        return "–"
    if name == "parameters":
        return f"{value:,}"
    return printable(str(value))


def _cell(group: Sequence[ResultRow], column: MetricColumn) -> str:
    found = [row for row in group if column.takes(row)]
    if not found:
        return "–"
    if len(found) > 1:
        places = "; ".join(f"{row.identity.run}, {row.measurement.settings}" for row in found)
        raise UserError(f"{column.header}: {len(found)} rows belong into one cell ({places}); name the setting meant")
    measurement = found[0].measurement
    return measurement.status.replace("_", " ") if measurement.value is None else format_number(measurement.value)
