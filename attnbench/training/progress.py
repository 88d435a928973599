"""How far a run is, for people: a bar on a terminal, plain lines in a file."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from attnbench.settings.errors import printable

WINDOW_SECONDS = 10.0
"""Tokens per second and the time left are taken over the last steps within this time."""

LINE_SECONDS = 30.0
"""Without a terminal, a line is printed this often, or at every tenth of the run if that is sooner."""

PASSING_SECONDS = 1.0
"""Shortest part of something longer that has a bar of its own."""

Item = TypeVar("Item")


class ProgressBar:
    """Steps done, loss, tokens per second and time left, on standard error within 80 columns.

    A file or pipe gets a plain line every tenth of the run or LINE_SECONDS instead of control characters.

    Args:
        total_steps: of the whole run.
        tokens_per_step: over all devices.
        start_step: steps done before, by the run that this one resumes.
        description: who runs; cut to 20 characters.
        passing: part of something longer: shown only while it lasts, where that is long; as lines every LINE_SECONDS.
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
        self._bar = None
        if sys.stderr.isatty():
            # The widest figures and the description leave the bar a few columns of 80.
            shape = "{desc} |{bar}|{postfix}"
            desc = self.description
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                desc=desc,
                ncols=79,
                bar_format=shape,
                leave=not passing,
                delay=PASSING_SECONDS if passing else 0,
            )

    def update(self, step: int, loss: float | None = None) -> None:
        """Says that `step` steps are done; the loss of a step that logs it stays on show until the next one.

        Never reads a tensor: the caller gives the loss where it has it on the host anyway.
        """
        now = time.perf_counter()
        # The first step, which compiles, ends where the window begins.
        self._recent.append((now, step))
        while len(self._recent) > 2 and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        self.step, self._loss = step, self._loss if loss is None else loss
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(), refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._line_time >= LINE_SECONDS or (not self.passing and self._is_tenth(step)):
            self._print_line()

    def _is_tenth(self, step: int) -> bool:
        return (step - self._line_step) * 10 >= self.total_steps

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, the first one of this process left out; None before there are two."""
        if len(self._recent) < 2 or self._recent[-1][0] == self._recent[0][0]:
            return None
        (began, first), (ended, last) = self._recent[0], self._recent[-1]
        return (last - first) * self.tokens_per_step / (ended - began)

    def close(self) -> None:
        """Leaves the last state on show."""
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
            left = (self.total_steps - self.step) * self.tokens_per_step / rate
            figures += [f"{short_number(rate)} tok/s", f"{tqdm.format_interval(left)} left"]
        return " ".join(figures)

    def _print_line(self) -> None:
        share = 100 * self.step // max(1, self.total_steps)
        print(f"{self.description} {share:3d}% {self._figures()}", file=sys.stderr, flush=True)
        self._line_step, self._line_time = self.step, time.perf_counter()


def watched(items: Iterable[Item], total: int, tokens_per_item: int, description: str) -> Iterator[Item]:
    """The items, with a passing bar that shows how many of them are done."""
    bar = ProgressBar(total, tokens_per_item, 0, description, passing=True)
    try:
        for number, item in enumerate(items, start=1):
            yield item
            bar.update(number)
    finally:
        bar.close()


def short_number(value: float) -> str:
    """Three significant digits with k, M or G: 123456 -> 123k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
