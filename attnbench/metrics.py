"""metrics.jsonl: what a training logs, in the run's folder."""

import math
from pathlib import Path
from typing import Any

from attnbench.errors import UserError
from attnbench.jsonlines import read_json_lines, replace_file, to_line

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How metrics.jsonl writes what JSON has no number for; no other text of a row may be one of these."""


class MetricsLog:
    """metrics.jsonl: one JSON object a line for each logged step and each validation, on disk when `write` returns.

    Args:
        path: of the file.
        resume_step: the step of the checkpoint that the run goes on from; rows of later steps, which the run will
            write again, and a last line torn by the interruption are cut off. None starts afresh and replaces a file
            that is there.

    Raises:
        UserError: file and line of what is unreadable in the file to go on with.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resume_step is not None and path.exists():
            kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        replace_file(path, "".join(map(_metrics_line, kept)))
        # Line-buffered: a row is with the operating system as soon as it is written, whatever becomes of the process.
        self._file = open(path, "a", encoding="utf-8", buffering=1, newline="\n")  # noqa: SIM115

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row: `step` (optimizer steps done), `tokens` (seen so far) and numbers or text beside them.

        Raises:
            ValueError: there is no `step`.
            TypeError: a value is neither number, text, truth value nor None.
        """
        self._file.write(_metrics_line(row))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, also of a run that is still writing it; a torn last line is left out.

    Raises:
        UserError: the file cannot be read, or a line of it is no row.
    """
    lines = read_json_lines(path)
    for index, row in enumerate(lines.objects):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{lines.where(index)}: a row of metrics needs a whole number as its step")
    return [{name: _number_of_text(value) for name, value in row.items()} for row in lines.objects]


def _number_of_text(value: Any) -> Any:
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _metrics_line(row: dict[str, Any]) -> str:
    if not isinstance(row.get("step"), int):
        raise ValueError(f"a row of metrics needs a whole number as its step: {row}")
    for name, value in row.items():
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(f"{name}: a metric is a number or text, not {type(value).__name__}")
    return to_line({name: _text_if_not_finite(value) for name, value in row.items()})


def _text_if_not_finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
