"""Tables for terminal, Markdown and report, and tables made of result rows.

A table holds plain text; each renderer escapes it. The report's template renders it as HTML.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from attnbench.results.row_files import by_age, read_results, started_at
from attnbench.results.rows import ResultRow
from attnbench.settings.check import check_argument
from attnbench.settings.errors import UserError
from attnbench.settings.escape import markdown_text, printable
from attnbench.settings.untrusted import MAX_JSON_BYTES, read_bounded

MAX_NAME_SHARE = 0.3
"""Share of a terminal's width up to which line names are not broken."""

PADDING = 2
"""Characters between two columns on a terminal."""

NOTHING = "–"
"""Cell of a missing number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    text: str
    notes: tuple[str, ...] = ()
    """Behind the text in Markdown; below it on a terminal and, smaller, on a page."""
    mark: str = ""
    """best: bold; lost: in a colour of its own, on a page."""
    sign: str = ""
    """Behind the text, on a page in a column of its own."""

    @property
    def main(self) -> str:
        return f"{self.text} {self.sign}" if self.sign else self.text

    def __str__(self) -> str:
        return " ".join(filter(None, (self.main, *self.notes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    headers: Sequence[str | TableCell]
    lines: Sequence[Sequence[str | TableCell]]
    """Cells of each line, as many as there are headers."""
    lead: str = ""
    """Paragraph above the table."""
    notes: Sequence[str] = ()
    """Paragraphs below the table."""
    title: str = ""
    num_labels: int = 1
    """Number of label columns, set left; the others are numbers, set right."""


def to_terminal(table: Table, width: int) -> RichTable:
    """Render a table without its notes for a terminal of this width."""
    title = Text(printable(table.title)) if table.title else None
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    lines = [
        [
            Text("\n".join(map(printable, (cell.main, *cell.notes))), style="bold" if cell.mark == "best" else "")
            for cell in _as_cells(line)
        ]
        for line in table.lines
    ]
    share = width // len(table.headers) - PADDING
    for index, header in enumerate(table.headers):
        is_left = index < table.num_labels
        # The headers of the other columns make room for the names of the lines.
        is_name = index == 0 and all(len(line[0]) <= MAX_NAME_SHARE * width for line in lines)
        # Break a wide name between its words.
        text = printable(str(header))
        rich_table.add_column(
            Text(text if len(text) <= share else text.replace("_", "_\n")),
            justify="left" if is_left else "right",
            overflow="fold",
            no_wrap=is_name,
        )
    for line in lines:
        rich_table.add_row(*line)
    return rich_table


def print_table(table: Table, console: Console | None = None) -> None:
    console = Console() if console is None else console

    def paragraph(text: str) -> None:
        text = textwrap.fill(printable(text), console.width - 1, subsequent_indent="  ")
        console.print(text, markup=False, highlight=False)

    if table.lead:
        paragraph(table.lead)
    for part in _parts_that_fit(table, console.width):
        console.print(to_terminal(part, console.width))
    for note in table.notes:
        paragraph(note)


def _parts_that_fit(table: Table, width: int) -> list[Table]:
    """Transpose a table of scores that is too wide, if that makes it narrower, and cut it between columns."""
    if table.num_labels != 1 or _width(table, width) <= width:
        return [table]
    first, *others = ([*column] for column in zip(table.headers, *table.lines, strict=True))
    table = min(table, replace(table, headers=first, lines=others), key=lambda it: _width(it, width))
    parts: list[list[int]] = [[0]]
    for index in range(1, len(table.headers)):
        if len(parts[-1]) > 1 and _width(only(table, [*parts[-1], index]), width) > width:
            parts.append([0])
        parts[-1].append(index)
    return [replace(only(table, part), title=table.title if part is parts[0] else "") for part in parts]


def only(table: Table, indices: Sequence[int]) -> Table:
    """Keep these columns."""
    lines = [[line[index] for index in indices] for line in table.lines]
    return replace(table, headers=[table.headers[index] for index in indices], lines=lines)


def _width(table: Table, width: int) -> int:
    """Return how wide a table is if no word is broken but the names of lines, which may have a share of `width`."""
    columns = zip(table.headers, *table.lines, strict=True)
    names, *numbers = ([printable(str(cell)) for cell in column] for column in columns)
    wide = sum(
        PADDING + max(len(word) for text in (header.replace("_", "_ "), *cells) for word in f"{text} .".split())
        for header, *cells in numbers
    )
    return wide + PADDING + min(max(map(len, names)), int(MAX_NAME_SHARE * width))


def to_html(table: Table) -> str:
    """Render a table as HTML for a notebook, which has styles of its own: title, lead, table, notes."""
    title = Markup("<p><strong>{}</strong></p>").format(printable(table.title)) if table.title else ""
    lead = Markup("<p>{}</p>").format(printable(table.lead)) if table.lead else ""
    head = Markup("").join(Markup("<th>{}</th>").format(printable(str(header))) for header in table.headers)
    lines = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(map(_in_html, _as_cells(line)))) for line in table.lines
    )
    notes = Markup("").join(Markup("<p>{}</p>").format(printable(note)) for note in table.notes)
    return Markup("{}{}<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}").format(
        title, lead, head, lines, notes
    )


def _in_html(cell: TableCell) -> Markup:
    text = Markup("<strong>{}</strong>" if cell.mark == "best" else "{}").format(printable(cell.main))
    notes = Markup("").join(Markup("<br><small>{}</small>").format(printable(note)) for note in cell.notes)
    return Markup("<td>{}{}</td>").format(text, notes)


def to_markdown(table: Table) -> str:
    """Render a table as Markdown: its title as a heading, its lead, the table, its notes."""
    marks = ["---" if index < table.num_labels else "--:" for index in range(len(table.headers))]
    cells = [
        list(map(str, table.headers)),
        marks,
        *(list(map(_in_markdown, line)) for line in map(_as_cells, table.lines)),
    ]
    rows = (f"| {' | '.join(map(markdown_text, line))} |" for line in cells)
    heading = f"## {markdown_text(table.title)}" if table.title else ""
    return "\n\n".join(
        filter(None, (heading, markdown_text(table.lead), "\n".join(rows), *map(markdown_text, table.notes)))
    )


def _as_cells(line: Iterable[str | TableCell]) -> list[TableCell]:
    return [TableCell(text=cell) if isinstance(cell, str) else cell for cell in line]


def _in_markdown(cell: TableCell) -> str:
    return " ".join(filter(None, (f"**{cell.main}**" if cell.mark == "best" else cell.main, *cell.notes)))


LATEX = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"},
        **{"↑": r"$\uparrow$", "↓": r"$\downarrow$", "≈": r"$\approx$"},
        **{"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$"},
    }
)


def to_latex(table: Table) -> str:
    """Render a table as a LaTeX tabular, with the rules of booktabs; its signs need amssymb."""

    def line(cells: Iterable[str]) -> str:
        return f"{' & '.join(cells)} \\\\"

    def shown(cell: TableCell) -> str:
        text = cell.main.translate(LATEX)
        return " ".join(
            (rf"\textbf{{{text}}}" if cell.mark == "best" else text, *(n.translate(LATEX) for n in cell.notes))
        )

    columns = "l" * table.num_labels + "r" * (len(table.headers) - table.num_labels)
    head = line(str(header).translate(LATEX) for header in table.headers)
    body = [line(map(shown, cells)) for cells in map(_as_cells, table.lines)]
    rows = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Headline:
    """Columns of a summary: metric and settings that sum up an evaluation."""

    metric: str
    header: str
    higher_is_better: bool | None = field(default=False, kw_only=True)
    """None where it is unknown."""
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Only settings that contain these."""
    axes: tuple[str, ...] = field(default=(), kw_only=True)
    """Settings that order the columns."""
    pick: str = field(default="largest", kw_only=True)
    """each | largest | smallest by the axes, among the settings for which most variants have a number."""
    label: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Settings shown in the header; None: the first axis."""
    judged_by: str = field(default="", kw_only=True)
    """Primary metric whose verdicts mark this column; empty: its own metric."""


SITTINGS = "sittings, each under its own load"
ENVIRONMENTS = "environments (device, libraries or version of the source)"


def sittings_line(sittings: Mapping[str, Iterable[str]]) -> str:
    """Return the lead of a table with timings of several sittings or environments in one column; `sittings` are by
    header, as `ResultRow.measured_in` has them."""
    told: dict[str, list[str]] = {}
    for header, names in sittings.items():
        measured = {*names}
        starts = {name.rpartition(" ")[0] for name in measured}
        if len(measured) > 1:
            told.setdefault(SITTINGS if len(starts) > 1 else ENVIRONMENTS, []).append(header)
    return " ".join(f"No ranking of speed: timed in several {how}: {'; '.join(of)}." for how, of in told.items())


def read_folders(folders: Sequence[Path | str], *, last_only: bool = False) -> list[ResultRow]:
    """Read all rows of runs and their cells.

    Args:
        last_only: of an evaluation with several settings, only those measured last.

    Raises:
        UserError: no such folder, or an altered file.
    """
    check_argument("folders", folders, list | tuple, "a list of folders of runs; attnbench.load takes one folder")
    folders = [Path(folder) for folder in folders]
    for folder in folders:
        if not folder.is_dir() or any(folder.glob("*/config.yaml")):
            raise UserError(f"folders={folder}: no run; give outputs/EXPERIMENT/RUN, or attnbench.load an experiment")
    everywhere = [path for folder in folders for path in (folder, *cells_of(folder))]
    files = [path for folder in dict.fromkeys(everywhere) for path in sorted((folder / "results").glob("*.jsonl"))]
    if last_only:
        by_time = sorted(files, key=lambda path: by_age(path, started_at(path)))
        last = {(path.parent, path.stem.rpartition("-")[0]): path for path in by_time}
        files = [path for path in files if path in last.values()]
    return [row for path in files for row in read_results(path)]


def cells_of(folder: Path) -> list[Path]:
    path = folder / "cells.txt"
    if not path.exists():
        return []
    try:
        lines = [Path(line) for line in read_bounded(path, MAX_JSON_BYTES).splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for line in lines:
        if line.is_absolute() or ".." in line.parts:
            raise UserError(f"{path}: {line} lies outside of the experiment")
    return [folder.parent / line for line in lines]
