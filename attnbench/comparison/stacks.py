"""Sizes of stacks: as the plan says, or as measured for the device.

`plan.stack=auto` depends on the shape of a training and the name of the device, not on free memory. The sizes of the
first run are kept in the plan's folder and stay when the plan is continued elsewhere.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attnbench.comparison.workers import Stack
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.environment import device_name
from attnbench.results.files import replace_file
from attnbench.results.job import Job
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import read_object

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""GPUs measured by bench=stacks for the numbers below."""

ACTIVATIONS = 10**7
"""Elements of an activation (R, batch, length, width) that fill the device: beyond, the share of a training in the step
falls by less than a tenth."""

LEAST, MOST = 4, 40
"""Trainings in a stack: fewer are no faster than one after the other, more do not gain."""

COMPILE_SECONDS, SECONDS_SAVED = 20.0, 0.2e-9
"""Seconds of torch.compile for a shape with empty caches, and seconds saved per step and element of an activation: on
an H100, recall at (256,16), 0.21e-9 for softmax, 0.25e-9 for kda, 0.06e-9 for gated_deltanet."""

Size = Callable[[ProbeJob], int]


def sizes(stack: int | None, device: torch.device, folder: Path) -> Size:
    """Return the function from a training to the size of its stack: `stack`, or None as measured for this device.
    `folder` has the plan's stacks.json."""
    if stack is not None:
        return lambda job: stack
    if device.type == "cpu":
        # On two cores a stack took 0.6 to 1.7 times the time of single trainings.
        return lambda job: 1
    path, name = folder / "stacks.json", device_name(device)
    kept = read_object(path) if path.exists() else {}

    def size(job: ProbeJob) -> int:
        if job.shape_hash not in kept:
            if name not in GPUS:
                raise UserError(
                    f"plan.stack=auto: knows {', '.join(GPUS)}, not {name}; name a size, "
                    "plan.stack=10 say, by what attnbench bench bench=stacks shows here"
                )
            kept[job.shape_hash] = measured_size(activations(job))
            replace_file(path, json.dumps(kept, indent=1) + "\n")
        return kept[job.shape_hash]

    return size


def activations(job: ProbeJob) -> int:
    """Count the elements of one activation: batch × length × width."""
    return job.task.batch_size * job.seq_len * job.task.model.dim


def measured_size(elements: int) -> int:
    """Return the size of a stack by the elements of one training's activation."""
    size = min(MOST, ACTIVATIONS // elements)
    return size if size >= LEAST else 1


def is_worth_compiling(job: ProbeJob, number: int, num_devices: int) -> bool:
    """Tell if torch.compile saves more time than it takes, for a device's share of `number` trainings.

    The time saved is that of the device, however many workers share it. A training that ends early makes about half of
    its steps.
    """
    num_steps = job.task.num_steps if job.task.fixed_steps else job.task.num_steps / 2
    saved = SECONDS_SAVED * activations(job) * num_steps * number / num_devices
    return job.device.type == "cuda" and saved > COMPILE_SECONDS


def in_stacks(jobs: Sequence[Job], size_of: Size) -> list[Stack]:
    """Group trainings of one shape into stacks of about equal size, none larger than `size_of` says."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shape_hash if isinstance(job, ProbeJob) else job.config_hash, []).append(job)
    stacks: list[Stack] = []
    for group in groups.values():
        size = size_of(group[0]) if isinstance(group[0], ProbeJob) else 1
        for job in group:
            if isinstance(job, ProbeJob):
                job.in_stack = size > 1
        number = -(-len(group) // size)
        stacks += [
            tuple(group[index * len(group) // number : (index + 1) * len(group) // number]) for index in range(number)
        ]
    return stacks


def compiled(jobs: Sequence[Job], num_devices: int) -> None:
    """Mark the trainings outside stacks, and compile them if it is worth it."""
    probes = [job for job in jobs if isinstance(job, ProbeJob)]
    number = Counter(job.shape_hash for job in probes)
    for job in probes:
        if not job.in_stack:
            job.stack = 1
            job.compiled = is_worth_compiling(job, number[job.shape_hash], num_devices)
