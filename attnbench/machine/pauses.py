"""Time in which the process was suspended: by Ctrl-Z, a batch system, a container or a virtual machine's host."""

import threading
import time
from typing import Self

BEAT_SECONDS = 1.0
"""Time between two looks at the clock."""

LEAST_SECONDS = 5.0
"""Shortest gap between two looks that is a pause; in a shorter one the machine may only have been busy."""


class Pauses:
    """A clock that stands still while this process does not run at all, inside a `with`.

    A thread looks at the clock every BEAT_SECONDS. A busy machine still runs it within LEAST_SECONDS; a process that is
    suspended does not, whichever way it was suspended.
    """

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.perf_counter()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def __enter__(self) -> Self:
        self._last = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            self.clock()

    def clock(self) -> float:
        """Return the seconds since some moment without all pauses, also one that ended before the thread looked."""
        with self._lock:
            now = time.perf_counter()
            gap, self._last = now - self._last, now
            if gap >= LEAST_SECONDS:
                # Up to a beat of it was work.
                self._seconds += gap - BEAT_SECONDS
            return now - self._seconds
