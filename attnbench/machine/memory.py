"""Memory of this process on Linux: its peak, a cap, and what the C library keeps."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnbench.settings.errors import UserError

PROCESS = Path("/proc/self")


def reset_resident_peak() -> float | None:
    """Restart `resident_peak_mib`; return the resident MiB, None if that is not possible."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return None
    return resident_peak_mib()


def resident_peak_mib() -> float:
    """Return the peak of resident MiB since `reset_resident_peak`."""
    return _entry_mib(PROCESS / "status", "VmHWM")


@contextmanager
def memory_capped(cap_mib: float | None) -> Iterator[None]:
    """Make allocations past the cap fail inside, before the system kills the process. Counts private memory; not shared
    libraries and files mapped for reading.

    Args:
        cap_mib: beyond the present memory of the process; None: no cap.
    """
    if cap_mib is None:
        yield
        return
    # Only Unix has it.
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((_entry_mib(PROCESS / "status", "VmData") + cap_mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def available_mib() -> float | None:
    """Return the MiB available without swapping; None if unknown."""
    path = Path("/proc/meminfo")
    return _entry_mib(path, "MemAvailable") if path.exists() else None


def check_free(num_bytes: int, what: str) -> None:
    """Raise UserError if the memory is not available: the system would kill a process without a message."""
    available, needed = available_mib(), num_bytes / 2**20
    if available is not None and needed > available:
        raise UserError(f"{what} take {needed:,.0f} MiB of memory, and {available:,.0f} are free; give a smaller model")


def _entry_mib(path: Path, name: str) -> float:
    for line in path.read_text().splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) / 2**10
    raise KeyError(f"{path} has no {name}")


def return_freed_memory() -> None:
    """Have glibc return large blocks when they are freed, so that the resident set is the memory in use."""
    if _is_glibc():
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)


def trim() -> None:
    """Have glibc return freed memory that it keeps."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
