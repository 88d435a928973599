"""Cells of a plan on a Slurm cluster: an array job whose tasks each run a fixed part of them, submitted by submitit.

Submissions stand in the plan's folder, so that a later command collects them:

.slurm/<key>.json, a submission; <key>-<task>.*.jsonl, its outcomes; jobs/, submitit's pickles, scripts and output;
timed_host, the node of the timed runs.
"""

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.comparison.slurm.queue import array_job, end_of, tasks_in_queue
from attnbench.comparison.slurm.task import TIMED_HOST, Part, different_host, machine_of, name_of, outcomes_of
from attnbench.comparison.workers import Stack
from attnbench.machine.processes import Outcome
from attnbench.results.files import replace_file
from attnbench.results.job import Job
from attnbench.settings.errors import Interrupted
from attnbench.settings.registry import TRUSTED
from attnbench.settings.schema import ComparisonSettings
from attnbench.settings.untrusted import MAX_JSON_BYTES, read_bounded, read_object

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Between two requests to the controller."""

GONE_TWICE = 2
"""Requests without a task in the queue before it counts as ended: its files may arrive later."""


class StillRunning(Exception):  # noqa: N818
    """Cells are under way on the cluster, and the command was not to wait."""


@dataclass(slots=True, kw_only=True)
class Submission:
    """Array job that was submitted, and the runs of its tasks."""

    path: Path
    job: str
    tasks: list[list[str]]
    rerun: bool

    @classmethod
    def read(cls, path: Path) -> "Submission":
        return cls(path=path, **read_object(path))

    def write(self) -> None:
        """Keep it for a later command."""
        replace_file(self.path, json.dumps({"job": self.job, "tasks": self.tasks, "rerun": self.rerun}) + "\n")

    def id_of(self, task: int) -> str:
        """The task's name in Slurm."""
        return f"{self.job}_{task}" if len(self.tasks) > 1 else self.job

    def cells(self) -> list[str]:
        return [name for names in self.tasks for name in names]

    def outcomes(self, task: int) -> Path:
        """Return the prefix of the files with the outcomes of a task."""
        return self.path.with_name(f"{self.path.stem}-{task}")

    def records(self) -> list[dict[str, Any]]:
        return [record for task in range(len(self.tasks)) for record in outcomes_of(self.outcomes(task))]


def run_on_slurm(
    settings: ComparisonSettings, stacks: Sequence[Stack], folder: Path, *, is_timed: bool
) -> Generator[Outcome[Stack], None, None]:
    """Submit the runs that no job has yet, and yield an outcome for each run. Raises StillRunning with wait=false."""
    cells = {name_of(cell): cell for stack in stacks for cell in stack}
    if not cells:
        return
    home = folder / ".slurm"
    home.mkdir(parents=True, exist_ok=True)
    known = [Submission.read(path) for path in sorted(home.glob("*.json"))]
    known = [one for one in known if one.rerun == settings.rerun and not cells.keys().isdisjoint(one.cells())]
    active = _active(known)
    there = set()
    for one in known:
        recorded = {record["cell"] for record in one.records()}
        for task, names in enumerate(one.tasks):
            # A task that ended without an outcome of a run has lost it.
            there |= {name for name in names if one.id_of(task) in active or name in recorded}
    missing = [left for stack in stacks if (left := tuple(cell for cell in stack if name_of(cell) not in there))]
    if missing:
        known.append(_submit(settings, missing, home, is_timed=is_timed))
    try:
        yield from _collect(known, cells, home, waits=settings.wait)
    except Interrupted:
        jobs = " ".join(one.job for one in known)
        log.warning(f"Slurm keeps running job {jobs}: the same command collects it, scancel {jobs} ends it")
        raise
    for one in known:
        one.path.unlink(missing_ok=True)


def _collect(
    known: Sequence[Submission], cells: dict[str, Job], home: Path, *, waits: bool
) -> Iterator[Outcome[Stack]]:
    """Yield the outcome of each run once its task has written it, or has ended."""
    left, gone, said = dict(cells), Counter(), ""
    jobs = " ".join(one.job for one in known)
    while True:
        # Before the files are read: those of an ended task are complete.
        active = _active(known)
        for record in [record for one in known for record in one.records()]:
            cell = left.pop(record["cell"], None)
            if cell is not None:
                yield Outcome(item=(cell,), seconds=record["seconds"], error=record["error"])
        tasks = {one.id_of(task): names for one in known for task, names in enumerate(one.tasks)}
        for name, names in tasks.items():
            lost = [cell for cell in names if cell in left]
            gone[name] += bool(lost) and name not in active
            if gone[name] >= GONE_TWICE:
                output = f"output: {home}/jobs/{name}_0_log.err"
                error = f"Slurm's task {name} {end_of(name)} before this run was done; {output}"
                for cell in [left.pop(cell) for cell in lost]:
                    yield Outcome(item=(cell,), seconds=0.0, error=None if cell.is_done() else error)
        if not left:
            return
        status = ", ".join(f"{number} {state}" for state, number in Counter(active.values()).items())
        if status and status != said:
            log.info(f"Slurm job {jobs}: {status}; {len(left)} runs to go")
            said = status
        if not waits and active and not any(1 <= times < GONE_TWICE for times in gone.values()):
            raise StillRunning(
                f"{len(left)} runs are with Slurm, job {jobs} ({status}); the same command collects them and resumes"
            )
        time.sleep(POLL_SECONDS)


def _active(known: Sequence[Submission]) -> dict[str, str]:
    tasks: dict[str, str] = {}
    for one in known:
        while (queue := tasks_in_queue(one.job)) is None:
            time.sleep(POLL_SECONDS)
        tasks |= queue
    return tasks


def _submit(settings: ComparisonSettings, stacks: Sequence[Stack], home: Path, *, is_timed: bool) -> Submission:
    """Submit stacks as an array job; timed runs are one task, on the host of the earlier ones."""
    number = 1 if is_timed else min(settings.slurm.tasks, len(stacks))
    host = home / TIMED_HOST
    if is_timed:
        different_host(home, anew=settings.rerun)
    dealt = [stacks[task::number] for task in range(number)]
    tasks = [[name_of(cell) for stack in part for cell in stack] for part in dealt]
    submission = Submission(path=home / f"{uuid.uuid4().hex}.json", job="", tasks=tasks, rerun=settings.rerun)
    machine = machine_of(stacks[0][0]) if is_timed else {}
    parts = [
        Part(
            settings=settings,
            stacks=part,
            is_timed=is_timed,
            outcomes=submission.outcomes(task),
            machine=machine,
            trusted=frozenset(TRUSTED),
        )
        for task, part in enumerate(dealt)
    ]
    node = read_bounded(host, MAX_JSON_BYTES).strip() if is_timed and host.exists() else None
    submission.job = array_job(parts, settings, home / "jobs", node=node)
    submission.write()
    log.info(f"Slurm job {submission.job}: {sum(map(len, tasks))} runs in {number} tasks; their output: {home}/jobs/")
    return submission
