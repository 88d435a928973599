"""Locks: timed work has a GPU alone, other work shares it; one process writes into a folder."""

import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.settings.errors import UserError

if TYPE_CHECKING:
    # Loading torch takes longer than asking who holds a folder.
    import torch

log = logging.getLogger(__name__)


@contextmanager
def device_lock(device: "torch.device", *, shared: bool) -> Iterator[None]:
    """Wait until the GPU is free, and hold it inside, until the process ends at the latest. A CPU has no lock.

    Args:
        shared: together with others that share; otherwise alone, as for every reported speed.
    """
    if device.type == "cpu":
        yield
        return
    path = lock_path(device)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        # Another user's file; reading is enough for a lock.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning(f"waiting for {device}, which another process of attnbench uses ({path})")
            fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def lock_path(device: "torch.device") -> Path:
    """Return the lock file of a physical device, whatever index a process knows it by."""
    import torch

    return Path(tempfile.gettempdir()) / f"attnbench-{torch.cuda.get_device_properties(device).uuid}.lock"


@contextmanager
def folder_lock(folder: Path, *, waits: bool) -> Iterator[None]:
    """Hold a folder that exists, so that no other process writes into it. Not reentrant.

    The operating system frees the lock when the process ends; the text of a dead owner in the file does not block. With
    `waits` it waits for another process that holds the folder; otherwise that is an error.

    Raises:
        OSError: the file system cannot be written, or has no locks.
    """
    path = folder / ".lock"
    descriptor = _locked(path, waits)
    try:
        os.ftruncate(descriptor, 0)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()} since {started}\n".encode())
        yield
    finally:
        # While it is held: a waiting process then sees that the path is another file, or none.
        if _is_at(descriptor, path):
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _locked(path: Path, waits: bool) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "a process that just began"
                if not waits:
                    raise UserError(
                        f"{path.parent}: in use by {owner}; wait for it or stop it, then the same command resumes"
                    ) from None
                log.warning(f"waiting for {path.parent}, in use by {owner}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def folder_holder(folder: Path) -> str:
    """Describe the process that holds a folder; empty if there is none. Writes nothing.

    The lock of another host counts as held: whether its process still runs is unknown.
    """
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner or "a process that just began"
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    host = owner.partition(" on ")[2].partition(" since ")[0]
    return f"{owner}, if that still runs" if host and host != socket.gethostname() else ""
