"""Forward kernels of linear_op.py."""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.layers.triton.rotary_kernels import turn

UNSPECIALIZED = ("length", "segment")
"""Arguments whose values do not specialise a kernel."""


@triton.jit
def locate(length, segment, HEADS: tl.constexpr):
    """Adjacent heads are neighbours in the grid."""
    num_segments = tl.cdiv(length, segment)
    head, rest = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    sequence, part = rest // num_segments, rest % num_segments
    start = part * segment
    return sequence, head, start, min(start + segment, length), (sequence * HEADS + head) * num_segments + part


@triton.jit
def tile(x, sequence, length, first, head, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return addresses of a chunk of a head in (B, length, stride), 64 bits for large tensors, and which exist."""
    row, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    base = x + (sequence.to(tl.int64) * length + first) * stride + head * WIDTH
    exists = (first + row < length)[:, None]
    if BLOCK > WIDTH:
        exists = exists & (column < WIDTH)[None, :]
    return base + row[:, None] * stride + column[None, :], exists


@triton.jit
def slot_state(memory, normaliser, slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    memory_address = memory + slot.to(tl.int64) * WIDTH * WIDTH + row[:, None] * WIDTH + row[None, :]
    exists = row < WIDTH
    return memory_address, normaliser + slot * WIDTH + row, exists[:, None] & exists[None, :], exists


@triton.jit
def feature(x, FEATURE: tl.constexpr):
    x = x.to(tl.float32)
    if FEATURE == "elu":
        x = tl.maximum(x, 0) + tl.exp(tl.minimum(x, 0))
    elif FEATURE == "relu":
        x = tl.maximum(x, 0)
    return x


@triton.jit
def key_value(
    mixed, sequence, length, first, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load a chunk's keys, their features and values, all zero beyond the end, so that they change no state."""
    stride: tl.constexpr = 3 * HEADS * WIDTH
    address, exists = tile(mixed, sequence, length, first, head, stride, WIDTH, BLOCK, CHUNK)
    raw = tl.load(address + HEADS * WIDTH, mask=exists, other=0)
    value = tl.load(address + 2 * HEADS * WIDTH, mask=exists, other=0)
    return raw, tl.where(exists, feature(raw, FEATURE), 0).to(raw.dtype), value


@triton.jit
def turned(
    x, rotation, first, length,
    ROTATED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if ROTATED:
        return turn(x, rotation, first + tl.arange(0, CHUNK), length, WIDTH, BLOCK, False).to(x.dtype)
    return x


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_sums_kernel(
    mixed, rotation, memory, normaliser, length, segment,
    ROTATED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head, start, stop, slot = locate(length, segment, HEADS)
    state, total = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, CHUNK):
        _, key, value = key_value(mixed, sequence, length, first, head, HEADS, WIDTH, FEATURE, BLOCK, CHUNK)
        turned_key = turned(key, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        state = product(tl.trans(turned_key), value, PRECISION, state)
        total += tl.sum(key.to(tl.float32), 0)
    memory_address, normaliser_address, inside, exists = slot_state(memory, normaliser, slot, WIDTH, BLOCK)
    tl.store(memory_address, state, mask=inside)
    tl.store(normaliser_address, total, mask=exists)


@triton.jit
def before(
    start_memory, start_normaliser, memory, normaliser, sequence, head, start, slot,
    HAS_START: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return S and z before a segment: given, or the end state of the previous segment."""
    state, total = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if HAS_START:
        first_slot = sequence * HEADS + head
        memory_address, normaliser_address, inside, exists = slot_state(
            start_memory, start_normaliser, first_slot, WIDTH, BLOCK
        )
        state = tl.load(memory_address, mask=inside & (start == 0), other=0)
        total = tl.load(normaliser_address, mask=exists & (start == 0), other=0)
    if start > 0:
        memory_address, normaliser_address, inside, exists = slot_state(memory, normaliser, slot - 1, WIDTH, BLOCK)
        state = tl.load(memory_address, mask=inside, other=0)
        total = tl.load(normaliser_address, mask=exists, other=0)
    return state, total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_forward_kernel(
    mixed, rotation, start_memory, start_normaliser, memory, normaliser, y, divisor, length, segment, eps,
    HAS_START: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y by masked products within a chunk, and by S and z for earlier positions. A sequence of one segment
    stores its last state. If ROTATED, S is of rotated features, z of unrotated ones."""
    sequence, head, start, stop, slot = locate(length, segment, HEADS)
    state, total = before(
        *(start_memory, start_normaliser, memory, normaliser, sequence, head, start, slot),
        *(HAS_START, HEADS, WIDTH, BLOCK),
    )
    row = tl.arange(0, CHUNK)
    for first in range(start, stop, CHUNK):
        address, is_there = tile(mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        raw = tl.load(address, mask=is_there, other=0)
        query = feature(raw, FEATURE).to(raw.dtype)
        _, key, value = key_value(mixed, sequence, length, first, head, HEADS, WIDTH, FEATURE, BLOCK, CHUNK)
        turned_query = turned(query, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        turned_key = turned(key, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        seen = row[:, None] >= row[None, :]
        weight = tl.where(seen, product(turned_query, tl.trans(turned_key), PRECISION), 0)
        plain = weight
        if ROTATED:
            plain = tl.where(seen, product(query, tl.trans(key), PRECISION), 0)
        quotient_by = tl.sum(plain, 1) + tl.sum(query.to(tl.float32) * total[None, :], 1) + eps
        mixture = product(turned_query, state.to(query.dtype), PRECISION)
        mixture = product(weight.to(value.dtype), value, PRECISION, mixture)
        address, is_there = tile(y, sequence, length, first, head, HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        tl.store(address, (mixture / quotient_by[:, None]).to(y.dtype.element_ty), mask=is_there)
        address = divisor + (sequence * HEADS + head).to(tl.int64) * length + first + row
        tl.store(address, quotient_by, mask=first + row < length)
        state = product(tl.trans(turned_key), value, PRECISION, state)
        total += tl.sum(key.to(tl.float32), 0)
    if segment >= length:
        memory_address, normaliser_address, inside, exists = slot_state(memory, normaliser, slot, WIDTH, BLOCK)
        tl.store(memory_address, state, mask=inside)
        tl.store(normaliser_address, total, mask=exists)
