"""Results files: rows as JSON lines, each written as soon as its number is known.

A file ends with a record that says it is complete, how many rows it has, what they hash to, when it was begun, and in
which sitting, which is named by the start of the command that measured it:
`{"schema": 1, "complete": true, "num_rows": 12, "sha256": "...", "started": "2026-01-31T12:00:00.250+00:00",
"sitting": "2026-01-31T11:58:00.000+00:00"}`.
Of a cell that was imported the record has `imported` too, a list of marks, which every row has among its settings.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.results.files import JsonLines, read_json_lines, sync, to_line
from attnbench.results.rows import IMPORTED, SCHEMA, Identity, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.text import unlinked

MAX_MARK_CHARACTERS = 1000
"""Longest entry of a mark of an import."""

MAX_MARKS = 64
"""Most marks of one cell, which each of its rows repeats."""

SITTING = "ATTNBENCH_SITTING"
"""Environment variable by which the processes of a command know its sitting."""


def begin_sitting() -> None:
    """Begin a sitting: results from here on, also of processes that this one starts, were measured in it."""
    os.environ[SITTING] = datetime.now(UTC).isoformat(timespec="milliseconds")


class ResultsWriter:
    """Writer of one results file, row by row; used in a `with`, it says at the end that the file is complete.

    A file that is there is replaced: an evaluation that was cut off is measured again as a whole. Left by an
    exception, the file stays without its last record, and `is_complete` says so.

    Args:
        settings: of all rows, beside those of each measurement.
    """

    def __init__(self, path: Path, identity: Identity, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.identity, self.settings, self.num_rows = path, identity, settings or {}, 0
        self._digest, self._started = hashlib.sha256(), datetime.now(UTC)
        # Without parents: a run whose folder is gone must not leave results alone in a new one.
        path.parent.mkdir(exist_ok=True)
        self._file = open(unlinked(path), "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    def write(self, measurement: Measurement, variant: str | None = None, backend: str | None = None) -> ResultRow:
        """Write one row; it is in the file when this returns.

        Args:
            variant: whose row it is, where one file holds those of several.
            backend: what computes it; None where its name says that.

        Raises:
            ValueError, TypeError: the settings hold what JSON cannot say.
        """
        identity = self.identity
        if self.settings:
            measurement = replace(measurement, settings={**self.settings, **measurement.settings})
        if variant is not None:
            identity = replace(identity, variant=variant, backend=variant if backend is None else backend)
        row = ResultRow(identity=identity, measurement=measurement)
        line = to_line(row.to_dict())
        self._file.write(line)
        self._file.flush()
        self._digest.update(line.encode())
        self.num_rows += 1
        return row

    def complete(self) -> None:
        """Write the record that says the file is complete, and close it; all of it outlives the machine then."""
        # The rows first: what a machine that died leaves must not be called complete.
        os.fsync(self._file.fileno())
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
        self._file.write(to_line(ending))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def __enter__(self) -> "ResultsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.complete()
        else:
            self.close()


def read_results(path: Path, *, allow_incomplete: bool = False) -> list[ResultRow]:
    """Read the rows of a results file.

    Args:
        allow_incomplete: also takes a file that was cut off, and gives the rows that were written whole.

    Raises:
        UserError: file and line of what is unreadable, of another schema, or missing at the end, and the way out.
    """
    with _naming_the_way_out():
        return parse_results(path, allow_incomplete=allow_incomplete)


@contextmanager
def _naming_the_way_out() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; once it is removed, the command that made it makes it again") from None


def parse_results(path: Path, *, allow_incomplete: bool = False) -> list[ResultRow]:
    """Read as read_results does, from a file that nobody here could make again."""
    lines = read_json_lines(path)
    objects, complete = lines.objects, _completeness(lines)
    sitting = ""
    if complete:
        sitting, objects = sitting_of(lines), objects[:-1]
    elif not allow_incomplete:
        number = len(objects) + 1
        what = "is torn" if lines.torn else "lacks the record that the file is complete"
        raise UserError(f"{path}:{number}: the end {what}")
    rows, imported = [], lines.objects[-1].get(IMPORTED) if complete else None
    for index, content in enumerate(objects):
        try:
            row = replace(ResultRow.from_dict(content), sitting=sitting)
            if imported is not None:
                row.measurement.settings[IMPORTED] = imported
            rows.append(row)
        except ValueError as error:
            raise UserError(f"{lines.where(index)}: {error}") from error
    if complete:
        # Last: what is wrong with a line says more.
        _check_sum(lines)
    return rows


def started_at(path: Path) -> datetime | None:
    """Return when the complete results of `path` were begun, by the clock of that machine; None: it does not say.

    Raises:
        UserError: as read_results.
    """
    with _naming_the_way_out():
        lines = read_json_lines(path)
        return begun(lines) if _completeness(lines) else None


def begun(lines: JsonLines) -> datetime | None:
    """Return when a complete file was begun, as its last record says; None: it does not say."""
    started = lines.objects[-1].get("started")
    try:
        moment = datetime.fromisoformat(started) if isinstance(started, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def sitting_of(lines: JsonLines) -> str:
    """Return the sitting of a complete file; empty where its last record does not say."""
    sitting = lines.objects[-1].get("sitting", "")
    return sitting if isinstance(sitting, str) else ""


def by_age(path: Path, started: datetime | None) -> tuple[datetime, str]:
    """Return the key that orders results files from the oldest to the newest, whatever the dates of the files are.

    Those that do not say when they were begun come first; among equals the name decides, so that a copy has one order.
    """
    return started or datetime.min.replace(tzinfo=UTC), path.name


def is_complete(path: Path) -> bool:
    """Tell if the evaluation that wrote `path` came to its end; False too where there is no such file.

    Raises:
        UserError: as read_results, for a file that was altered.
    """
    if not path.exists():
        return False
    with _naming_the_way_out():
        return are_complete(read_json_lines(path))


def are_complete(lines: JsonLines) -> bool:
    """Tell if the lines of a results file end with the record that they are complete.

    Raises:
        UserError: they were altered after they were written.
    """
    if not _completeness(lines):
        return False
    _check_sum(lines)
    return True


def _completeness(lines: JsonLines) -> bool:
    endings = [index for index, content in enumerate(lines.objects) if "complete" in content]
    if not endings:
        return False
    index = endings[0]
    ending = lines.objects[index]
    num_rows = ending.get("num_rows")
    if index != len(lines.objects) - 1 or lines.torn:
        raise UserError(f"{lines.where(index + 1)}: something follows the record that the file is complete")
    if num_rows != index:
        raise UserError(f"{lines.where(index)}: the file has {index} rows, and its last record counts {num_rows}")
    # Former versions wrote no checksum, no time or no sitting.
    optional = {"sha256", "started", "sitting", IMPORTED}
    if set(ending) - optional != {"schema", "complete", "num_rows"} or ending["complete"] is not True:
        raise UserError(f"{lines.where(index)}: not the record that a file is complete")
    if IMPORTED in ending and not _are_marks(ending[IMPORTED]):
        raise UserError(f"{lines.where(index)}: {IMPORTED} is no list of marks that import= writes")
    return True


def _are_marks(marks: Any) -> bool:
    """Tell if these are the marks of imports: the file's sha256, when, and what a check of it came to."""
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


def _check_sum(lines: JsonLines) -> None:
    """Check that the rows of a complete file are those that were written."""
    if lines.objects[-1].get("sha256", lines.sha256) != lines.sha256:
        raise UserError(f"{lines.path}: altered after it was written, its rows do not match the checksum at its end")
