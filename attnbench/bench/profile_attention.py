"""Attention with shared key/value heads and rotary positions under the profiler: the textbook's and fused ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.bench.base import SPEEDUP, Subject, error_row, timed
from attnbench.bench.gate import compared_heads, largest_error, reference
from attnbench.bench.implementations import IMPLEMENTATIONS
from attnbench.bench.operator import Missing, tried
from attnbench.bench.passes import Repetition
from attnbench.bench.profile_rows import operator_rows, peak_row
from attnbench.bench.recording import Recording, record
from attnbench.bench.roofline import Work, attention_work
from attnbench.bench.traces import write_trace
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.device import multiplying
from attnbench.machine.timing import ColdCaches, OutOfMemory, PeakMemory, Times, attempt, time_repeats
from attnbench.mixers.layers import rotate, rotation
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
"""The profiler has no count of the operations of these: ours stands in the table, two products over all pairs."""

PEAK = "peak_above_inputs_mib"

UNITS = {"forward_milliseconds": "ms", "profiled_milliseconds": "ms", PEAK: "MiB"}


@dataclass(slots=True, kw_only=True, frozen=True)
class Shape:
    """Of the attention that is profiled."""

    batch_size: int
    sequence_length: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    causal: bool

    def split(self, packed_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, T, H, K), key and value (B, T, G, K) where the projection leaves them."""
        by_head = packed_BTC.unflatten(2, (-1, self.head_width))
        query, key, value = by_head.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], dim=2)
        return query, key, value

    def work(self, itemsize: int) -> Work:
        """What the function cannot do without: key and value are read once for each head that has its own."""
        full = attention_work(
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            length=self.sequence_length,
            head_width=self.head_width,
            causal=self.causal,
            itemsize=itemsize,
        )["forward"]
        shared = self.num_key_value_heads / self.num_heads
        return Work(full.flops, full.num_bytes * (2 + 2 * shared) / 4)


