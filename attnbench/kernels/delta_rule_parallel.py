"""The gated delta rule's state carried with all chunks' work done at once, before and after: the form for few heads and
many chunks. What is left to do one chunk after the other are two products with (C, K) matrices,

    F = U - W S,    S' = g_C S + Y^T b F        with U = (I - R b) V,  W = (I - R b) g K,  Y = g_C / g K

and for the gradient E of b F, with E_0 what the chunk's own queries give it and B = (g Q)^T times Y's gradient,

    E = E_0 + Y S'_gradient,    S_gradient = g_C S'_gradient + B - W^T b E
"""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    LENGTHS,
    chunk_read,
    chunk_resolvent,
    load_rows,
    matrix,
    read_change_gradient,
    store_rows,
)
from attnbench.kernels.delta_rule_tiles import chunk_place, chunk_rows, load_key, load_query, load_value
from attnbench.kernels.products import product, tall_product


@triton.jit
def store_key_parts(key, cumulative, total, beta, between, readers, writers, totals, index,
                    C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """W and Y of a chunk (`readers` and `writers`), and the sum of its log decays. `between` is R."""
    wide = key.to(tl.float32)
    reader = wide * tl.exp(cumulative)[:, None]
    reader -= product(between, (reader * beta[:, None]).to(key.dtype), PRECISION)
    writer = wide * tl.exp(total - cumulative)[:, None]
    tl.store(matrix(readers + index * C * K, K, 0, C, K), reader.to(key.dtype))
    tl.store(matrix(writers + index * C * K, K, 0, C, K), writer.to(key.dtype))
    tl.store(totals + index, total)


@triton.jit(do_not_specialize=LENGTHS)
def prepare_forward_kernel(mixed, log_decay, beta, resolvents, readers, writers, corrections, totals,
                           length, num_heads,
                           C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                           UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """R, W, Y, U (in place of F) and the sum of log decays of every chunk. Grid: chunks of all sequences × heads."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key, _, decays, betas, rows, valid = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    between = chunk_resolvent(key, decays, betas, C, PRECISION).to(key.dtype)
    tl.store(matrix(resolvents + index * C * C, C, 0, C, C), between)
    cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    store_key_parts(key, cumulative, total, betas, between, readers, writers, totals, index, C, K, PRECISION)
    for first in range(0, V, VALUES):
        value = load_value(mixed, rows, valid, head, num_heads, first, K, V, VALUES).to(tl.float32)
        value -= product(between, (value * betas[:, None]).to(key.dtype), PRECISION)
        tl.store(matrix(corrections + index * C * V, V, first, C, VALUES), value.to(key.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def scan_forward_kernel(beta, readers, writers, totals, initial, last, states, corrections, length, num_heads,
                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """S and F of every chunk, one after the other; F takes the place of U. Grid: sequences × heads, blocks of values.

    `initial` and `last` may be None.
    """
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state = tl.zeros((K, VALUES), tl.float32)
    if initial is not None:
        state = tl.load(matrix(initial + whole, V, first, K, VALUES))
    for n in range(num_chunks):
        index = program.to(tl.int64) * num_chunks + n
        rows, valid = chunk_rows(program // num_heads, n * C, length, C)
        betas = tl.load(beta + rows * num_heads + program % num_heads, mask=valid, other=0.0)
        reader = tl.load(matrix(readers + index * C * K, K, 0, C, K))
        writer = tl.load(matrix(writers + index * C * K, K, 0, C, K))
        correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES)).to(tl.float32)
        before = state.to(reader.dtype)
        tl.store(matrix(states + index * K * V, V, first, K, VALUES), before)
        correction -= product(reader, before, PRECISION)
        tl.store(matrix(corrections + index * C * V, V, first, C, VALUES), correction.to(reader.dtype))
        change = (correction * betas[:, None]).to(reader.dtype)
        state = state * tl.exp(tl.load(totals + index)) + tall_product(tl.trans(writer), change, PRECISION)
    if last is not None:
        tl.store(matrix(last + whole, V, first, K, VALUES), state)


@triton.jit(do_not_specialize=LENGTHS)
def read_kernel(mixed, log_decay, beta, states, corrections, output, length, num_heads, scale,
                C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The output of every chunk. Grid: chunks of all sequences × heads, blocks of values."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    first = tl.program_id(1) * VALUES
    key, _, decays, betas, rows, valid = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    query, _ = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
    state = tl.load(matrix(states + index * K * V, V, first, K, VALUES))
    correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES)).to(tl.float32)
    change = (correction * betas[:, None]).to(key.dtype)
    read = chunk_read(query, key, tl.cumsum(decays, 0), change, state, C, PRECISION)
    store_rows(output, rows, valid, num_heads * V, head * V + first, read, VALUES)


@triton.jit(do_not_specialize=LENGTHS)
def key_parts_kernel(mixed, log_decay, beta, resolvents, readers, writers, totals, length, num_heads,
                     C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """W, Y and the sum of log decays of every chunk again, for the gradient. Grid: chunks of all sequences × heads."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key, _, decays, betas, _, _ = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    between = tl.load(matrix(resolvents + index * C * C, C, 0, C, C))
    cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    store_key_parts(key, cumulative, total, betas, between, readers, writers, totals, index, C, K, PRECISION)


@triton.jit(do_not_specialize=LENGTHS)
def prepare_backward_kernel(mixed, log_decay, beta, gradient, change_gradients, additions, length, num_heads, scale,
                            C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                            UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """E_0 (in place of E) and B (in place of the gradient of S') of every chunk.

    Grid: chunks of all sequences × heads, blocks of values.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    first = tl.program_id(1) * VALUES
    key, _, decays, _, rows, valid = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    query, _ = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
    of_output = load_rows(gradient, rows, valid, num_heads * V, head * V + first, VALUES)
    cumulative = tl.cumsum(decays, 0)
    of_change = read_change_gradient(query, key, cumulative, of_output, C, PRECISION)
    tl.store(matrix(change_gradients + index * C * V, V, first, C, VALUES), of_change.to(key.dtype))
    decayed = (query.to(tl.float32) * tl.exp(cumulative)[:, None]).to(key.dtype)
    addition = tall_product(tl.trans(decayed), of_output, PRECISION)
    tl.store(matrix(additions + index * K * V, V, first, K, VALUES), addition.to(key.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def scan_backward_kernel(beta, readers, writers, totals, last_gradient, initial_gradient, state_gradients,
                         change_gradients, length, num_heads,
                         C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of S' and E of every chunk, from the last to the first, each in place of what was prepared.

    Grid: sequences × heads, blocks of values. The gradients of the states at both ends may be None.
    """
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state_gradient = tl.zeros((K, VALUES), tl.float32)
    if last_gradient is not None:
        state_gradient = tl.load(matrix(last_gradient + whole, V, first, K, VALUES))
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        index = program.to(tl.int64) * num_chunks + n
        rows, valid = chunk_rows(program // num_heads, n * C, length, C)
        betas = tl.load(beta + rows * num_heads + program % num_heads, mask=valid, other=0.0)
        reader = tl.load(matrix(readers + index * C * K, K, 0, C, K))
        writer = tl.load(matrix(writers + index * C * K, K, 0, C, K))
        of_change = tl.load(matrix(change_gradients + index * C * V, V, first, C, VALUES)).to(tl.float32)
        addition = tl.load(matrix(state_gradients + index * K * V, V, first, K, VALUES)).to(tl.float32)
        after = state_gradient.to(reader.dtype)
        tl.store(matrix(state_gradients + index * K * V, V, first, K, VALUES), after)
        of_change += product(writer, after, PRECISION)
        tl.store(matrix(change_gradients + index * C * V, V, first, C, VALUES), of_change.to(reader.dtype))
        read = tall_product(tl.trans(reader), (of_change * betas[:, None]).to(reader.dtype), PRECISION)
        state_gradient = state_gradient * tl.exp(tl.load(totals + index)) + addition - read
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient + whole, V, first, K, VALUES), state_gradient)
