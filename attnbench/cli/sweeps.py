"""Outcomes of a sweep's jobs, on disk for the process that started it."""

import fcntl
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from attnbench.machine.ranks import ALONE, ranks_here
from attnbench.results.files import replace_file
from attnbench.settings.check import setting_of

log = logging.getLogger(__name__)

SUBMITIT = ("submitit_local", "submitit_slurm")


@dataclass(slots=True, kw_only=True, frozen=True)
class JobOutcome:
    words: list[str]
    """Overrides of the job."""
    folder: str | None
    error: str = ""

    @property
    def job(self) -> str:
        return " ".join(self.words) or "the run"


def readable(words: Sequence[str]) -> list[str]:
    r"""Return a job's overrides without the escapes of Hydra's sweeper: attn.path=my_layer\:MyLayer."""
    return [re.sub(r"\\(.)", r"\1", word) for word in words]


class SweepOutcomes(Callback):
    """Hydra callback, named in the yamls, that writes the outcomes of a sweep's jobs, which Hydra does not return. The
    jobs may run in other processes and on other machines."""

    VARIABLE = "ATTNBENCH_SWEEP"
    """Environment variable of this process with the sweep's folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.launcher: str | None = None
        self.swept: dict[str, int] = {}
        """Number of values by setting; empty where the sweep's number of jobs is not known."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the folder among the outputs; refuse a launcher without a chosen device."""
        words, launcher = config.hydra.overrides.task, config.hydra.runtime.choices["hydra/launcher"]
        self.launcher = launcher
        swept = [it for it in OverridesParser.create().parse_overrides(list(words)) if it.is_sweep_override()]
        is_counted = all(it.value_type in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP) for it in swept)
        if is_counted and not OmegaConf.select(config, "hydra.sweeper.params"):
            self.swept = {setting_of(str(it.input_line)): len(list(it.sweep_iterator())) for it in swept}
        if launcher in SUBMITIT and ranks_here() != ALONE:
            print(
                f"error: hydra/launcher={launcher}: torchrun's processes run a sweep's jobs one after another; leave "
                "it out",
                file=sys.stderr,
            )
            raise SystemExit(1)
        is_chosen = config.device != "auto" or any(word.startswith("device=") for word in words)
        if launcher in SUBMITIT and (not is_chosen or "device=auto" in words):
            # Not an exception: Hydra turns a callback's into warnings.
            print(
                f"error: device=auto: with hydra/launcher={launcher} name it, device=cpu or device=cuda: jobs see only "
                "the GPUs that hydra.launcher.gpus_per_node asks for, and none without it",
                file=sys.stderr,
            )
            raise SystemExit(1)
        folder = Path(config.hydra.sweep.dir).resolve()
        with suppress(OSError):
            # If nothing can be written, the sweep says so.
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(".sweep-????????"):
                # Another sweep may remove it too.
                with suppress(FileNotFoundError):
                    descriptor = os.open(path, os.O_RDONLY)
                    if _try_to_hold(descriptor):
                        # Left by a sweep that was killed.
                        shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)
            made = Path(mkdtemp(prefix=".new-sweep-", dir=folder))
            # While this process lives: other sweeps then leave the folder.
            _try_to_hold(os.open(made, os.O_RDONLY))
            self.folder = os.environ[self.VARIABLE] = str(made.rename(folder / made.name.replace(".new-", ".")))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse another launcher in a job's yaml."""
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        if self.launcher not in (None, launcher):
            print(
                f"error: hydra/launcher={launcher}: named by a yaml that the sweep chooses, where Hydra ignores it; "
                "name it on the command line",
                file=sys.stderr,
            )
            raise SystemExit(1)
        if self.swept:
            words = [word for word in readable(config.hydra.overrides.task) if setting_of(word) in self.swept]
            log.info(f"[{config.hydra.job.num + 1}/{math.prod(self.swept.values())}] {' '.join(words)}")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self.folder is not None:
            path = Path(self.folder) / f"{config.hydra.job.num:06}.json"
            replace_file(path, json.dumps(asdict(job_return.return_value)))

    @classmethod
    def read(cls) -> list[JobOutcome]:
        """Return the outcomes of this process's sweep by job, and remove the folder."""
        folder = os.environ.pop(cls.VARIABLE, None)
        if folder is None:
            return []
        paths = sorted(Path(folder).glob("*.json"))
        outcomes = [JobOutcome(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        shutil.rmtree(folder)
        return outcomes


def _try_to_hold(descriptor: int) -> bool:
    """Lock the file until this process closes it or ends; return False if another one has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
