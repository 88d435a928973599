"""Slurm as its commands and submitit show it: an array job submitted, its tasks in the queue, how a task ended."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from attnbench.settings.errors import UserError
from attnbench.settings.schema import ComparisonSettings

log = logging.getLogger(__name__)

MANY_TIMES = 100
"""Times that a task may reach its time limit and start again."""

UNKNOWN_JOB = "Invalid job id"
"""Message of squeue for a job that ended a while ago."""


def array_job(parts: Sequence[Any], settings: ComparisonSettings, folder: Path, *, node: str | None) -> str:
    """Submit calls without arguments, each a task; return the job's number.

    Args:
        folder: for submitit's pickles, scripts and output.
        node: the one to run on; None: any.
    """
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: there is no sbatch here; start the command on a host of the cluster")
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError:
        raise UserError("launcher=slurm: submitit is not installed; pip install 'submitit==1.5.4'") from None
    given = settings.slurm
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=MANY_TIMES if given.requeue else 0)
    executor.update_parameters(
        job_name=f"attnbench-{settings.plan.name}",
        partition=given.partition,
        time=given.minutes,
        cpus_per_task=given.cpus,
        gpus_per_node=given.gpus or None,
        array_parallelism=len(parts),
        nodelist=node,
        wckey=None,
        additional_parameters={"requeue" if given.requeue else "no-requeue": True, **given.options},
    )
    try:
        # submitit prints the words of sbatch too, which the error below has in one line.
        with _outside_of_any_job(), redirect_stderr(StringIO()), executor.batch():
            jobs = [executor.submit(part) for part in parts]
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [line.partition("error: ")[2] for line in str(error).splitlines() if "error: " in line]
        raise UserError(f"slurm.partition={given.partition}: {'; '.join(lines) or error}") from None
    return jobs[0].job_id.partition("_")[0]


@contextmanager
def _outside_of_any_job() -> Iterator[None]:
    """Remove the variables of the job that this process is in, which would change the size of a new one."""
    before = {name: value for name, value in os.environ.items() if name.startswith("SLURM") and name != "SLURM_CONF"}
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def tasks_in_queue(job: str) -> dict[str, str] | None:
    """Return the states of a job's tasks that wait or run; None if the controller does not answer."""
    answer = _ask("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%i|%T|%r")
    if answer.returncode == 0:
        rows = [line.split("|", 2) for line in answer.stdout.splitlines()]
        return {
            task: f"{state.lower()} ({reason})" if state == "PENDING" else state.lower() for task, state, reason in rows
        }
    if UNKNOWN_JOB in answer.stderr:
        return {}
    reason = answer.stderr.strip().splitlines()
    log.warning(f"squeue: {reason[-1] if reason else 'no answer'}; asked again")
    return None


def end_of(task: str) -> str:
    """Return how a task ended, in words, as Slurm's accounting has it."""
    answer = _ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={task}", "--format=State")
    state = answer.stdout.strip().partition("\n")[0]
    return (
        f"ended ({state})" if answer.returncode == 0 and state else "ended (without accounting Slurm does not say how)"
    )


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
