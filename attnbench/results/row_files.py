"""Results files: rows as JSON lines. A file is written beside and renamed, so that one that exists is complete.

Its last record has the number of rows, their hash, when it was begun, and the sitting, named by the start of the
command that measured it:
`{"schema": 1, "complete": true, "num_rows": 12, "sha256": "...", "started": "2026-01-31T12:00:00.250+00:00",
"sitting": "2026-01-31T11:58:00.000+00:00"}`.
Of a cell that was imported the record has `imported` too, a list of marks, which every row has among its settings.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.results.files import JsonLines, read_json_lines, sync, to_line
from attnbench.results.rows import IMPORTED, SCHEMA, Identity, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.paths import name_beside

MAX_MARK_CHARACTERS = 1000
"""Longest entry of a mark of an import."""

MAX_MARKS = 64
"""Most marks of one cell, which each of its rows repeats."""

SITTING = "ATTNBENCH_SITTING"
"""Environment variable by which the processes of a command know its sitting."""


def begin_sitting() -> None:
    """Results from here on, also of processes that this one starts, were measured in one sitting."""
    os.environ[SITTING] = datetime.now(UTC).isoformat(timespec="milliseconds")


class ResultsWriter:
    """Writer of one results file; used in a `with`, the file gets its name at the end.

    Results that are there when the writer is made are removed: they are about to be measured again. `settings` are of
    all rows, beside those of each measurement.
    """

    def __init__(self, path: Path, identity: Identity, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.identity, self.settings, self.num_rows = path, identity, settings or {}, 0
        self._digest, self._started = hashlib.sha256(), datetime.now(UTC)
        # Without parents: a run's folder that is gone must not come back with results alone.
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        self._beside = name_beside(path)
        self._file = open(self._beside, "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    def write(self, measurement: Measurement, **columns: str) -> ResultRow:
        """Write one row; `columns` are those of its identity that differ from the file's.

        Raises:
            ValueError, TypeError: the settings hold values that JSON does not have.
        """
        measurement = replace(measurement, settings={**self.settings, **measurement.settings})
        row = ResultRow(identity=replace(self.identity, **columns), measurement=measurement)
        line = to_line(row.to_dict())
        self._file.write(line)
        self._digest.update(line.encode())
        self.num_rows += 1
        return row

    def complete(self) -> None:
        """Write the last record, and give the file its name once all of it is on the disk."""
        started = self._started.isoformat(timespec="milliseconds")
        ending = {
            "schema": SCHEMA,
            "complete": True,
            "num_rows": self.num_rows,
            "sha256": self._digest.hexdigest(),
            "started": started,
            # Called from Python without a command, each file is a sitting of its own.
            "sitting": os.environ.get(SITTING, started),
        }
        with self._file:
            self._file.write(to_line(ending))
            self._file.flush()
            os.fsync(self._file.fileno())
        os.replace(self._beside, self.path)
        sync(self.path.parent)

    def __enter__(self) -> "ResultsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.complete()
        finally:
            # On a full disk closing fails too, and the rows are in the way.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)


def read_results(path: Path) -> list[ResultRow]:
    """An error names file and line of an unreadable row, of another schema, or of a missing end, and the remedy."""
    with _naming_the_remedy():
        return parse_results(path)


@contextmanager
def _naming_the_remedy() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; once it is removed, the command that made it makes it again") from None


def parse_results(path: Path) -> list[ResultRow]:
    """Read as read_results does, from a file that no command here could make again."""
    lines = read_json_lines(path)
    ending = last_record(lines)
    rows, sitting, imported = [], sitting_of(lines), ending.get(IMPORTED)
    for index, content in enumerate(lines.objects[:-1]):
        try:
            row = replace(ResultRow.from_dict(content), sitting=sitting)
        except ValueError as error:
            raise UserError(f"{lines.where(index)}: {error}") from error
        if imported is not None:
            row.measurement.settings[IMPORTED] = imported
        rows.append(row)
    # Last: the error of a single line says more.
    check_sum(lines)
    return rows


def check_sum(lines: JsonLines) -> None:
    """The rows must be those that were written."""
    if lines.objects[-1].get("sha256", lines.sha256) != lines.sha256:
        raise UserError(f"{lines.path}: altered after it was written, its rows do not match the checksum at its end")


def started_at(path: Path) -> datetime | None:
    """Return when the results were begun, by the clock of that machine; None: unknown."""
    with _naming_the_remedy():
        return begun(read_json_lines(path))


def begun(lines: JsonLines) -> datetime | None:
    """Return when a results file was begun, as its last record says; None: it does not say."""
    started = last_record(lines).get("started")
    try:
        moment = datetime.fromisoformat(started) if isinstance(started, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def sitting_of(lines: JsonLines) -> str:
    """Return the sitting of a results file; empty where its last record does not say."""
    sitting = lines.objects[-1].get("sitting", "")
    return sitting if isinstance(sitting, str) else ""


def by_age(path: Path, started: datetime | None) -> tuple[datetime, str]:
    """Return the key that orders results files from the oldest to the newest, whatever the dates of the files are.

    Unknown times come first; among equals the name decides, so that a copy has one order.
    """
    return started or datetime.min.replace(tzinfo=UTC), path.name


def last_record(lines: JsonLines) -> dict[str, Any]:
    endings = [index for index, content in enumerate(lines.objects) if "complete" in content]
    if not endings:
        what = "is torn" if lines.torn else "lacks the record that the file is complete"
        raise UserError(f"{lines.where(len(lines.objects))}: the end {what}")
    index = endings[0]
    ending = lines.objects[index]
    if index != len(lines.objects) - 1 or lines.torn:
        raise UserError(f"{lines.where(index + 1)}: something follows the record that the file is complete")
    if ending.get("num_rows") != index:
        raise UserError(
            f"{lines.where(index)}: the file has {index} rows, and its last record counts {ending.get('num_rows')}"
        )
    # Published cells of former versions have no checksum, no time or no sitting.
    optional = {"sha256", "started", "sitting", IMPORTED}
    if set(ending) - optional != {"schema", "complete", "num_rows"} or ending["complete"] is not True:
        raise UserError(f"{lines.where(index)}: not the record that a file is complete")
    if IMPORTED in ending and not _are_marks(ending[IMPORTED]):
        raise UserError(f"{lines.where(index)}: {IMPORTED} is no list of marks that import= writes")
    return ending


def _are_marks(marks: Any) -> bool:
    """Marks of imports: the file's sha256, when, and the result of a check."""
    return (
        isinstance(marks, list)
        and len(marks) <= MAX_MARKS
        and all(
            isinstance(mark, dict)
            and {"sha256", "when"} <= mark.keys() <= {"sha256", "when", "check"}
            and all(isinstance(value, str) and len(value) <= MAX_MARK_CHARACTERS for value in mark.values())
            for mark in marks
        )
    )
