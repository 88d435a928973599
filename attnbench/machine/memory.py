"""Memory of this process as Linux counts it: its peak, a cap on it, and the share that the C library keeps."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnbench.settings.errors import UserError

PROCESS = Path("/proc/self")


def reset_resident_peak() -> float | None:
    """Count `resident_peak_mib` anew from here on; return the MiB resident now, None where that is not possible."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return None
    return resident_peak_mib()


def resident_peak_mib() -> float:
    """Return the most MiB resident since `reset_resident_peak`."""
    return _entry_mib(PROCESS / "status", "VmHWM")


@contextmanager
def memory_capped(cap_mib: float | None) -> Iterator[None]:
    """Make an allocation past the cap fail inside, instead of the system ending the process later.

    Private memory counts; shared libraries and files mapped for reading do not.

    Args:
        cap_mib: beyond the present memory of the process; None for no cap.
    """
    if cap_mib is None:
        yield
        return
    # Imported here: only Unix has it.
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((_entry_mib(PROCESS / "status", "VmData") + cap_mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def available_mib() -> float | None:
    """Return the MiB that the system can still give without swapping; None where it does not say."""
    path = Path("/proc/meminfo")
    return _entry_mib(path, "MemAvailable") if path.exists() else None


def check_free(num_bytes: int, what: str) -> None:
    """Raise UserError where the system cannot give so much: it would end this process, or another, without a word."""
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
    """Have glibc return every large block when it is freed, so that the resident set is the memory in use.

    With another C library nothing changes.
    """
    if _is_glibc():
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)


def trim() -> None:
    """Have glibc return the freed memory that it keeps."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