def textbook(shape: Shape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    """Keys and values repeated, two matrix products, a division and a softmax, each in memory; (B, H, T, K)."""
    query, key, value = shape.split(packed_BTC)
    repeats = shape.num_heads // shape.num_key_value_heads
    query_BHTK = rotate(query, angles).transpose(1, 2)
    key_BHTK = rotate(key, angles).repeat_interleave(repeats, dim=2).transpose(1, 2)
    value_BHTK = value.repeat_interleave(repeats, dim=2).transpose(1, 2)
    score_BHTT = query_BHTK @ key_BHTK.mT / shape.head_width**0.5
    if shape.causal:
        unseen_TT = torch.ones(
            shape.sequence_length, shape.sequence_length, dtype=torch.bool, device=score_BHTT.device
        ).triu(1)
        score_BHTT = score_BHTT.masked_fill(unseen_TT, float("-inf"))
    return score_BHTT.softmax(-1) @ value_BHTK


def sdpa(kernel: SDPBackend, shape: Shape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    """Rotation, and torch's attention through the kernel that is named."""
    query, key, value = shape.split(packed_BTC)
    query_BHTK, key_BGTK = (rotate(x, angles).transpose(1, 2) for x in (query, key))
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(
            query_BHTK, key_BGTK, value.transpose(1, 2), is_causal=shape.causal, enable_gqa=True
        )


def triton(shape: Shape, packed_BTC: Tensor, angles: Tensor) -> Tensor:
    """Our kernel, which splits and rotates by itself."""
    from attnbench.kernels.flash_attention import packed_flash_attention

    mixed_BTC = packed_flash_attention(
        packed_BTC,
        angles,
        num_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        causal=shape.causal,
    )
    return mixed_BTC.unflatten(-1, (shape.num_heads, shape.head_width)).transpose(1, 2)


Attention = Callable[[Shape, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, Attention] = {
    "textbook": textbook,
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "triton": triton,
}


@dataclass(slots=True, kw_only=True)
class Example:
    """Random inputs, never zeros, and what attention makes of some of their heads in float64."""

    packed_BTC: Tensor
    angles: Tensor
    heads: list[int]
    expected: list[Tensor]


def example_of(shape: Shape, subject: Subject) -> Example:
    """The same for every implementation."""
    generator = torch.Generator(subject.device).manual_seed(shape.sequence_length)
    width = (shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_width
    packed_BTC = torch.randn(shape.batch_size, shape.sequence_length, width, generator=generator, device=subject.device)
    packed_BTC = packed_BTC.to(subject.dtype)
    angles = rotation(shape.sequence_length, shape.head_width, 0, THETA, subject.device)
    heads = compared_heads(shape.batch_size * shape.num_heads, shape.sequence_length)
    query, key, value = shape.split(packed_BTC.double())
    repeats = shape.num_heads // shape.num_key_value_heads
    everything = [
        rotate(query, angles.double()),
        rotate(key, angles.double()).repeat_interleave(repeats, dim=2),
        value.repeat_interleave(repeats, dim=2),
    ]
    query_BTK, key_BTK, value_BTK = (x.transpose(1, 2).flatten(0, 1)[heads] for x in everything)
    expected = reference(query_BTK, key_BTK, value_BTK, None, shape.causal)
    return Example(packed_BTC=packed_BTC, angles=angles, heads=heads, expected=expected)


@dataclass(slots=True, kw_only=True, frozen=True)
class Profiled:
    """One implementation, measured."""

    error: float
    """What the gate found."""
    times: Times
    """Of one call, caches cold, without the profiler."""
    peak_mib: float | None
    """Above the inputs."""
    recording: Recording


def check_attentions(names: list) -> None:
    """Raises UserError for a name that there is not, or twice."""
    for name in names:
        if name not in ATTENTIONS:
            raise UserError(f"bench.implementations: {name} is none of {', '.join(ATTENTIONS)}")
    if len(set(names)) < len(names):
        raise UserError(f"bench.implementations={names}: names one of them twice")


def profile_attention(
    shape: Shape,
    names: Sequence[str],
    cell: dict[str, Any],
    subject: Subject,
    *,
    num_calls: int,
    num_lines: int,
    repetition: Repetition,
) -> Iterator[Measurement]:
    """All rows, implementation after implementation; the ratio is of the first one's time to each other's."""
    first: Recording | None = None
    with multiplying(subject.precision), torch.no_grad():
        example = attempt(lambda: example_of(shape, subject))
        for name in names:
            settings = cell | {"implementation": name}
            if isinstance(example, OutOfMemory):
                yield from without_numbers(UNITS, settings, "out_of_memory", f"the reference: {example.reason}")
                continue
            refusal = IMPLEMENTATIONS[name].refuse(subject.device.type, subject.precision, shape.head_width)
            if refusal is not None:
                yield from without_numbers(UNITS, settings, "unsupported", refusal)
                continue
            found = tried(lambda name=name: _profile(shape, name, example, subject, num_calls, repetition))
            if isinstance(found, Missing):
                yield from without_numbers(UNITS, settings, *found)
                continue
            yield from _rows(shape, found, settings, subject, num_lines)
            if first is None:
                first = found.recording
            else:
                ratio, of = (
                    first.milliseconds / found.recording.milliseconds,
                    {"numerator": names[0], "denominator": name},
                )
                yield Measurement(metric=SPEEDUP, value=ratio, unit="", settings=settings | of, num_samples=num_calls)


def _profile(
    shape: Shape, name: str, example: Example, subject: Subject, num_calls: int, repetition: Repetition
) -> Profiled:
    call = partial(ATTENTIONS[name], shape, example.packed_BTC, example.angles)
    actual = call().flatten(0, 1)[example.heads]
    error = largest_error([actual], example.expected, subject.precision)
    del actual
    # Only now: the gate's own tensors are in float64 and larger than the call's.
    memory = PeakMemory(subject.device)
    call()
    peak_mib = memory.mib()
    cold = ColdCaches(subject.device)
    times = time_repeats(
        call,
        subject.device,
        warmup=repetition.warmup,
        repeats=repetition.repeats,
        max_seconds=repetition.max_seconds,
        before=cold,
    )
    flops = {name: shape.work(1).flops for name in FUSED_OPERATORS}
    recording = record(call, subject.device, num_calls=num_calls, detailed=True, flops=flops)
    if subject.folder is not None:
        write_trace(recording.trace, subject.folder / "traces" / f"attention-{name}.json.gz")
    return Profiled(error=error, times=times, peak_mib=peak_mib, recording=recording)


def _rows(
    shape: Shape, found: Profiled, settings: dict[str, Any], subject: Subject, num_lines: int
) -> Iterator[Measurement]:
    recording = found.recording
    yield error_row(found.error, settings)
    yield from timed("forward", found.times, settings, shape.work(subject.dtype.itemsize).floor_ms(subject.ceilings))
    yield Measurement(
        metric="profiled_milliseconds",
        value=recording.milliseconds,
        unit="ms",
        settings=settings,
        num_samples=recording.num_calls,
    )
    yield peak_row(PEAK, found.peak_mib, settings)
    yield from operator_rows(recording.lines, settings, num_lines)
