"""A bench's rows as tables: lines by shape, columns by implementation, for a terminal and for a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.results.rows import DEVICE, Measurement, ResultRow
from attnbench.results.tables import Table, format_number
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import printable

WIDTH = 79
GAP = 3
"""Columns of a terminal between two of a table."""

STATUSES = {"out_of_memory": "no memory", "unsupported": "–"}
"""As a cell shows them; the reasons stand below the table."""


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
    """One table of a bench."""

    title: str
    lines: tuple[str, ...]
    """Settings that tell its lines apart."""
    values: tuple[Values, ...]
    columns: str = "implementation"
    """The setting that tells the columns of the same values apart; empty where there is one column of each."""
    headers: dict[str, str] = field(default_factory=dict)
    """Text above `lines` where it is not the setting's name."""
    on_page_alone: bool = False
    """Left out on a terminal, for its length."""


def grids(rows: Sequence[ResultRow], layouts: Sequence[Layout]) -> Iterator[Table]:
    """A grid for each layout that has rows. Rows of several runs get a label for whatever else they differ in.

    Raises:
        UserError: two rows belong into one cell.
    """
    with_precision = len({row.identity.precision for row in rows}) > 1
    for layout in layouts:
        drawn = _grid(rows, layout, with_precision)
        if drawn.lines:
            yield drawn


def _grid(rows: Sequence[ResultRow], layout: Layout, with_precision: bool) -> Table:
    entries = [
        (index, values, row, settings)
        for index, values in enumerate(layout.values)
        for row in rows
        for settings in [_settings(row)]
        if row.identity.variant != DEVICE and _takes(values, row.measurement.metric, settings, layout.columns)
    ]
    labels = ["precision"] * with_precision + _differing([entry[-1] for entry in entries], layout) + [*layout.lines]
    cells: dict[tuple[Any, ...], dict[tuple[int, Any], ResultRow]] = {}
    columns: dict[tuple[int, Any], str] = {}
    supported = set()
    for index, values, row, settings in entries:
        name = settings.get(layout.columns)
        own = cells.setdefault(tuple(settings.get(label) for label in labels), {})
        if (index, name) in own:
            runs = " and in ".join(dict.fromkeys((own[index, name].identity.run, row.identity.run)))
            place = ", ".join(f"{label}={settings.get(label)}" for label in labels)
            raise UserError(
                f"{layout.title}: {values.header.format(name)} at {place} was measured twice, in {runs}; make a table "
                "of each"
            )
        own[index, name] = row
        columns.setdefault((index, name), values.header.format(name))
        if row.measurement.status != "unsupported":
            supported.add((index, name))
    # What runs nowhere here is a reason below the table, no column.
    shown = {key: header for key, header in columns.items() if key in supported}
    return Table(
        title=layout.title,
        headers=[*(layout.headers.get(label, label.replace("_", " ")) for label in labels), *shown.values()],
        num_labels=len(labels),
        lines=[
            [
                *(printable(_label(value)) for value in line),
                *(_shown(own[key].measurement, layout.values[key[0]]) if key in own else "–" for key in shown),
            ]
            for line, own in cells.items()
            if shown
        ],
    )


def _settings(row: ResultRow) -> dict[str, Any]:
    """Of a row, with what stands in columns of its own."""
    identity = row.identity
    own = {"implementation": identity.variant, "backend": identity.backend, "precision": identity.precision}
    return {**row.measurement.settings, **own}


def _differing(found: Sequence[dict[str, Any]], layout: Layout) -> list[str]:
    """Settings that neither line nor column of this layout tells, and that are not the same in all its rows."""
    told = {*layout.lines, layout.columns, "implementation", "backend", "precision", "pass", "numerator", "denominator"}
    told |= {name for values in layout.values for name in values.where}
    names = dict.fromkeys(name for settings in found for name in settings if name not in told)
    return [name for name in names if len({settings.get(name) for settings in found}) > 1]


def _takes(values: Values, metric: str, settings: dict[str, Any], columns: str) -> bool:
    return (
        metric == values.metric
        and values.where.items() <= settings.items()
        and (values.only is None or settings.get(columns) in values.only)
    )


def _shown(measurement: Measurement, values: Values) -> str:
    if measurement.value is None:
        return STATUSES.get(measurement.status, measurement.status)
    return f"{measurement.value:.0%}" if values.is_share else format_number(measurement.value)


def _label(value: Any) -> str:
    if value in (None, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def narrowed(drawn: Table, width: int = WIDTH) -> Iterator[Table]:
    """The same grid as several side by side, each with the labels, where one would be wider than a terminal."""
    widths = [
        max(len(header), *(len(str(line[index])) for line in drawn.lines)) + GAP
        for index, header in enumerate(drawn.headers)
    ]
    labels = list(range(drawn.num_labels))
    taken: list[int] = []
    for index in range(drawn.num_labels, len(drawn.headers)):
        if taken and sum(widths[column] for column in (*labels, *taken, index)) > width:
            yield _columns(drawn, [*labels, *taken])
            taken = []
        taken.append(index)
    yield _columns(drawn, [*labels, *taken])


def _columns(drawn: Table, chosen: Sequence[int]) -> Table:
    return replace(
        drawn,
        headers=[drawn.headers[index] for index in chosen],
        lines=[[line[index] for index in chosen] for line in drawn.lines],
    )


def reasons(rows: Sequence[ResultRow], layouts: Sequence[Layout]) -> list[str]:
    """Why numbers are missing in the tables, a line for each reason, with whose they are and of how many cells."""
    shown = {values.metric for layout in layouts for values in layout.values}
    cells: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        measurement = row.measurement
        if measurement.status != "ok" and measurement.metric in shown:
            key = (measurement.status.replace("_", " "), measurement.reason, row.identity.variant)
            cell = {axis: value for axis, value in measurement.settings.items() if axis != "pass"}
            cells.setdefault(key, set()).add(str((row.identity.precision, cell)))
    names: dict[tuple[str, str, int], list[str]] = {}
    for (status, reason, name), own in cells.items():
        names.setdefault((status, reason, len(own)), []).append(name)
    return [
        printable(f"{', '.join(own)} in {count} {'cells' if count > 1 else 'cell'}: {status}, {reason}")
        for (status, reason, count), own in names.items()
    ]
