"""The log of a training: metrics.jsonl in its folder, and a bar on a terminal or plain lines in a file.

{"step": 20, "tokens": 5120, "loss": 2.31, "seconds": 1.4}
"""

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from attnbench.machine.bars import bar
from attnbench.results.files import replace_file, stream_json_lines, to_line
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable

log = logging.getLogger(__name__)

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Text in metrics.jsonl for numbers that JSON does not have."""

WINDOW_SECONDS = 10.0
"""Tokens per second and the time left are computed from the steps in this time."""

LINE_SECONDS = 30.0
"""Without a terminal, a line is printed at this interval, or at every tenth of the run if that is sooner."""

PASSING_SECONDS = 1.0
"""Shortest duration of a passing task that has a bar."""

Item = TypeVar("Item")


class MetricsLog:
    """metrics.jsonl: a JSON object per line for each logged step and validation.

    Args:
        resume_step: step of the checkpoint; rows of later steps and a torn last line are removed. None starts a new
            file.
        num_rows: rows according to the checkpoint, if known; fewer are an error.
    """

    def __init__(self, path: Path, resume_step: int | None, num_rows: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.num_rows = 0
        replace_file(path, map(self._line, () if resume_step is None else _kept(path, resume_step, num_rows)))
        # Line-buffered, so that a row survives the process.
        self._file = open(path, "a", encoding="utf-8", buffering=1, newline="\n")  # noqa: SIM115

    def write(self, row: dict[str, Any]) -> None:
        """Write `step`, `tokens` and other numbers or texts."""
        self._file.write(self._line(row))

    def _line(self, row: dict[str, Any]) -> str:
        line = to_line({name: _text_if_not_finite(value) for name, value in row.items()})
        self.num_rows += 1
        return line

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _kept(path: Path, resume_step: int, num_rows: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows up to the checkpoint; rows of the same step may have followed it."""
    if not path.exists():
        if num_rows:
            log.warning(f"{path}: is gone, with its {num_rows} rows up to step {resume_step}")
        return
    way_out, num_kept = "rename it to begin a new one", 0
    try:
        for row in stream_metrics(path):
            if row["step"] < resume_step or (row["step"] == resume_step and num_kept != num_rows):
                num_kept += 1
                yield row
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from None
    if num_rows is not None and num_kept != num_rows:
        raise UserError(
            f"{path}: has {num_kept} rows up to step {resume_step}, but the checkpoint of that step counts {num_rows};"
            f" {way_out}"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(stream_metrics(path))


def stream_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl, which may be longer than memory; a torn last line is left out."""
    for number, (_, row) in enumerate(stream_json_lines(path), start=1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number}: a row of metrics needs a whole number as its step")
        yield {name: NOT_FINITE.get(x, x) if isinstance(x, str) else x for name, x in row.items()}


def _text_if_not_finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class ProgressBar:
    """Steps, loss, tokens per second and time left, on standard error within 80 columns.

    A file or pipe gets a plain line every tenth of the run or LINE_SECONDS.

    Args:
        tokens_per_step: over all devices.
        start_step: steps done by earlier processes.
        passing: a temporary bar for a part of a longer task, if that takes long.
    """

    def __init__(
        self, total_steps: int, tokens_per_step: int, start_step: int, description: str, *, passing: bool = False
    ) -> None:
        self.total_steps, self.tokens_per_step, self.step = total_steps, tokens_per_step, start_step
        self.passing = passing
        self.description = printable(description)[:20]
        self._loss: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._line_step, self._line_time = start_step, time.perf_counter()
        # The longest figures and the description leave a few of 80 columns for the bar.
        name = self.description.replace("{", "{{").replace("}", "}}")
        shape: dict[str, Any] = {"bar_format": f"{name} |{{bar}}| {{desc}}", "delay": PASSING_SECONDS if passing else 0}
        self._bar = bar(total=total_steps, initial=start_step, leave=not passing, **shape)

    def update(self, step: int, loss: float | None = None) -> None:
        """Show that `step` steps are done; a loss is shown until the next one.

        Never reads a tensor, which would wait for the device.
        """
        now = time.perf_counter()
        # The window begins after the first step, which compiles.
        self._recent.append((now, step))
        while len(self._recent) > 2 and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        self.step, self._loss = step, self._loss if loss is None else loss
        if self._bar is not None:
            self._bar.set_description_str(self._figures(), refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._line_time >= LINE_SECONDS or (
            not self.passing and (step - self._line_step) * 10 >= self.total_steps
        ):
            self._print_line()

    def shorten(self, total_steps: int) -> None:
        self.total_steps = total_steps
        if self._bar is not None:
            self._bar.total = total_steps

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, without this process's first one."""
        if len(self._recent) < 2 or self._recent[-1][0] == self._recent[0][0]:
            return None
        (began, first), (ended, last) = self._recent[0], self._recent[-1]
        return (last - first) * self.tokens_per_step / (ended - began)

    @property
    def seconds_left(self) -> float | None:
        rate = self.tokens_per_second
        return (self.total_steps - self.step) * self.tokens_per_step / rate if rate else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.step != self._line_step and not self.passing:
            self._print_line()

    def _figures(self) -> str:
        figures = [f"{self.step}/{self.total_steps}"]
        if self._loss is not None:
            figures.append(f"loss {self._loss:.4g}")
        rate = self.tokens_per_second
        if rate:
            figures.append(f"{tqdm.format_sizeof(rate)} tok/s")
            if self.seconds_left:
                figures.append(f"{tqdm.format_interval(self.seconds_left)} left")
        return " ".join(figures)

    def _print_line(self) -> None:
        share = 100 * self.step // max(1, self.total_steps)
        print(f"{self.description} {share:3d}% {self._figures()}", file=sys.stderr, flush=True)
        self._line_step, self._line_time = self.step, time.perf_counter()


def watched(items: Iterable[Item], total: int, tokens_per_item: int, description: str) -> Iterator[Item]:
    """Show progress in a passing bar."""
    progress = ProgressBar(total, tokens_per_item, 0, description, passing=True)
    try:
        for number, item in enumerate(items, start=1):
            yield item
            progress.update(number)
    finally:
        progress.close()
