"""One new position: every implementation compared with float64, then timed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import MAX_ERROR, MILLISECONDS, Conditions, by_implementation, error_row, time_rows
from attnbench.bench.operators.gate import largest_error
from attnbench.bench.operators.steps import STEPS, CacheShape, StepExample
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.timing import ColdCaches
from attnbench.ops.state_steps import StepInputs
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

DECODE = f"decode{MILLISECONDS}"
UNITS = {DECODE: "ms", MAX_ERROR: ""}


def measure_steps(
    shape: CacheShape, names: Sequence[str], repetition: Timed, settings: dict[str, Any], conditions: Conditions
) -> Iterator[Measurement]:
    device, precision, width = conditions.device, conditions.precision, shape.head_width

    def rows(name: str, example: StepExample, settings: dict[str, Any]) -> Iterator[Measurement]:
        step = STEPS[name]
        refusal = step.refuse(device.type, precision, width)
        if refusal is not None:
            raise UserError(refusal)
        with torch.no_grad():
            call = step.prepare(example)
            output_BHK = call().reshape(shape.batch_size * shape.num_heads, 1, width)
            error = largest_error([output_BHK[shape.compared_heads]], [step.expected(example)], precision)
            times = repetition.times(call, device, before=ColdCaches(device))
        yield error_row(error, settings)
        floor_ms = step.work(shape, example.query_BHK.itemsize).floor_ms(conditions.ceilings)
        yield from time_rows("decode", times, settings, floor_ms)

    def label(name: str) -> str:
        return STEPS[name].label(device.type, precision, width)

    yield from by_implementation(names, UNITS, settings, conditions, lambda: _example(shape, conditions), rows, label)


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
