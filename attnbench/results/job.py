"""One job: an identity, a folder and rows, of a training, a measurement or a cell of an operator table.

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
from attnbench.results.metrics import Primary
from attnbench.results.protocol import PROTOCOL, protocol_id
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.rows import Identity, Measurement, ResultRow
from attnbench.settings.errors import Interrupted, UserError

log = logging.getLogger(__name__)


class Job(ABC):
    """Work that leaves one results file in its folder.

    Attributes:
        label: name for people: recall linear, num_pairs 16, lr 0.03, seed 0.
        task_label: the label without rate and seed.
        experiment: its folder under outputs/.
        evaluation: of its rows: an evaluation, a bench, or TRAINING.
        config_hash: eight hex digits of everything that can change its numbers.
        folder: shared by the jobs of one model.
        device: locked while it runs.
        evaluations: jobs that follow it in the same folder, of a training's checkpoints.
        is_timed: it runs alone on its device, in a process of its own.
        rerun: run although its results exist.
        shares_device: other jobs run on the device at the same time.
        plots: (metric, axis) pairs of its evaluation, the headline first.
        primary: of its evaluation; None: none of its numbers is judged.
        failure: error of the command after the rows have been written; set by `rows`.
    """

    label: str
    task_label: str
    experiment: str
    evaluation: str
    config_hash: str
    folder: Path
    device: torch.device
    evaluations: tuple["Job", ...] = ()
    is_timed: bool = False
    rerun: bool = False
    failure: UserError | Interrupted | None = None
    shares_device: bool = False
    plots: tuple[tuple[str, str], ...] = ()
    primary: Primary | None = None

    @property
    def results(self) -> Path:
        return self.folder / "results" / f"{self.evaluation}-{self.config_hash}.jsonl"

    @property
    def parts(self) -> tuple["Job", ...]:
        return self, *self.evaluations

    @property
    def all_results(self) -> list[Path]:
        return [part.results for part in self.parts]

    def is_done(self) -> bool:
        """A file gets its name once it is complete. A failed training's rows say so."""
        return all(path.exists() for path in self.all_results)

    @abstractmethod
    def rows(self) -> Iterator[Measurement]:
        """Measure, and yield each number as soon as it is known."""

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Columns of `Identity` that only the job knows: mixer, variant, backend, model, parameters, seq_len, seed,
        precision and corpus; `run` if it is not the folder's name, `num_devices` if there may be several."""

    def devices(self) -> list[torch.device]:
        """All devices it computes on, in one order for all jobs."""
        return [self.device]

    def row_settings(self) -> dict[str, Any]:
        return {}

    def protocol(self) -> dict[str, Any] | None:
        """Rules of its scores, see `results.protocol`; None if its scores are not tested."""
        return None

    def config(self) -> dict[str, Any] | None:
        """Content of config.yaml; None leaves the file."""
        return None

    def begin(self) -> dict[str, Any]:
        """Prepare the folder; return the environment of the rows."""
        config = self.config()
        if config is not None:
            write_config(self.folder, config)
        return stamp_environment(self.folder, self.device)

    def announce(self, *, done: bool) -> None:
        if not done:
            log.info(self.label)

    def write(self, writer: ResultsWriter, measurement: Measurement) -> ResultRow:
        return writer.write(measurement)


def run_jobs(jobs: Sequence[Job], *, shares_device: bool = False, waits: bool = True) -> None:
    """Run the jobs of one folder that have no results, in order. The `failure` of a job is raised after all have
    written their rows. Raises Interrupted if a signal asked to stop, and the state is kept.

    Args:
        shares_device: other jobs run on the device at the same time; nothing is timed.
        waits: for another process that holds the folder; otherwise that is an error.
    """
    with ExitStack() as held:
        held.enter_context(recording(jobs[0].folder, waits=waits))
        for device in jobs[0].devices():
            held.enter_context(device_lock(device, shared=shares_device))
        for job in jobs:
            job.shares_device = shares_device
            # Another process may have finished it while this one waited.
            done = not job.rerun and job.results.exists()
            job.announce(done=done)
            if done:
                # An altered file is refused by its name.
                for _ in read_results(job.results):
                    pass
            else:
                with results_of(job) as writer:
                    for measurement in job.rows():
                        job.write(writer, measurement)
            if isinstance(job.failure, Interrupted):
                raise job.failure
        for job in jobs:
            if job.failure is not None:
                raise job.failure


def results_of(job: Job) -> ResultsWriter:
    """Open the results file of a job whose folder and device are held."""
    protocol = job.protocol()
    named = {PROTOCOL: protocol_id(protocol)} if protocol is not None else {}
    return ResultsWriter(job.results, identity(job, job.begin()), {**job.row_settings(), **named})


def identity(job: Job, stamp: dict[str, Any]) -> Identity:
    """The columns shared by all rows of a job measured in the environment `stamp`."""
    shared: dict[str, Any] = {
        "experiment": job.experiment,
        "run": job.folder.name,
        "evaluation": job.evaluation,
        "config_hash": job.config_hash,
    }
    return Identity(**shared | measured_by(stamp) | job.columns())


def measured_by(stamp: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": stamp["device"],
        "num_devices": 1,
        "environment": environment_id(stamp),
        "commit": f"{stamp['commit'] or 'unknown'}{'-dirty' if stamp['dirty'] else ''}",
    }
