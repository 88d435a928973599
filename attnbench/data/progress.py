"""Progress through the bytes of a text: a bar on a terminal, otherwise a line from time to time."""

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

LINE_SECONDS = 30


class Progress:
    """Bytes done of all, and how many a second.

    Args:
        total: bytes.
        description: what is done.
    """

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description = total, description
        self.done = 0
        self._line_time = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            # Nothing where it takes no longer than a second.
            shape: dict[str, Any] = {"unit": "B", "unit_scale": True, "ncols": 79, "leave": False, "delay": 1}
            self._bar = tqdm(total=total, desc=description[:30], **shape)

    def start(self, num_bytes: int) -> None:
        """Count bytes that were done before."""
        self.done += num_bytes
        if self._bar is not None:
            self._bar.initial += num_bytes
            self._bar.n += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done now."""
        self.done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_time >= LINE_SECONDS:
            self._line_time = time.monotonic()
            log.info(f"{self.description}: {100 * self.done // max(1, self.total)} % of {self.total / 1e6:,.0f} MB")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
