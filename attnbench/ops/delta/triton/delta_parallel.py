"""The gated delta rule with all chunks in parallel before and after a scan over the states: the form for few heads and
many chunks. The scan has two products with (C, K) matrices per chunk,

    F = U - W S,    S' = g_C S + Y^T b F        with U = (I - R b) V,  W = (I - R b) g K,  Y = g_C / g K

and for the gradient E of b F, with E_0 from the chunk's own queries and B = (g Q)^T times Y's gradient,

    E = E_0 + Y S'_gradient,    S_gradient = g_C S'_gradient + B - W^T b E

Grids are chunks of all sequences × heads, or of scans sequences × heads, and blocks of values.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product, tall_product
from attnbench.ops.delta.triton.delta_chunk import LENGTHS, load_rows, matrix, store_rows
from attnbench.ops.delta.triton.delta_tiles import (
    ASKING,
    BETA,
    LEAVING,
    READING,
    chunk_place,
    load_factor,
    load_key,
    load_pairs,
    load_query,
    load_total,
    load_value,
)


@triton.jit(do_not_specialize=LENGTHS)
def key_parts_kernel(mixed, pairs, factors, readers, writers, length, num_heads: tl.constexpr, GROUPS: tl.constexpr,
                     C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute W and Y (`readers` and `writers`)."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    between, _ = load_pairs(pairs, index, C)
    reading, leaving = load_factor(factors, index, READING, C), load_factor(factors, index, LEAVING, C)
    betas = load_factor(factors, index, BETA, C)
    reader = key.to(tl.float32) * reading[:, None]
    reader -= product(between, (reader * betas[:, None]).to(key.dtype), PRECISION)
    tl.store(matrix(readers, index * C, K, 0, C, K), reader.to(key.dtype))
    writer = key.to(tl.float32) * leaving[:, None]
    tl.store(matrix(writers, index * C, K, 0, C, K), writer.to(key.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def prepare_forward_kernel(mixed, pairs, factors, corrections, length, num_heads: tl.constexpr, GROUPS: tl.constexpr,
                           C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                           PRECISION: tl.constexpr):  # fmt: skip
    """Compute U, in place of F."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    first = tl.program_id(1) * VALUES
    between, _ = load_pairs(pairs, index, C)
    betas = load_factor(factors, index, BETA, C)
    value = load_value(mixed, sequence, head, start, length, first, num_heads, GROUPS, C, K, V, VALUES).to(tl.float32)
    value -= product(between, (value * betas[:, None]).to(between.dtype), PRECISION)
    tl.store(matrix(corrections, index * C, V, first, C, VALUES), value.to(between.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def scan_forward_kernel(factors, readers, writers, initial, last, states, corrections, length,
                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """Compute S and F of every chunk in order; F replaces U. `initial` and `last` may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K
    state = tl.zeros((K, VALUES), tl.float32)
    if initial is not None:
        state = tl.load(matrix(initial, whole, V, first, K, VALUES))
    for n in range(num_chunks):
        index = program.to(tl.int64) * num_chunks + n
        betas, total = load_factor(factors, index, BETA, C), load_total(factors, index, C)
        reader = tl.load(matrix(readers, index * C, K, 0, C, K))
        writer = tl.load(matrix(writers, index * C, K, 0, C, K))
        correction = tl.load(matrix(corrections, index * C, V, first, C, VALUES)).to(tl.float32)
        before = state.to(reader.dtype)
        tl.store(matrix(states, index * V + first, K, 0, VALUES, K), tl.trans(before))
        correction -= product(reader, before, PRECISION)
        tl.store(matrix(corrections, index * C, V, first, C, VALUES), correction.to(reader.dtype))
        change = (correction * betas[:, None]).to(reader.dtype)
        state = state * total + tall_product(tl.trans(writer), change, PRECISION)
    if last is not None:
        tl.store(matrix(last, whole, V, first, K, VALUES), state)


@triton.jit(do_not_specialize=LENGTHS)
def read_kernel(mixed, pairs, factors, states, corrections, output, length,
                num_heads: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                V: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    index, sequence, head, start = chunk_place(length, num_heads, C)
    first = tl.program_id(1) * VALUES
    query = load_query(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    _, weight = load_pairs(pairs, index, C)
    betas = load_factor(factors, index, BETA, C)
    state = tl.load(matrix(states, index * V + first, K, 0, VALUES, K))
    correction = tl.load(matrix(corrections, index * C, V, first, C, VALUES)).to(tl.float32)
    change = (correction * betas[:, None]).to(query.dtype)
    read = product(query, tl.trans(state), PRECISION) * load_factor(factors, index, ASKING, C)[:, None]
    read = product(weight, change, PRECISION, read)
    store_rows(read, output + head * V + first, sequence, start, length, num_heads * V, C, VALUES)


@triton.jit(do_not_specialize=LENGTHS)
def prepare_backward_kernel(mixed, pairs, factors, gradient, change_gradients, additions, length,
                            num_heads: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                            V: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute E_0 (in place of E) and B, transposed (in place of the gradient of S')."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    first = tl.program_id(1) * VALUES
    query = load_query(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
    _, weight = load_pairs(pairs, index, C)
    of_change = product(tl.trans(weight), of_output, PRECISION)
    tl.store(matrix(change_gradients, index * C, V, first, C, VALUES), of_change.to(query.dtype))
    asked = (query.to(tl.float32) * load_factor(factors, index, ASKING, C)[:, None]).to(query.dtype)
    addition = product(tl.trans(of_output), asked, PRECISION)
    tl.store(matrix(additions, index * V + first, K, 0, VALUES, K), addition.to(query.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def scan_backward_kernel(factors, readers, writers, last_gradient, initial_gradient, state_gradients,
                         change_gradients, length,
                         C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradient of S' and E of every chunk in reverse order, in place of the prepared tensors. Gradients of
    the states at both ends may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K
    state_gradient = tl.zeros((K, VALUES), tl.float32)
    if last_gradient is not None:
        state_gradient = tl.load(matrix(last_gradient, whole, V, first, K, VALUES))
    for done in range(num_chunks):
        index = program.to(tl.int64) * num_chunks + num_chunks - 1 - done
        betas, total = load_factor(factors, index, BETA, C), load_total(factors, index, C)
        reader = tl.load(matrix(readers, index * C, K, 0, C, K))
        writer = tl.load(matrix(writers, index * C, K, 0, C, K))
        of_change = tl.load(matrix(change_gradients, index * C, V, first, C, VALUES)).to(tl.float32)
        place = matrix(state_gradients, index * V + first, K, 0, VALUES, K)
        addition = tl.trans(tl.load(place)).to(tl.float32)
        after = state_gradient.to(reader.dtype)
        tl.store(place, tl.trans(after))
        of_change += product(writer, after, PRECISION)
        tl.store(matrix(change_gradients, index * C, V, first, C, VALUES), of_change.to(reader.dtype))
        read = tall_product(tl.trans(reader), (of_change * betas[:, None]).to(reader.dtype), PRECISION)
        state_gradient = state_gradient * total + addition - read
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient, whole, V, first, K, VALUES), state_gradient)
