import threading
import time
from typing import Self

BEAT_SECONDS = 1.0
"""Time between two readings of the clock."""

LEAST_SECONDS = 5.0
"""Shortest gap between two readings that is a pause; in a shorter one the machine may have been busy."""


class Pauses:
    """Clock that stops inside a `with` while this process is suspended: by Ctrl-Z, a batch system, a container or a
    virtual machine's host.

    A thread reads the clock every BEAT_SECONDS; a busy machine still runs it within LEAST_SECONDS.
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
        """Seconds since some moment, without pauses."""
        with self._lock:
            now = time.perf_counter()
            gap, self._last = now - self._last, now
            if gap >= LEAST_SECONDS:
                # Up to a beat of the gap was work.
                self._seconds += gap - BEAT_SECONDS
            return now - self._seconds
