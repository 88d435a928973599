"""Which trainings of a plan are made together, and how: as the plan says, or by what was measured on such a device.

`plan.stack=auto` is a function of a training's shape and the device's name, not of what is free at the moment. What it
came to at the first run stands in the plan's folder, and holds when the plan goes on elsewhere.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attnbench.comparison.cells import Cell
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.environment import device_name
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.text import read_object

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""Those that the numbers below are taken for, by bench=stacks."""

ACTIVATIONS = 10**7
"""Elements of one activation of a stack's step, (R, batch, length, width), with which it fills the device: a training's
share of the step falls by less than a tenth beyond."""

LEAST, MOST = 4, 40
"""Trainings in a stack. Fewer gain nothing over one after the other; at more the share of a step falls no more."""

COMPILE_SECONDS, SECONDS_SAVED = 20.0, 0.2e-9
"""Seconds of torch.compile for one shape with empty caches; and those it saves of a step alone, by element of an
activation: of recall at (256,16) on an H100 0.21e-9 for softmax, 0.25e-9 for kda, 0.06e-9 for gated_deltanet."""

Size = Callable[[ProbeJob], int]


def sizes(stack: int | None, device: torch.device, folder: Path) -> Size:
    """Return the function that names the size of a training's stack.

    Args:
        stack: the plan's; None: by measurement.
        folder: the plan's; stacks.json in it keeps what was measured for.

    Raises:
        UserError: nothing was measured on this GPU, or stacks.json was altered.
    """
    if stack is not None:
        return lambda job: stack
    if device.type == "cpu":
        # Stacks took 0.6 to 1.7 times the time of their trainings one by one on two cores.
        return lambda job: 1
    path, name = folder / "stacks.json", device_name(device)
    kept = _read_sizes(path) if path.exists() else {}

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


def _read_sizes(path: Path) -> dict[str, int]:
    """Read the sizes of stacks by their trainings' shapes."""
    kept = read_object(path)
    for shape, size in kept.items():
        if type(size) is not int or size < 1:
            raise UserError(f"{path}: {shape}={size}: must be an integer of at least 1")
    return kept


def activations(job: ProbeJob) -> int:
    """Count the elements of one activation of a training: batch × length × width."""
    return job.task.batch_size * job.seq_len * job.task.model.dim


def measured_size(elements: int) -> int:
    """Return the size of a stack of trainings with so many elements in an activation."""
    size = min(MOST, ACTIVATIONS // elements)
    return size if size >= LEAST else 1


def is_worth_compiling(job: ProbeJob, number: int, num_devices: int) -> bool:
    """Tell if torch.compile saves more than it takes, in a device's share of `number` trainings.

    Workers that share a device wait for it most of their time, so that what is saved is the device's, however many they
    are; and they compile beside one another. A training that ends once it has solved its task makes some half of its
    steps.
    """
    num_steps = job.task.num_steps if job.task.fixed_steps else job.task.num_steps / 2
    saved = SECONDS_SAVED * activations(job) * num_steps * number / num_devices
    return job.device.type == "cuda" and saved > COMPILE_SECONDS


def in_stacks(cells: Sequence[Cell], size_of: Size) -> list[tuple[Cell, ...]]:
    """Group trainings that differ in numbers alone, in the order of their first: stacks of about one size, none larger
    than `size_of` says."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        job = cell.jobs[0]
        groups.setdefault(job.shape_hash if isinstance(job, ProbeJob) else job.config_hash, []).append(cell)
    stacks: list[tuple[Cell, ...]] = []
    for group in groups.values():
        job = group[0].jobs[0]
        size = size_of(job) if isinstance(job, ProbeJob) else 1
        if size > 1:
            group = [replace(cell, in_stack=True) for cell in group]
        number = -(-len(group) // size)
        stacks += [
            tuple(group[index * len(group) // number : (index + 1) * len(group) // number]) for index in range(number)
        ]
    return stacks


def compiled(cells: Sequence[Cell], num_devices: int) -> None:
    """Mark the trainings that are made one by one, in their rows too; so many that it is worth it are compiled."""
    number = Counter(job.shape_hash for cell in cells for job in cell.jobs if isinstance(job, ProbeJob))
    for cell in cells:
        for job in cell.jobs:
            if isinstance(job, ProbeJob) and not cell.in_stack:
                job.stack = 1
                job.compiled = is_worth_compiling(job, number[job.shape_hash], num_devices)
