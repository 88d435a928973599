"""Result rows: a measurement and its identity, and the files that keep them.

A results file has one JSON object a line, written as soon as the number is known, and ends with a record that says it
is complete, how many rows it has, what they hash to and when it was begun: `{"schema": 1, "complete": true, "num_rows":
12, "sha256": "...", "started": "2026-01-31T12:00:00+00:00"}`. Text is stored as it was given; who prints it to a
terminal escapes it.
"""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.results.files import JsonLines, read_json_lines, replace_file, sync, to_line
from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError, printable
from attnbench.settings.schema import SELECTION_SEED
from attnbench.settings.text import MAX_JSON_BYTES, parse_json, read_bounded, unlinked, whole_number

SCHEMA = 1
"""Number of the row format; a file with another one is refused."""

STATUSES = ("ok", "out_of_memory", "unsupported", "not_reached", "diverged", "failed")

TRAINING = "training"
"""The `evaluation` of a training's rows."""

ALL_SEEDS = "all"
"""The `seed` of a figure over seeds, whose num_samples counts them."""

DEVICE = "device"
"""The `variant` of measurements of the device itself."""

HASH = "[0-9a-f]" * 8
"""Pattern of a hash in the names of files, for glob; files under other names beside them are the user's."""

TEST_OF_BEST = {"split": "test", "checkpoint": "best"}
"""Settings of the scores that compare trained models: rates and checkpoints are chosen on validation data."""

MIXER_OPTIONS, EVALUATION_OPTIONS = "mixer_options", "evaluation_options"
"""Settings of every row of a mixer: its options as it was built, and all that the evaluation was set to. Of the latter
those that tell rows apart are axes, see figures.py."""

COLUMNS = (
    *("schema", "experiment", "run", "mixer", "variant", "backend", "model", "parameters", "seq_len", "evaluation"),
    *("metric", "value", "unit", "low", "high", "num_samples", "status", "reason"),
    *("seed", "precision", "device", "num_devices", "environment", "commit", "corpus", "config_hash", "settings"),
)
"""The columns of every row and of results.csv, in order."""

NUMBER_COLUMNS = {
    **dict.fromkeys(("schema", "parameters", "seq_len", "num_samples", "num_devices"), whole_number),
    # A whole number stays one, so that a file that is read and written again is the same.
    **dict.fromkeys(
        ("value", "low", "high"), lambda text: whole_number(text) if text.lstrip("-").isdigit() else float(text)
    ),
}
"""Columns of numbers, and what reads them; empty where there is none."""


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One number, or the status that says why there is none.

    Raises:
        ValueError: an unknown status, a number beside a status other than ok, a number that is not finite, or a
            missing number or reason.
    """

    metric: str
    value: float | None
    unit: str
    """Unit of the value; empty for a pure number."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Position of the number on the evaluation's axes: {"split": "test", "length": 50}."""
    low: float | None = None
    high: float | None = None
    """Ends of the interval, in `unit`."""
    num_samples: int | None = None
    """Number of items (labels, seeds, repetitions) behind the value."""
    status: str = "ok"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.metric}: status {self.status!r} must be one of {', '.join(STATUSES)}")
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        for name, number in numbers.items():
            if number is None:
                continue
            if self.status != "ok":
                raise ValueError(f"{self.metric}: {name}={number} beside status {self.status}, which has none")
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{self.metric}: {name} must be a number, not {type(number).__name__}")
            if not _is_finite(number):
                raise ValueError(f"{self.metric}: {name}={number}: what is not finite has a status, not a value")
        if self.status == "ok" and self.value is None:
            raise ValueError(f"{self.metric}: status ok needs a value")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"{self.metric}: status {self.status} needs a reason")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


@dataclass(slots=True, kw_only=True, frozen=True)
class Identity:
    """Origin of rows: the columns that every row of one results file shares."""

    experiment: str
    run: str
    """Name of the folder under outputs/<experiment> that holds the run."""
    mixer: str
    variant: str
    backend: str
    """Name of the backend as resolved, never `auto`."""
    model: str
    parameters: int | None
    """Number of parameters of the model as built; None where the evaluation builds models of its own."""
    seq_len: int | None
    """Positions of the training sequences."""
    evaluation: str
    seed: int | str
    """A number, or ALL_SEEDS on a figure over seeds."""
    precision: str
    device: str
    """The device's name, without an index."""
    num_devices: int
    environment: str
    """Fingerprint of the run's environment.json."""
    commit: str
    corpus: str | None
    """Name and fingerprint of the data; None where no corpus is read."""
    config_hash: str


