"""One new position, measured: every implementation held against float64, and then timed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Subject, error_row, timed
from attnbench.bench.gate import largest_error
from attnbench.bench.operator import Missing, tried
from attnbench.bench.passes import Repetition
from attnbench.bench.steps import STEPS, Example, Shape, Step, compared_heads
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.device import multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, attempt, time_repeats
from attnbench.results.rows import Measurement

DECODE = f"decode{MILLISECONDS}"


def measure_steps(
    shape: Shape, names: Sequence[str], repetition: Repetition, settings: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    """All rows of a shape, implementation after implementation."""
    with multiplying(subject.precision):
        example = attempt(lambda: _example(shape, subject))
        for name in names:
            label = STEPS[name].label(subject.device.type, subject.precision, shape.head_width)
            own = settings | {"implementation": label}
            if isinstance(example, OutOfMemory):
                yield from _without(own, "out_of_memory", example.reason)
            else:
                yield from _measure_one(STEPS[name], example, repetition, own, subject)


def _measure_one(
    step: Step, example: Example, repetition: Repetition, settings: dict[str, Any], subject: Subject
) -> Iterator[Measurement]:
    refusal = step.refuse(subject.device.type, subject.precision, example.shape.head_width)
    if refusal is not None:
        yield from _without(settings, "unsupported", refusal)
        return
    found = tried(lambda: _timed(step, example, repetition, settings, subject))
    yield from _without(settings, *found) if isinstance(found, Missing) else found


def _timed(
    step: Step, example: Example, repetition: Repetition, settings: dict[str, Any], subject: Subject
) -> list[Measurement]:
    shape, device = example.shape, subject.device
    with torch.no_grad():
        call = step.prepare(example)
        output_BHK = call().reshape(shape.batch_size * shape.num_heads, 1, shape.head_width)
        error = largest_error([output_BHK[compared_heads(shape)]], [step.expected(example)], subject.precision)
        cold = ColdCaches(device)
        times = time_repeats(
            call,
            device,
            warmup=repetition.warmup,
            repeats=repetition.repeats,
            max_seconds=repetition.max_seconds,
            before=cold,
        )
    floor_ms = step.work(shape, example.query_BHK.itemsize).floor_ms(subject.ceilings)
    return [error_row(error, settings), *timed("decode", times, settings, floor_ms)]


def _without(settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    yield from without_numbers({DECODE: "ms", MAX_ERROR: ""}, settings, status, reason)


def _example(shape: Shape, subject: Subject) -> Example:
    generator = torch.Generator(subject.device).manual_seed(shape.cache_length * shape.head_width)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=subject.device)

    B, _, _, K = shape.cache
    H = shape.num_heads
    return Example(
        shape=shape,
        query_BHK=normal(B, H, K).to(subject.dtype),
        key_BSGK=normal(*shape.cache).to(subject.dtype),
        value_BSGK=normal(*shape.cache).to(subject.dtype),
        memory_BHKV=normal(B, H, K, K),
        # What sums of features are: positive.
        normaliser_BHK=shape.cache_length * (1 + normal(B, H, K).abs()),
        log_decay_B1H=-normal(B, 1, H).abs(),
        beta_B1H=normal(B, 1, H).sigmoid(),
    )
