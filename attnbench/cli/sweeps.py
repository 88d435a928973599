"""Outcomes of a sweep's jobs, kept on disk for the process that began it."""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from attnbench.machine.ranks import ALONE, ranks_here
from attnbench.results.files import replace_file

SUBMITIT = ("submitit_local", "submitit_slurm")


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """Result of one job of a sweep."""

    words: list[str]
    """Its overrides, each a word of a command line."""
    folder: str | None
    error: str = ""
    """One line on why there is no folder."""

    @property
    def job(self) -> str:
        """Its overrides on one line."""
        return " ".join(self.words) or "the run"


class SweepOutcomes(Callback):
    """Hydra callback that keeps on disk the outcomes of a sweep's jobs, in whatever process or machine they run.

    Hydra returns them to nobody. Named in the configuration, as Hydra asks of its callbacks.
    """

    VARIABLE = "ATTNBENCH_SWEEP"
    """Environment variable of this process with the sweep's folder, which Hydra composes and keeps to itself."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.launcher: str | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the folder, on the disk of the outputs; refuse a device that nobody chose."""
        words, launcher = config.hydra.overrides.task, config.hydra.runtime.choices["hydra/launcher"]
        self.launcher = launcher
        if launcher in SUBMITIT and ranks_here() != ALONE:
            print(
                f"error: hydra/launcher={launcher}: torchrun's processes run a sweep's jobs one after another; leave "
                "it out",
                file=sys.stderr,
            )
            raise SystemExit(1)
        is_chosen = config.device != "auto" or any(word.startswith("device=") for word in words)
        if launcher in SUBMITIT and (not is_chosen or "device=auto" in words):
            # No exception: Hydra turns those of callbacks into warnings.
            print(
                f"error: device=auto: with hydra/launcher={launcher} name it, device=cpu or device=cuda: jobs see only "
                "the GPUs that hydra.launcher.gpus_per_node asks for, and none without it",
                file=sys.stderr,
            )
            raise SystemExit(1)
        folder = Path(config.hydra.sweep.dir).resolve()
        with suppress(OSError):
            # Where nothing can be written, the sweep itself says so.
            folder.mkdir(parents=True, exist_ok=True)
            with _held(folder):
                _remove_abandoned(folder)
                self.folder = os.environ[self.VARIABLE] = mkdtemp(prefix=".sweep-", dir=folder)
                # For as long as this process lives, so that no other sweep takes the folder for one left behind.
                _try_to_hold(os.open(self.folder, os.O_RDONLY))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a launcher that one job's yaml names: the sweep has been started by another."""
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        if self.launcher not in (None, launcher):
            print(
                f"error: hydra/launcher={launcher}: named by a yaml that the sweep chooses, where Hydra ignores it; "
                "name it on the command line",
                file=sys.stderr,
            )
            raise SystemExit(1)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write a job's outcome, in the process that ran it."""
        if self.folder is not None:
            path = Path(self.folder) / f"{config.hydra.job.num:06}.json"
            replace_file(path, json.dumps(asdict(job_return.return_value)))

    @classmethod
    def read(cls) -> list[Outcome]:
        """Return the outcomes of this process's sweep in the order of its jobs; remove the folder."""
        folder = os.environ.pop(cls.VARIABLE, None)
        if folder is None:
            return []
        paths = sorted(Path(folder).glob("*.json"))
        outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        shutil.rmtree(folder)
        return outcomes


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep other sweeps from making folders or removing abandoned ones, inside; where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders of sweeps that were killed."""
    for path in folder.glob(".sweep-????????"):
        descriptor = os.open(path, os.O_RDONLY)
        if _try_to_hold(descriptor):
            shutil.rmtree(path)
        os.close(descriptor)


def _try_to_hold(descriptor: int) -> bool:
    """Hold the file, until this process closes it or ends; False where another one does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