@dataclass(slots=True, kw_only=True, frozen=True)
class ResultRow:
    """A measurement and its identity: one row of results.csv."""

    identity: Identity
    measurement: Measurement

    def to_dict(self) -> dict[str, Any]:
        """Write the row under the names and in the order of COLUMNS."""
        content = {"schema": SCHEMA, **asdict(self.identity), **asdict(self.measurement)}
        return {name: content[name] for name in COLUMNS}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ResultRow":
        """Read the row that `to_dict` gave.

        Raises:
            ValueError: another schema number, a column missing or unknown, or a measurement that contradicts itself.
        """
        if content.get("schema") != SCHEMA:
            raise ValueError(f"schema {content.get('schema')}, and this version of attnbench reads schema {SCHEMA}")
        missing, unknown = set(COLUMNS) - set(content), set(content) - set(COLUMNS)
        if missing or unknown:
            raise ValueError(
                "columns " + ", ".join([f"-{n}" for n in sorted(missing)] + [f"+{n}" for n in sorted(unknown)])
            )
        identity = {entry.name: content[entry.name] for entry in fields(Identity)}
        measurement = {entry.name: content[entry.name] for entry in fields(Measurement)}
        try:
            check_options(Identity, identity, group="")
            check_options(Measurement, measurement, group="")
        except UserError as error:
            raise ValueError(str(error)) from None
        return cls(identity=Identity(**identity), measurement=Measurement(**measurement))


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
        ending = {
            "schema": SCHEMA,
            "complete": True,
            "num_rows": self.num_rows,
            "sha256": self._digest.hexdigest(),
            "started": self._started.isoformat(timespec="seconds"),
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
    if complete:
        objects = objects[:-1]
    elif not allow_incomplete:
        number = len(objects) + 1
        what = "is torn" if lines.torn else "lacks the record that the file is complete"
        raise UserError(f"{path}:{number}: the end {what}")
    rows = []
    for index, content in enumerate(objects):
        try:
            rows.append(ResultRow.from_dict(content))
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
        started = lines.objects[-1].get("started") if _completeness(lines) else None
    try:
        moment = datetime.fromisoformat(started) if isinstance(started, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


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
    # The first files of this schema came without a checksum, and later ones without the time.
    if set(ending) - {"sha256", "started"} != {"schema", "complete", "num_rows"} or ending["complete"] is not True:
        raise UserError(f"{lines.where(index)}: not the record that a file is complete")
    return True


def _check_sum(lines: JsonLines) -> None:
    """Check that the rows of a complete file are those that were written."""
    if lines.objects[-1].get("sha256", lines.sha256) != lines.sha256:
        raise UserError(f"{lines.path}: altered after it was written, its rows do not match the checksum at its end")


def write_csv(rows: Iterable[ResultRow], path: Path) -> None:
    """Write results.csv: COLUMNS in order, settings as a JSON object, empty where there is no number; of texts what a
    terminal would obey is spelled out."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        content = row.to_dict()
        shown = {name: printable(value) if isinstance(value, str) else value for name, value in content.items()}
        writer.writerow({**shown, "settings": json.dumps(content["settings"], allow_nan=False, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue())


def write_environments(target: Path, stamps: Mapping[str, Any]) -> None:
    """Write environment-<id>.json of each into the folder, and remove those of rows that stood there before."""
    for path in set(target.glob(f"environment-{HASH}.json")) - {target / f"environment-{name}.json" for name in stamps}:
        path.unlink()
    for name, stamp in stamps.items():
        replace_file(target / f"environment-{name}.json", json.dumps(stamp, indent=2) + "\n")


def read_csv(path: Path) -> list[ResultRow]:
    """Read the rows of a results.csv.

    Raises:
        UserError: the file cannot be read, or the line of what is no result row.
    """
    try:
        lines = list(csv.DictReader(io.StringIO(read_bounded(path, MAX_JSON_BYTES), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            if None in line or None in line.values():
                raise ValueError("not as many cells as there are columns")
            rows.append(ResultRow.from_dict({name: _from_cell(name, text) for name, text in line.items()}))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: row {number}: {error}") from error
    return rows


def _from_cell(column: str, text: str) -> Any:
    if column == "settings":
        return parse_json(text)
    if column in NUMBER_COLUMNS:
        return None if text == "" else NUMBER_COLUMNS[column](text)
    if column == "seed":
        return text if text == ALL_SEEDS else whole_number(text)
    return None if column == "corpus" and text == "" else text


def is_search(seed: int | str) -> bool:
    """Tell if rows of a seed are those of a search of the learning rate, which stand in no table."""
    return isinstance(seed, int) and seed >= SELECTION_SEED


def same_corpus(rows: Iterable[ResultRow]) -> str | None:
    """Return the one corpus that all `rows` come from; None where they read none, or there are no rows.

    Raises:
        UserError: the rows come from several corpora, whose numbers cannot be compared.
    """
    corpora = {row.identity.corpus for row in rows}
    if len(corpora) > 1:
        names = ", ".join(sorted("(none)" if name is None else name for name in corpora))
        raise UserError(f"rows of different corpora cannot be compared: {names}; make a table of each")
    return corpora.pop() if corpora else None
