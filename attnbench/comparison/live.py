"""The report of a plan while it runs."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attnbench.report.inputs import read_inputs
from attnbench.report.template import RUNNING
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError

log = logging.getLogger(__name__)

SHARE = 0.05
"""Largest share of a plan's time that writing reports may take."""

FIRST_SECONDS = 15.0
"""Time before the first report; a shorter plan has only the final one."""


@dataclass
class LiveReport:
    """Writes the report after runs that are not timed, as often as SHARE allows. `record` writes comparison.json, or
    returns False if nothing is scored yet."""

    folder: Path
    record: Callable[[], bool]
    is_wanted: bool = True
    _next: float = field(default_factory=lambda: time.monotonic() + FIRST_SECONDS, init=False)
    _is_begun: bool = field(default=False, init=False)

    def write(self) -> None:
        if self.is_wanted and time.monotonic() >= self._next:
            self._write()

    def write_last(self) -> None:
        """Write the report before the timed runs; none is written while they run."""
        if self._is_begun:
            self._write()

    def end(self) -> None:
        """Stop the page from reloading itself, if it is not written again, such as after an interruption."""
        page = self.folder / "report" / "index.html"
        if self._is_begun and page.exists():
            replace_file(page, page.read_text(encoding="utf-8").replace(RUNNING, "", 1))

    def _write(self) -> None:
        started = time.monotonic()
        try:
            if self.record():
                # Imported here: the drawing library takes a second to load.
                from attnbench.report.page import write_report

                write_report(self.folder, inputs=read_inputs(self.folder), is_running=True)
                self._is_begun = True
        except UserError as error:
            # The final report shows the error.
            log.debug(f"no report yet: {error}")
        # A failed intermediate report must not end the trainings that follow.
        except Exception as error:
            log.warning(f"no report yet: {type(error).__name__}: {error}")
        ended = time.monotonic()
        self._next = ended + (ended - started) / SHARE
