"""One job: an identity, a folder and rows, as a training, a measurement and a cell of an operator table have them.

outputs/<experiment>/.../  config.yaml environment.json train.log failed.txt results/<evaluation>-<hash>.jsonl
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attnbench.machine.environment import environment_id
from attnbench.machine.locks import device_lock
from attnbench.results.folder import recording, stamp_environment, write_config
from attnbench.results.protocol import PROTOCOL, protocol_id
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.rows import Identity, Measurement, ResultRow
from attnbench.settings.errors import Interrupted, UserError

log = logging.getLogger(__name__)


class Job(ABC):
    """Work that leaves one results file in its folder.

    Attributes:
        label: for people: recall linear, num_pairs 16, lr 0.03, seed 0.
        experiment: the folder under outputs/ that it belongs to.
        evaluation: what its rows are of: an evaluation, a bench, or TRAINING.
        config_hash: its identity, eight hex digits of all that can change its numbers.
        folder: shared with others where they are of one model.
        device: locked while it runs.
        rerun: run although its results are complete.
        shares_device: others run on the device at the same time.
        plots: (metric, axis) pairs of its evaluation, the headline first.
        failure: set by `rows` where the rows say why there are no numbers and the command ends with an error anyway.
    """

    label: str
    experiment: str
    evaluation: str
    config_hash: str
    folder: Path
    device: torch.device
    rerun: bool = False
    failure: UserError | Interrupted | None = None
    shares_device: bool = False
    plots: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> Path:
        """The results file."""
        return self.folder / "results" / f"{self.evaluation}-{self.config_hash}.jsonl"

    @abstractmethod
    def rows(self) -> Iterator[Measurement]:
        """Measure; each number as soon as it is known."""

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Columns of `Identity` that only the job knows: mixer, variant, backend, model, parameters, seq_len, seed,
        precision and corpus; `run` where that is not the name of the folder, and `num_devices` where a model may have
        been trained on several."""

    def devices(self) -> list[torch.device]:
        """All that it computes on, in an order that is the same for every job."""
        return [self.device]

    def row_settings(self) -> dict[str, Any]:
        """Settings of all its rows, beside those of each measurement."""
        return {}

    def protocol(self) -> dict[str, Any] | None:
        """Rules that its scores are judged by, see `results.protocol`; None for what no verdict is about."""
        return None

    def config(self) -> dict[str, Any] | None:
        """Content of config.yaml; None leaves the file as it is."""
        return None

    def begin(self) -> dict[str, Any]:
        """Make the folder ready; return the environment of the rows, see `machine.environment.environment`."""
        config = self.config()
        if config is not None:
            write_config(self.folder, config)
        return stamp_environment(self.folder, self.device)

    def announce(self, *, done: bool) -> None:
        """Say what is about to run, or that it was done before."""
        if not done:
            log.info(self.label)

    def write(self, writer: ResultsWriter, measurement: Measurement) -> ResultRow:
        """Write one measurement as a row."""
        return writer.write(measurement)


def run_jobs(jobs: Sequence[Job], *, shares_device: bool = False, waits: bool = True) -> None:
    """Run jobs of one folder on one device, in order, each unless its results are there.

    Args:
        shares_device: others run on the device at the same time; nothing is timed then.
        waits: for another process that holds the folder; otherwise that is an error.

    Raises:
        UserError: what a job raised, or its failure once all have their rows.
        Interrupted: a signal asked to stop, and what is worth it is kept.
    """
    with ExitStack() as held:
        held.enter_context(recording(jobs[0].folder, waits=waits))
        for device in jobs[0].devices():
            held.enter_context(device_lock(device, shared=shares_device))
        for job in jobs:
            job.shares_device = shares_device
            # Asked inside: another process may have finished it while this one waited.
            done = not job.rerun and is_done(job)
            job.announce(done=done)
            # Read where it is done: an altered file is refused by its name.
            for _ in read_results(job.results) if done else record(job):
                pass
            if isinstance(job.failure, Interrupted):
                raise job.failure
        for job in jobs:
            if job.failure is not None:
                raise job.failure


def record(job: Job) -> Iterator[ResultRow]:
    """Run one job in a folder and on a device that are held, and yield its rows."""
    protocol = job.protocol()
    named = {PROTOCOL: protocol_id(protocol)} if protocol is not None else {}
    with ResultsWriter(job.results, identity(job, job.begin()), {**job.row_settings(), **named}) as writer:
        for measurement in job.rows():
            yield job.write(writer, measurement)


def is_done(job: Job) -> bool:
    """True where its results file is there: it gets its name once it is complete."""
    return job.results.exists()


def identity(job: Job, stamp: dict[str, Any]) -> Identity:
    """The columns that all rows of a job share.

    Args:
        stamp: the environment that measures them, see `machine.environment.environment`.
    """
    shared: dict[str, Any] = {
        "experiment": job.experiment,
        "run": job.folder.name,
        "evaluation": job.evaluation,
        "config_hash": job.config_hash,
    }
    return Identity(**shared | measured_by(stamp) | job.columns())


def measured_by(stamp: dict[str, Any]) -> dict[str, Any]:
    """Columns that say where and by which source a row was measured."""
    return {
        "device": stamp["device"],
        "num_devices": 1,
        "environment": environment_id(stamp),
        "commit": f"{stamp['commit'] or 'unknown'}{'-dirty' if stamp['dirty'] else ''}",
    }
