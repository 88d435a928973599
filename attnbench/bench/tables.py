"""A bench's rows as tables: lines by shape, columns by implementation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from attnbench.results.metrics import is_timed
from attnbench.results.numbers import format_number
from attnbench.results.rows import DEVICE, Measurement, ResultRow
from attnbench.results.tables import NOTHING, Table, only, sittings_line
from attnbench.settings.errors import UserError

WIDTH = 79
GAP = 3
"""Columns of a terminal between two columns of a table."""

STATUSES = {"out_of_memory": "no memory", "unsupported": NOTHING}
"""Statuses in the words of a cell; the reasons stand below the table."""

APART = ("implementation", "backend", "precision", "pass", "numerator", "denominator")
"""Settings that never label a line, besides those that a layout names."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Values:
    """Columns of a table: the rows of one metric."""

    metric: str
    header: str = "{}"
    """Text above a column; braces stand for the name that tells the columns apart."""
    where: dict[str, Any] = field(default_factory=dict)
    """Settings that a row must have."""
    only: tuple[str, ...] | None = None
    """Names that get a column; None: all."""
    is_share: bool = False
    """Shown in percent."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    title: str
    lines: tuple[str, ...]
    """Settings that tell its lines apart."""
    values: tuple[Values, ...]
    columns: str = "implementation"
    """The setting that tells the columns of the same values apart; empty: one column of each."""
    headers: dict[str, str] = field(default_factory=dict)
    """Text above `lines` other than the setting's name."""
    on_page_alone: bool = False
    """Left out on a terminal, for its length."""


def tables(rows: Sequence[ResultRow], layouts: Sequence[Layout]) -> Iterator[Table]:
    """Make a table for each layout that has rows; settings that differ between runs label the lines."""
    precision = ["precision"] if len({row.identity.precision for row in rows}) > 1 else []
    for layout in layouts:
        table = _table(rows, layout, precision)
        if table.lines:
            yield table


Column = tuple[int, Any]
"""Index of its `Values` in the layout, and the value of `columns`."""


def _table(rows: Sequence[ResultRow], layout: Layout, precision: list[str]) -> Table:
    entries = [
        ((index, settings.get(layout.columns)), row, settings)
        for index, values in enumerate(layout.values)
        for row in rows
        for settings in [_settings(row)]
        if row.identity.variant != DEVICE and _takes(values, row.measurement.metric, settings, layout.columns)
    ]
    labels = [*precision, *_differing([settings for *_, settings in entries], layout), *layout.lines]
    headers = {column: layout.values[column[0]].header.format(column[1]) for column, *_ in entries}
    lines: dict[tuple[Any, ...], dict[Column, ResultRow]] = {}
    for column, row, settings in entries:
        line = lines.setdefault(tuple(settings.get(label) for label in labels), {})
        if column in line:
            runs = " and in ".join(dict.fromkeys((line[column].identity.run, row.identity.run)))
            where = ", ".join(f"{label}={settings.get(label)}" for label in labels)
            raise UserError(
                f"{layout.title}: {headers[column]} at {where} was measured twice, in {runs}; make a table of each"
            )
        line[column] = row
    # An implementation that runs nowhere here is a reason below the table, and no column.
    supported = {column for column, row, _ in entries if row.measurement.status != "unsupported"}
    shown = [column for column in headers if column in supported]
    return Table(
        title=layout.title,
        lead=_lead([[*cells.values()] for cells in lines.values()]),
        headers=[
            *(layout.headers.get(label, label.replace("_", " ")) for label in labels),
            *(headers[column] for column in shown),
        ],
        num_labels=len(labels),
        lines=[
            [*map(_label, line), *(_cell(cells.get(column), layout.values[column[0]]) for column in shown)]
            for line, cells in lines.items()
            if shown
        ],
    )


def _lead(lines: Sequence[Sequence[ResultRow]]) -> str:
    """Name the times that belong to several sittings; empty for one sitting."""

    def sittings(line: Sequence[ResultRow]) -> list[str]:
        measured = [(row, row.measurement) for row in line if row.measurement.value is not None]
        return [row.measured_in for row, it in measured if is_timed(it.metric, it.unit)]

    if any(len({*sittings(line)}) > 1 for line in lines):
        return sittings_line({"its times": chain(*map(sittings, lines))})
    if len({*chain(*map(sittings, lines))}) > 1:
        return "Timed in several sittings, each under its own load: compare times within a line alone."
    return ""


def _settings(row: ResultRow) -> dict[str, Any]:
    identity = row.identity
    columns = {"implementation": identity.variant, "backend": identity.backend, "precision": identity.precision}
    return row.measurement.settings | columns


def _differing(entries: Sequence[dict[str, Any]], layout: Layout) -> list[str]:
    """Return settings that differ between the rows and are neither line nor column of this layout."""
    known = {*layout.lines, layout.columns, *APART, *(name for values in layout.values for name in values.where)}
    names = dict.fromkeys(name for settings in entries for name in settings if name not in known)
    return [name for name in names if len({settings.get(name) for settings in entries}) > 1]


def _takes(values: Values, metric: str, settings: dict[str, Any], columns: str) -> bool:
    return (
        metric == values.metric
        and values.where.items() <= settings.items()
        and (values.only is None or settings.get(columns) in values.only)
    )


def _cell(row: ResultRow | None, values: Values) -> str:
    if row is None:
        return NOTHING
    measurement: Measurement = row.measurement
    if measurement.value is None:
        return STATUSES.get(measurement.status, measurement.status)
    return f"{measurement.value:.0%}" if values.is_share else format_number(measurement.value)


def _label(value: Any) -> str:
    if value in (None, ""):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def narrowed(table: Table) -> Iterator[Table]:
    """Split a table that is wider than a terminal into several, each with the labels."""
    widths = [max(len(str(line[index])) for line in (table.headers, *table.lines)) + GAP
              for index in range(len(table.headers))]  # fmt: skip
    labels = list(range(table.num_labels))
    taken: list[int] = []
    for index in range(table.num_labels, len(table.headers)):
        if taken and sum(widths[column] for column in (*labels, *taken, index)) > WIDTH:
            yield only(table, [*labels, *taken])
            taken = []
        taken.append(index)
    yield only(table, [*labels, *taken])


def reasons(rows: Sequence[ResultRow], layouts: Sequence[Layout]) -> list[str]:
    """List reasons for missing numbers, each with its implementations and number of cells."""
    shown = {values.metric for layout in layouts for values in layout.values}
    cells: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        measurement = row.measurement
        if measurement.status != "ok" and measurement.metric in shown:
            key = (measurement.status.replace("_", " "), measurement.reason, row.identity.variant)
            cell = {axis: value for axis, value in measurement.settings.items() if axis != "pass"}
            cells.setdefault(key, set()).add(str((row.identity.precision, cell)))
    names: dict[tuple[str, str, int], list[str]] = {}
    for (status, reason, name), different in cells.items():
        names.setdefault((status, reason, len(different)), []).append(name)
    return [
        f"{', '.join(group)} in {count} {'cells' if count > 1 else 'cell'}: {status}, {reason}"
        for (status, reason, count), group in names.items()
    ]
