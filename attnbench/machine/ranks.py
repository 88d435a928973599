"""Rank of this process among those that torchrun starts, from environment variables."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attnbench.settings.errors import UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
OTHERS = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of torchrun."""
WAY_OUT = "torchrun --nproc_per_node=N sets them all; unset WORLD_SIZE for one process"


@dataclass(slots=True, frozen=True, kw_only=True)
class Ranks:
    """One process of a training; rank 0 does everything but the others' shares of a step."""

    rank: int
    size: int

    @property
    def follows(self) -> bool:
        return self.rank > 0


ALONE = Ranks(rank=0, size=1)


def ranks_here() -> Ranks:
    """Read the variables; ALONE if WORLD_SIZE is not set or 1."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    missing = [name for name in (*NUMBERS, *OTHERS) if not os.environ.get(name)]
    if missing:
        raise UserError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: set without {', '.join(missing)}; {WAY_OUT}")
    for name in NUMBERS:
        if not os.environ[name].isdecimal():
            raise UserError(f"{name}={os.environ[name]}: must be a whole number; {WAY_OUT}")
    rank, size, local_size = (int(os.environ[name]) for name in NUMBERS)
    if local_size != size:
        raise UserError(
            f"WORLD_SIZE={size}: {local_size} of its processes are on this host; one model trains on one host"
        )
    if rank >= size:
        raise UserError(f"RANK={rank}: must be below WORLD_SIZE={size}; {WAY_OUT}")
    return Ranks(rank=rank, size=size)


@contextmanager
def silent() -> Iterator[None]:
    """Only `speak` prints: the output is that of rank 0."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as null:
        sys.stdout = sys.stderr = null
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def speak(text: str) -> None:
    """Print on the standard error that the process was started with."""
    print(text, file=sys.__stderr__, flush=True)
