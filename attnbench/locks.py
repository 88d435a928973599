"""Who may use a GPU now: what is timed alone, other work side by side."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@contextmanager
def device_lock(device: torch.device, *, shared: bool) -> Iterator[None]:
    """Waits until the GPU is free, and holds it inside; the lock goes with the process, however that ends.

    A CPU has no lock: other programs use it anyway.

    Args:
        shared: side by side with others that share; otherwise alone, as everything is that reports a speed.
    """
    if device.type == "cpu":
        yield
        return
    path = lock_path(device)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        # Another user's file: a lock needs no more than reading.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"waiting for {device}, which another process of attnbench uses ({path})")
            fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def lock_path(device: torch.device) -> Path:
    """One file a physical device of this machine, whatever index a process sees it under."""
    return Path(tempfile.gettempdir()) / f"attnbench-{torch.cuda.get_device_properties(device).uuid}.lock"
