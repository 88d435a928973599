"""Gradient kernels of linear_op.py, over the same segments."""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.layers.triton.rotary_kernels import turn
from attnbench.ops.linear.triton.linear_kernels import (
    UNSPECIALIZED,
    before,
    feature,
    key_value,
    locate,
    slot_state,
    tile,
    turned,
)


@triton.jit
def _through_feature(gradient, x, FEATURE: tl.constexpr):
    x = x.to(tl.float32)
    if FEATURE == "elu":
        gradient *= tl.exp(tl.minimum(x, 0))
    elif FEATURE == "relu":
        gradient = tl.where(x > 0, gradient, 0)
    return gradient


@triton.jit
def _through_quotient(
    of_y, y, divisor, sequence, length, first, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return, with y = n / d, dn = dy / d in y's dtype and dd = -(dy . y) / d in float32; zeros beyond the end."""
    stride: tl.constexpr = HEADS * WIDTH
    address, exists = tile(of_y, sequence, length, first, head, stride, WIDTH, BLOCK, CHUNK)
    gradient = tl.load(address, mask=exists, other=0).to(tl.float32)
    address, exists = tile(y, sequence, length, first, head, stride, WIDTH, BLOCK, CHUNK)
    quotient = tl.load(address, mask=exists, other=0).to(tl.float32)
    position = first + tl.arange(0, CHUNK)
    address = divisor + (sequence * HEADS + head).to(tl.int64) * length + position
    inverse = 1 / tl.load(address, mask=position < length, other=1)
    of_divisor = -tl.sum(gradient * quotient, 1) * inverse
    return (gradient * inverse[:, None]).to(y.dtype.element_ty), of_divisor


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_sums_backward_kernel(
    mixed, rotation, of_y, y, divisor, of_memory, of_normaliser, length, segment,
    ROTATED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head, start, stop, slot = locate(length, segment, HEADS)
    of_state, of_total = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, CHUNK):
        address, is_there = tile(mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        raw = tl.load(address, mask=is_there, other=0)
        query = feature(raw, FEATURE).to(raw.dtype)
        of_read, of_divisor = _through_quotient(
            of_y, y, divisor, sequence, length, first, head, HEADS, WIDTH, BLOCK, CHUNK
        )
        turned_query = turned(query, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        of_state = product(tl.trans(turned_query), of_read, PRECISION, of_state)
        of_total += tl.sum(query.to(tl.float32) * of_divisor[:, None], 0)
    memory_address, normaliser_address, inside, exists = slot_state(of_memory, of_normaliser, slot, WIDTH, BLOCK)
    tl.store(memory_address, of_state, mask=inside)
    tl.store(normaliser_address, of_total, mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_query_gradient_kernel(
    mixed, rotation, of_y, y, divisor, start_memory, start_normaliser, memory, normaliser, of_mixed, length, segment,
    HAS_START: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk forward, with G = dn and g = dd of `_through_quotient`, S and z before a chunk:

        df(q)_t = S G_t + g_t z + sum_{s<=t} (G_t . v_s + g_t) f(k)_s

    If ROTATED, terms with G_t are gradients of rotated features and rotated back. S is summed again: walking backward
    from its last value would subtract features, exponentials that may be a million times larger than the rest.
    """
    sequence, head, start, stop, slot = locate(length, segment, HEADS)
    state, total = before(
        *(start_memory, start_normaliser, memory, normaliser, sequence, head, start, slot),
        *(HAS_START, HEADS, WIDTH, BLOCK),
    )
    row = tl.arange(0, CHUNK)
    for first in range(start, stop, CHUNK):
        address, is_there = tile(mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        raw_query = tl.load(address, mask=is_there, other=0)
        _, key, value = key_value(mixed, sequence, length, first, head, HEADS, WIDTH, FEATURE, BLOCK, CHUNK)
        of_read, of_divisor = _through_quotient(
            of_y, y, divisor, sequence, length, first, head, HEADS, WIDTH, BLOCK, CHUNK
        )
        turned_key = turned(key, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        seen = row[:, None] >= row[None, :]
        of_weight = product(of_read, tl.trans(value), PRECISION)
        of_query = of_divisor[:, None] * total[None, :]
        if ROTATED:
            of_turned = product(of_read, tl.trans(state).to(key.dtype), PRECISION)
            of_turned = product(tl.where(seen, of_weight, 0).to(key.dtype), turned_key, PRECISION, of_turned)
            of_query = product(tl.where(seen, of_divisor[:, None], 0).to(key.dtype), key, PRECISION, of_query)
            of_query += turn(of_turned, rotation, first + row, length, WIDTH, BLOCK, True)
        else:
            of_weight = tl.where(seen, of_weight + of_divisor[:, None], 0).to(key.dtype)
            of_query = product(of_read, tl.trans(state).to(key.dtype), PRECISION, of_query)
            of_query = product(of_weight, key, PRECISION, of_query)
        of_query = _through_feature(of_query, raw_query, FEATURE)
        address, is_there = tile(of_mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        tl.store(address, of_query.to(key.dtype), mask=is_there)
        state = product(tl.trans(turned_key), value, PRECISION, state)
        total += tl.sum(key.to(tl.float32), 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_key_value_gradient_kernel(
    mixed, rotation, of_y, y, divisor, of_memory, of_normaliser, of_mixed, length, segment,
    ROTATED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk backward, with G and g as above, dS and dz the sums of f(q) G^T and g f(q) after a chunk:

        df(k)_s = dS v_s + dz   + sum_{t>=s} (G_t . v_s + g_t) f(q)_t
        dv_s    = dS^T f(k)_s   + sum_{t>=s} (f(q)_t . f(k)_s) G_t

    If ROTATED, dS and terms with G are of rotated features.
    """
    sequence, head, start, stop, slot = locate(length, segment, HEADS)
    of_state, of_total = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if stop < length:
        memory_address, normaliser_address, inside, exists = slot_state(
            of_memory, of_normaliser, slot + 1, WIDTH, BLOCK
        )
        of_state = tl.load(memory_address, mask=inside, other=0)
        of_total = tl.load(normaliser_address, mask=exists, other=0)
    row = tl.arange(0, CHUNK)
    num_chunks = tl.cdiv(stop - start, CHUNK)
    for step in range(num_chunks):
        first = start + (num_chunks - 1 - step) * CHUNK
        address, is_there = tile(mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        raw_query = tl.load(address, mask=is_there, other=0)
        query = feature(raw_query, FEATURE).to(raw_query.dtype)
        raw_key, key, value = key_value(mixed, sequence, length, first, head, HEADS, WIDTH, FEATURE, BLOCK, CHUNK)
        of_read, of_divisor = _through_quotient(
            of_y, y, divisor, sequence, length, first, head, HEADS, WIDTH, BLOCK, CHUNK
        )
        turned_query = turned(query, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        turned_key = turned(key, rotation, first, length, ROTATED, WIDTH, BLOCK, CHUNK)
        # (source, position), transposed compared with the other kernels.
        seen = row[:, None] <= row[None, :]
        of_weight = product(value, tl.trans(of_read), PRECISION)
        of_key = product(value, tl.trans(of_state).to(value.dtype), PRECISION)
        if ROTATED:
            of_key = product(tl.where(seen, of_weight, 0).to(query.dtype), turned_query, PRECISION, of_key)
            of_key = turn(of_key, rotation, first + row, length, WIDTH, BLOCK, True) + of_total[None, :]
            of_key = product(tl.where(seen, of_divisor[None, :], 0).to(query.dtype), query, PRECISION, of_key)
        else:
            of_weight = tl.where(seen, of_weight + of_divisor[None, :], 0).to(query.dtype)
            of_key = product(of_weight, query, PRECISION, of_key + of_total[None, :])
        of_key = _through_feature(of_key, raw_key, FEATURE)
        weight = tl.where(seen, product(turned_key, tl.trans(turned_query), PRECISION), 0).to(of_read.dtype)
        of_value = product(weight, of_read, PRECISION, product(turned_key, of_state.to(key.dtype), PRECISION))
        address, is_there = tile(of_mixed, sequence, length, first, head, 3 * HEADS * WIDTH, WIDTH, BLOCK, CHUNK)
        tl.store(address + HEADS * WIDTH, of_key.to(query.dtype), mask=is_there)
        tl.store(address + 2 * HEADS * WIDTH, of_value.to(query.dtype), mask=is_there)
        of_state = product(tl.trans(turned_query), of_read, PRECISION, of_state)
        of_total += tl.sum(query.to(tl.float32) * of_divisor[:, None], 0)
