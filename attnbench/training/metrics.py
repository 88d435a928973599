"""metrics.jsonl: what a training logs, in the run's folder, each line with a checksum of its own.

{"step": 20, "tokens": 5120, "loss": 2.31, "seconds": 1.4, "crc32": "8f1e22a0"}
"""

import logging
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnbench.results.files import replace_file, stream_json_lines, to_line
from attnbench.settings.errors import UserError

log = logging.getLogger(__name__)

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How metrics.jsonl writes what JSON has no number for; no other text of a row may be one of these."""

CHECKSUM = "crc32"
"""Last entry of every line: eight hex digits, of the text of the line without it."""


class MetricsLog:
    """metrics.jsonl: one JSON object a line for each logged step and each validation, on disk when `write` returns.

    Args:
        path: of the file.
        resume_step: the step of the checkpoint that the run goes on from; rows of later steps, which the run will
            write again, and a last line torn by the interruption are cut off. None starts afresh and replaces a file
            that is there.
        num_rows: how many rows the checkpoint counts; None where it does not know.

    Raises:
        UserError: file and line of what is unreadable or altered in the file to go on with, or that rows are missing.
    """

    def __init__(self, path: Path, resume_step: int | None, num_rows: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.num_rows = 0
        replace_file(path, map(self._line, () if resume_step is None else _kept(path, resume_step, num_rows)))
        # Line-buffered: a row is with the operating system as soon as it is written, whatever becomes of the process.
        self._file = open(path, "a", encoding="utf-8", buffering=1, newline="\n")  # noqa: SIM115

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row: `step` (optimizer steps done), `tokens` (seen so far) and numbers or text beside them.

        Raises:
            ValueError: there is no `step`.
            TypeError: a value is neither number, text, truth value nor None.
        """
        self._file.write(self._line(row))

    def _line(self, row: dict[str, Any]) -> str:
        line = _metrics_line(row)
        self.num_rows += 1
        return line

    def sync(self) -> None:
        """What was written outlives the machine too: asked for before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _kept(path: Path, resume_step: int, num_rows: int | None) -> Iterator[dict[str, Any]]:
    """The rows up to the checkpoint's step, as many as it counts: one of the same step may have come after it."""
    if not path.exists():
        if num_rows:
            log.warning(f"{path}: is gone, and with it the {num_rows} rows up to step {resume_step}")
        return
    way_out, num_kept = "rename it to go on with a new one", 0
    try:
        for row in stream_metrics(path):
            if row["step"] < resume_step or (row["step"] == resume_step and num_kept != num_rows):
                num_kept += 1
                yield row
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from None
    if num_rows is not None and num_kept != num_rows:
        raise UserError(
            f"{path}: has {num_kept} rows up to step {resume_step}, and the checkpoint of that step counts {num_rows};"
            f" {way_out}"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl; see `stream_metrics`."""
    return list(stream_metrics(path))


def stream_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics.jsonl, also of a run that is still writing it; a torn last line is left out.

    A long training's file may be longer than memory: it is read a line at a time.

    Raises:
        UserError: the file cannot be read, or a line of it is no row or was altered.
    """
    is_checked = None
    for number, (text, row) in enumerate(stream_json_lines(path), start=1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: a row of metrics needs a whole number as its step")
        # The first versions wrote none: either every line has one, or none.
        has_checksum = CHECKSUM in row
        is_checked = has_checksum if is_checked is None else is_checked
        if has_checksum != is_checked or (is_checked and not _is_as_written(text)):
            # Where lines before this one have none, it is the first of them that has lost it.
            altered = number if is_checked else 1
            raise UserError(f"{path}:{altered}: altered after it was written, it does not match its checksum")
        yield {name: _number_of_text(value) for name, value in row.items() if name != CHECKSUM}


def _is_as_written(text: str) -> bool:
    # By its text, as equal numbers can be written in several ways.
    start = text.rfind(f', "{CHECKSUM}"')
    return start >= 0 and text[start:] == _ending(text[:start])


def _ending(text: str) -> str:
    """What follows the text of a row, and closes it."""
    return f', "{CHECKSUM}": "{zlib.crc32(text.encode()):08x}"}}'


def _number_of_text(value: Any) -> Any:
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _metrics_line(row: dict[str, Any]) -> str:
    if not isinstance(row.get("step"), int):
        raise ValueError(f"a row of metrics needs a whole number as its step: {row}")
    for name, value in row.items():
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(f"{name}: a metric is a number or text, not {type(value).__name__}")
    text = to_line({name: _text_if_not_finite(value) for name, value in row.items()}).rstrip()[:-1]
    return text + _ending(text) + "\n"


def _text_if_not_finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
