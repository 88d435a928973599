"""One new position, measured: every implementation held against float64, and then timed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Conditions, error_row, rows_or_reason, time_rows
from attnbench.bench.operators.gate import largest_error
from attnbench.bench.operators.steps import STEPS, CacheShape, Step, StepExample, compared_heads
from attnbench.evals.lib.rows import without_numbers
from attnbench.evals.lib.step_cost import Repetition
from attnbench.machine.precision import multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, attempt, time_repeats
from attnbench.ops.state_steps import StepInputs
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

DECODE = f"decode{MILLISECONDS}"
UNITS = {DECODE: "ms", MAX_ERROR: ""}


def measure_steps(
    shape: CacheShape, names: Sequence[str], repetition: Repetition, settings: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    """All rows of a shape, implementation after implementation."""
    with multiplying(conditions.precision):
        example = attempt(lambda: _example(shape, conditions))
        for name in names:
            label = STEPS[name].label(conditions.device.type, conditions.precision, shape.head_width)
            labelled = settings | {"implementation": label}
            if isinstance(example, OutOfMemory):
                yield from without_numbers(UNITS, labelled, "out_of_memory", example.reason)
            else:
                yield from _measure_one(STEPS[name], example, repetition, labelled, conditions)


def _measure_one(
    step: Step, example: StepExample, repetition: Repetition, settings: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    shape, device = example.shape, conditions.device

    def measure() -> list[Measurement]:
        refusal = step.refuse(device.type, conditions.precision, shape.head_width)
        if refusal is not None:
            raise UserError(refusal)
        with torch.no_grad():
            call = step.prepare(example)
            output_BHK = call().reshape(shape.batch_size * shape.num_heads, 1, shape.head_width)
            compared = output_BHK[compared_heads(shape)]
            error = largest_error([compared], [step.expected(example)], conditions.precision)
            times = time_repeats(call, device, **asdict(repetition), before=ColdCaches(device))
        floor_ms = step.work(shape, example.query_BHK.itemsize).floor_ms(conditions.ceilings)
        return [error_row(error, settings), *time_rows("decode", times, settings, floor_ms)]

    yield from rows_or_reason(UNITS, settings, measure)


def _example(shape: CacheShape, conditions: Conditions) -> StepExample:
    generator = torch.Generator(conditions.device).manual_seed(shape.cache_length * shape.head_width)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=conditions.device)

    B, _, _, K = shape.cache
    H = shape.num_heads
    query_BHK = normal(B, H, K).to(conditions.dtype)
    key_BSGK, value_BSGK = (normal(*shape.cache).to(conditions.dtype) for _ in range(2))
    shared_by = H // shape.num_key_value_heads
    key_B1HK, value_B1HK = (x[:, -1:].repeat_interleave(shared_by, dim=2) for x in (key_BSGK, value_BSGK))
    newest = StepInputs(
        query_BHK[:, None],
        key_B1HK,
        value_B1HK,
        memory_BHKV=normal(B, H, K, K),
        # Positive, as sums of features are.
        normaliser_BHK=shape.cache_length * (1 + normal(B, H, K).abs()),
        log_decay_B1H=-normal(B, 1, H).abs(),
        beta_B1H=normal(B, 1, H).sigmoid(),
    )
    return StepExample(shape, query_BHK, key_BSGK, value_BSGK, newest)
