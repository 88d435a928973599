"""results.csv, or results.csv.gz of a published comparison, and the environments of its rows."""

import csv
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnbench.results.files import PACKED, replace_file
from attnbench.results.rows import COLUMNS, HASH, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable, without_paths
from attnbench.settings.untrusted import MAX_JSON_BYTES, parse_json, read_bounded_bytes, whole_number

TABLE, PACKED_TABLE = "results.csv", f"results.csv{PACKED}"

MAX_ROWS = 2**18
"""Most lines of a table, six times the longest published one."""

NUMBER_COLUMNS = {
    **dict.fromkeys(("schema", "parameters", "seq_len", "num_samples", "num_devices", "seed"), whole_number),
    # Integers stay integers, so that files round-trip.
    **dict.fromkeys(
        ("value", "low", "high"), lambda text: whole_number(text) if text.lstrip("-").isdigit() else float(text)
    ),
}
"""Parsers of numeric columns; empty means None."""


def write_csv(rows: Iterable[ResultRow], path: Path) -> None:
    """Write COLUMNS in order, settings as a JSON object in their own order. Texts are escaped for terminals; reasons
    have no absolute paths."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        content = row.to_dict()
        shown = {name: printable(value) if isinstance(value, str) else value for name, value in content.items()}
        shown["reason"] = without_paths(shown["reason"])
        writer.writerow({**shown, "settings": json.dumps(content["settings"], allow_nan=False)})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.getvalue())


def table_of(folder: Path) -> Path:
    """Return results.csv or results.csv.gz of a folder; the former if there is none."""
    packed = folder / PACKED_TABLE
    return packed if packed.exists() else folder / TABLE


def write_environments(target: Path, stamps: Mapping[str, Any]) -> None:
    """Write environment-<id>.json for each, and remove former ones."""
    for path in set(target.glob(f"environment-{HASH}.json")) - {target / f"environment-{name}.json" for name in stamps}:
        path.unlink()
    for name, stamp in stamps.items():
        replace_file(target / f"environment-{name}.json", json.dumps(stamp, indent=2) + "\n")


def read_csv(path: Path) -> list[ResultRow]:
    try:
        content = read_bounded_bytes(path, MAX_JSON_BYTES, is_packed=path.suffix == PACKED)
        if content.count(b"\n") > MAX_ROWS:
            raise UserError(f"{path}: more than the {MAX_ROWS} rows that such a file may have")
        lines = csv.DictReader(io.StringIO(content.decode("utf-8"), newline=""))
        # Row by row: an empty row takes a hundred times its bytes. Older tables have means over all seeds too.
        return [_row(path, number, line) for number, line in enumerate(lines, start=2) if line.get("seed") != "all"]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV ({error})") from error


def _row(path: Path, number: int, line: dict[Any, Any]) -> ResultRow:
    try:
        if None in line or None in line.values():
            raise ValueError("not as many cells as there are columns")
        return ResultRow.from_dict({name: _from_cell(name, text) for name, text in line.items()})
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: row {number}: {error}") from error


def _from_cell(column: str, text: str) -> Any:
    if column == "settings":
        return parse_json(text)
    if column in NUMBER_COLUMNS:
        return None if text == "" else NUMBER_COLUMNS[column](text)
    return None if column == "corpus" and text == "" else text
