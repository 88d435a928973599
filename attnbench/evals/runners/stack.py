"""Trainings of a probe's task that differ in seed and learning rate, as one stack."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from attnbench.evals.lib.scoring import mean_accuracies
from attnbench.evals.lib.sequences import training_sequences
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import computing
from attnbench.machine.signals import StopRequest
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.results.folder import recording_each
from attnbench.results.job import results_of, run_jobs
from attnbench.training.checkpoint import TrainState
from attnbench.training.run import make_ready
from attnbench.training.stack import Member, train_stack

log = logging.getLogger(__name__)


def run_stack(jobs: Sequence[ProbeJob], *, shares_device: bool, too_large: Sequence[int] = ()) -> None:
    """Train jobs of one shape together, and record each as soon as it is over; finished ones stay as they are. Raises
    as `results.job.run_jobs`.

    A stack that does not fit into memory is run as two halves. Jobs whose kernel has no batching rule train one by one.
    The rows say which. `too_large` are sizes that did not fit before.
    """
    if not jobs[0].can_stack():
        _run_one_by_one(jobs, shares_device, too_large)
        return
    folders = {job.folder: job for job in jobs}
    with (
        recording_each(list(folders), waits=True, is_done=lambda folder: folders[folder].is_done()),
        device_lock(jobs[0].device, shared=shares_device),
    ):
        # Inside the lock: another process may have finished some meanwhile.
        todo = [job for job in jobs if job.rerun or not job.is_done()]
        for job in todo:
            job.stack, job.too_large, job.shares_device = len(todo), list(too_large), True
        recorded: set[ProbeJob] = set()
        trained = attempt(lambda: _train(todo, recorded)) if todo else None
    if not isinstance(trained, OutOfMemory):
        return
    # Not by their files: with rerun=true the former ones are there.
    left, sizes = [job for job in todo if job not in recorded], [*too_large, len(todo)]
    if len(todo) == 1:
        _run_one_by_one(left, shares_device, too_large)
        return
    log.warning(f"a stack of {len(todo)} ran out of memory, so two halves follow ({trained.reason})")
    half = -(-len(todo) // 2)
    for start in range(0, len(left), half):
        run_stack(left[start : start + half], shares_device=shares_device, too_large=sizes)


def _run_one_by_one(jobs: Sequence[ProbeJob], shares_device: bool, too_large: Sequence[int]) -> None:
    for job in jobs:
        job.stack, job.too_large = 1, list(too_large)
        run_jobs([job], shares_device=shares_device)


def _train(jobs: Sequence[ProbeJob], recorded: set[ProbeJob]) -> None:
    """Train jobs as one, record each when it is over, and add it to `recorded`. Raises Interrupted if a signal asked to
    stop; checkpoints of unfinished trainings are kept."""
    stop, device, precision = StopRequest(), jobs[0].device, jobs[0].precision
    make_ready(device)
    # Trainings of one seed share their data.
    sequences = {job.settings.seed: training_sequences(job.task, job.settings.seed, device) for job in jobs}
    with ExitStack() as stack:
        stack.enter_context(stop.listening())
        checks, by_member = Checks(), {}
        for job in jobs:
            job.sequences, job.look = sequences[job.settings.seed], partial(checks.selection, job)
            state, sitting = job.begin_training(stop, stack)
            given = {"batches": job.batches, "settings": job.train, "num_steps": job.num_steps}
            by_member[Member(state=state, hooks=sitting.hooks(state.step), **given)], checks.states[job] = job, state
        for member in train_stack([*by_member], precision=precision, captured=device.type == "cuda"):
            job = by_member.pop(member)
            del checks.states[job]
            job.announce(done=False)
            if member.error is not None:
                job.outcome = job.located(member.error, member.state)
            else:
                job.outcome = job.trained(member.state)
            with results_of(job) as writer:
                for measurement in job.rows():
                    job.write(writer, measurement)
            # Its views would keep the memory of the stack that goes on without it.
            job.outcome = job.sequences = job.look = None
            recorded.add(job)
    if stop.signal is not None:
        raise stop.interruption("trained and scored to the end; the same command resumes from there")


class Checks:
    """Validation of a stack: one pass for all trainings at the same step."""

    def __init__(self) -> None:
        self.states: dict[ProbeJob, TrainState] = {}
        self._seen: dict[ProbeJob, tuple[int, float]] = {}

    def selection(self, job: ProbeJob, state: TrainState) -> float:
        """Return the accuracy of a training at its step, and keep those of the others."""
        step, value = self._seen.pop(job, (None, 0.0))
        if step == state.step:
            return value
        # After a resumption, trainings may validate before all of them are known.
        states = {job: state} | {other: peer for other, peer in self.states.items() if peer.step == state.step}
        with computing(job.precision, job.device):
            values = mean_accuracies([peer.model for peer in states.values()], [other.validation() for other in states])
        self._seen |= {other: (state.step, value) for other, value in zip(states, values, strict=True)}
        return self._seen.pop(job)[1]
