"""Jobs of a plan, run by processes of this host."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import torch

from attnbench.evals.runners.probe import ProbeJob
from attnbench.evals.runners.stack import run_stack
from attnbench.machine.device import all_gpus, resolve_device
from attnbench.machine.processes import IdleWorkers, Outcome, run_in_processes
from attnbench.results.job import Job, run_jobs
from attnbench.settings.schema import ComparisonSettings

Stack = tuple[Job, ...]
"""Jobs that one process runs, several as one training."""


def execute(job: Job) -> None:
    run_jobs(job.parts, shares_device=job.shares_device)


def execute_stack(stack: Stack) -> None:
    """Several jobs run as one training, see `in_stacks`."""
    probes = [job for job in stack if isinstance(job, ProbeJob)]
    if probes and probes[0].in_stack:
        run_stack(probes, shares_device=probes[0].shares_device)
        return
    for job in stack:
        execute(job)


def gpus_and_workers(settings: ComparisonSettings) -> tuple[list[str], int]:
    """Name the GPUs that workers are spread over, none for a single device, and count the runs at a time."""
    gpus = all_gpus(resolve_device(settings.device)) if settings.plan.devices == "all" else []
    return gpus, settings.plan.num_workers * max(1, len(gpus))


def run_here(
    settings: ComparisonSettings,
    stacks: Sequence[Stack],
    *,
    is_timed: bool,
    log: Path,
    number: int,
    idle: IdleWorkers | None = None,
    more: Callable[[], Sequence[Stack]] = list,
) -> Generator[Outcome[Stack], None, None]:
    """Run stacks in processes of this host: timed ones alone on their device, others `num_workers` at a time on
    each.

    Args:
        log: file of their output.
        number: runs of `stacks` and of those that `more` will return.
        idle: workers kept between calls.
        more: called after each outcome; its stacks run before the waiting ones.
    """
    gpus, at_a_time = gpus_and_workers(settings)
    num_workers = max(1, min(max(1, len(gpus)) if is_timed else at_a_time, number))
    shares = num_workers > max(1, len(gpus))
    # Workers share the cores. On a GPU the share does not depend on the number of runs, so that workers are reused.
    sharing = num_workers if is_timed or resolve_device(settings.device).type == "cpu" else at_a_time

    def shared(stacks: Sequence[Stack]) -> Sequence[Stack]:
        for job in chain(*stacks):
            job.shares_device = shares
        return stacks

    waiting = deque(shared(stacks))
    with closing(
        run_in_processes(
            execute_stack,
            waiting,
            num_workers=num_workers,
            log=log,
            num_threads=max(1, torch.get_num_threads() // sharing),
            fresh=is_timed,
            gpus=gpus,
            idle=idle,
        )
    ) as outcomes:
        for outcome in outcomes:
            yield outcome
            waiting.extendleft(reversed(shared(more())))
