"""Attention with shared key/value heads and rotary positions under the profiler, textbook and fused."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from attnbench.bench.base import SPEEDUP, Conditions, by_implementation, error_row, time_rows
from attnbench.bench.operators.attention import by_head
from attnbench.bench.operators.gate import affordable_heads, compared_heads, largest_error, reference
from attnbench.bench.operators.roofline import Work, attention_work
from attnbench.bench.profiling.recording import operator_rows, record
from attnbench.evals.lib.rows import peak_row
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.timing import ColdCaches, PeakMemory
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS
from attnbench.ops.layers.rotary import rotate, rotation
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError

THETA = 10000.0

FUSED_OPERATORS = (
    "attnbench::packed_flash_attention",
    "aten::_flash_attention_forward",
    "aten::_cudnn_attention_forward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators whose operations the profiler does not count: the table has our count."""

TOTAL, PEAK = "profiled_milliseconds", "peak_above_inputs_mib"

UNITS = {"forward_milliseconds": "ms", TOTAL: "ms", PEAK: "MiB"}


@dataclass(slots=True, kw_only=True, frozen=True)
class GroupedShape:
    """Query heads share key/value heads in groups."""

    batch_size: int
    sequence_length: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    causal: bool

    @property
    def repeats(self) -> int:
        return self.num_heads // self.num_key_value_heads

    def split(self, packed_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a projection into query (B, T, H, K), key and value (B, T, G, K)."""
        sizes = [self.num_heads, self.num_key_value_heads, self.num_key_value_heads]
        query, key, value = packed_BTC.unflatten(2, (-1, self.head_width)).split(sizes, dim=2)
        return query, key, value

    def work(self, itemsize: int) -> Work:
        """Key and value are read once for each group."""
        full = attention_work(self, itemsize)["forward"]
        return Work(full.flops, full.num_bytes * (2 + 2 / self.repeats) / 4)


def textbook(shape: GroupedShape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    """Repeat keys and values; two matrix products, a division and a softmax, each in memory; (B, H, T, K)."""
    query, key, value = shape.split(packed_BTC)
    query_BHTK = rotate(query, angles).transpose(1, 2)
    key_BHTK = rotate(key, angles).repeat_interleave(shape.repeats, dim=2).transpose(1, 2)
    value_BHTK = value.repeat_interleave(shape.repeats, dim=2).transpose(1, 2)
    score_BHTT = query_BHTK @ key_BHTK.mT / shape.head_width**0.5
    if shape.causal:
        T = shape.sequence_length
        unseen_TT = torch.ones(T, T, dtype=torch.bool, device=score_BHTT.device).triu(1)
        score_BHTT = score_BHTT.masked_fill(unseen_TT, float("-inf"))
    return score_BHTT.softmax(-1) @ value_BHTK


def sdpa(name: str, shape: GroupedShape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    query, key, value = shape.split(packed_BTC)
    query_BHTK, key_BGTK = (rotate(x, angles).transpose(1, 2) for x in (query, key))
    return IMPLEMENTATIONS[name].make()(query_BHTK, key_BGTK, value.transpose(1, 2), shape.causal)


def triton(shape: GroupedShape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    """Our kernel splits and rotates by itself."""
    from attnbench.ops.attention.triton.flash_op import packed_flash_attention

    mixed_BTC = packed_flash_attention(
        packed_BTC,
        angles,
        num_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        causal=shape.causal,
    )
    return mixed_BTC.unflatten(-1, (shape.num_heads, shape.head_width)).transpose(1, 2)


Attention = Callable[[GroupedShape, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Attention] = {
    "textbook": textbook,
    "sdpa_flash": partial(sdpa, "sdpa_flash"),
    "sdpa_cudnn": partial(sdpa, "sdpa_cudnn"),
    "triton": triton,
}


@dataclass(slots=True, kw_only=True)
class PackedExample:
    """Random inputs, never zeros, and attention over some of their heads in float64."""

    packed_BTC: Tensor
    angles: Tensor
    heads: list[int]
    expected: list[Tensor]


def example_of(shape: GroupedShape, conditions: Conditions) -> PackedExample:
    generator = torch.Generator(conditions.device).manual_seed(shape.sequence_length)
    width = (shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_width
    packed_BTC = torch.randn(
        shape.batch_size, shape.sequence_length, width, generator=generator, device=conditions.device
    )
    packed_BTC = packed_BTC.to(conditions.dtype)
    angles = rotation(shape.sequence_length, shape.head_width, 0, THETA, conditions.device)
    heads = compared_heads(shape.batch_size * shape.num_heads, affordable_heads(shape.sequence_length))
    query, key, value = shape.split(packed_BTC.double())
    everything = [
        rotate(query, angles.double()),
        rotate(key, angles.double()).repeat_interleave(shape.repeats, dim=2),
        value.repeat_interleave(shape.repeats, dim=2),
    ]
    query_BTK, key_BTK, value_BTK = (by_head(x.transpose(1, 2), heads) for x in everything)
    expected = reference(query_BTK, key_BTK, value_BTK, None, shape.causal)
    return PackedExample(packed_BTC=packed_BTC, angles=angles, heads=heads, expected=expected)


def profile_attention(
    shape: GroupedShape,
    names: Sequence[str],
    cell: dict[str, Any],
    conditions: Conditions,
    *,
    num_calls: int,
    num_lines: int,
    repetition: Timed,
) -> Iterator[Measurement]:
    """Yield all rows, implementation after implementation; ratios are of the first one's time to each other's."""
    make, first = partial(example_of, shape, conditions), None
    rows = partial(_profile, shape, conditions, num_calls, num_lines, repetition)
    with torch.no_grad():
        measured = by_implementation(names, UNITS, cell, conditions, make, rows)
        for name, group in groupby(measured, key=lambda row: row.settings["implementation"]):
            total, settings = None, cell | {"implementation": name}
            for row in group:
                total = row.value if row.metric == TOTAL else total
                yield row
            if first is not None and total is not None:
                of = settings | {"numerator": names[0], "denominator": name}
                speedup = first / total
                yield Measurement(metric=SPEEDUP, value=speedup, unit="", settings=of, num_samples=num_calls)
            first = total if first is None else first


def _profile(
    shape: GroupedShape,
    conditions: Conditions,
    num_calls: int,
    num_lines: int,
    repetition: Timed,
    name: str,
    example: PackedExample,
    settings: dict[str, Any],
) -> Iterator[Measurement]:
    refusal = IMPLEMENTATIONS[name].refusal(conditions.device.type, conditions.precision, shape.head_width)
    if refusal is not None:
        raise UserError(refusal)
    call = partial(ATTENTIONS[name], shape, example.packed_BTC, example.angles)
    yield error_row(largest_error([by_head(call(), example.heads)], example.expected, conditions.precision), settings)
    # Only now: the gate's float64 tensors are larger than the call's.
    memory = PeakMemory(conditions.device)
    call()
    peak_mib = memory.mib()
    times = repetition.times(call, conditions.device, before=ColdCaches(conditions.device))
    yield from time_rows(
        "forward", times, settings, shape.work(conditions.dtype.itemsize).floor_ms(conditions.ceilings)
    )
    flops = {operator: shape.work(1).flops for operator in FUSED_OPERATORS}
    recording = record(call, conditions.device, num_calls=num_calls, detailed=True)
    recording.write_trace(conditions.folder, f"attention-{name}")
    yield Measurement(metric=TOTAL, value=recording.milliseconds, unit="ms", settings=settings, num_samples=num_calls)
    yield peak_row(PEAK, peak_mib, settings)
    yield from operator_rows(recording.lines(flops), settings, num_lines)
