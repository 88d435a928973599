"""The gated delta rule by one program a head, which walks its chunks with the state in registers.

Two kernels, forward and backward, that read and write every position once: the form for many heads and few chunks.
Values are cut into blocks of channels, which do not depend on each other; gradients that several blocks share (all but
that of the values) are written block by block and added outside.
"""

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    chunk_change,
    chunk_error,
    chunk_gradient,
    chunk_inverse,
    chunk_read,
    load_rows,
    matrix,
    next_state,
    scaled_rows,
    scaled_rows_gradient,
    store_rows,
)


@triton.jit
def load_chunk(mixed, log_decay, beta, sequence, head, start, length, num_heads, first, scale,
               C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Query, key (scaled, with the factors of their rows), a block of value, log decay and beta of one chunk of a head;
    and its rows, counted over the batch, and which of them exist."""
    positions = start + tl.arange(0, C)
    valid, rows = positions < length, sequence.to(tl.int64) * length + positions
    row_stride = num_heads * (2 * K + V)
    query, query_factor = scaled_rows(load_rows(mixed, rows, valid, row_stride, head * K, K), scale, UNIT)
    key = load_rows(mixed, rows, valid, row_stride, (num_heads + head) * K, K)
    key_factor = tl.sum(key.to(tl.float32) * 0.0, 1) + 1.0
    if UNIT:
        key, key_factor = scaled_rows(key, 1.0, True)
    value = load_rows(mixed, rows, valid, row_stride, 2 * num_heads * K + head * V + first, VALUES)
    decays = tl.load(log_decay + rows * num_heads + head, mask=valid, other=0.0)
    betas = tl.load(beta + rows * num_heads + head, mask=valid, other=0.0)
    return query, query_factor, key, key_factor, value, decays, betas, rows, valid


@triton.jit
def store_gradients(mixed_gradient, shared_gradient, log_decay_gradient, beta_gradient, gradients, query, query_factor,
                    key, key_factor, rows, valid, head, num_rows, num_heads, shared_stride, block, first, scale,
                    K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """What `chunk_gradient` returned, taken through the scaling of query and key, to where it belongs.

    Gradients of query and key go to columns 0 and HK of `shared_gradient`, which is the packed gradient itself where
    there is one block of values, and else has an axis of blocks first, as those of log decay and beta always have.
    """
    of_query, of_key, of_value, of_log_decay, of_beta, _, query_inner, key_inner = gradients
    of_query = scaled_rows_gradient(of_query, query, query_factor, query_inner, scale, UNIT)
    if UNIT:
        of_key = scaled_rows_gradient(of_key, key, key_factor, key_inner, 1.0, True)
    own_rows = block.to(tl.int64) * num_rows + rows
    store_rows(shared_gradient, own_rows, valid, shared_stride, head * K, of_query, K)
    store_rows(shared_gradient, own_rows, valid, shared_stride, (num_heads + head) * K, of_key, K)
    value_column = 2 * num_heads * K + head * V + first
    store_rows(mixed_gradient, rows, valid, num_heads * (2 * K + V), value_column, of_value, VALUES)
    tl.store(log_decay_gradient + own_rows * num_heads + head, of_log_decay, mask=valid)
    tl.store(beta_gradient + own_rows * num_heads + head, of_beta, mask=valid)


@triton.jit
def walk_forward_kernel(mixed, log_decay, beta, initial, output, last, states, inverses, length, num_heads, scale,
                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                        UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values. `initial`, `last`, `states` and `inverses` may be None.

    `states` (X, N, K, V), the state before every chunk, and `inverses` (X, N, C, C) are what the gradient needs.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    sequence, head, first = program // num_heads, program % num_heads, block * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state = tl.zeros((K, VALUES), tl.float32)
    if initial is not None:
        state = tl.load(matrix(initial + whole, V, first, K, VALUES))
    for n in range(num_chunks):
        query, _, key, _, value, decays, betas, rows, valid = load_chunk(
            mixed, log_decay, beta, sequence, head, n * C, length, num_heads, first, scale, C, K, V, VALUES, UNIT
        )
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        inverse = chunk_inverse(key, cumulative, betas, C, PRECISION).to(key.dtype)
        before = state.to(key.dtype)
        if states is not None:
            chunk = program.to(tl.int64) * num_chunks + n
            tl.store(matrix(states + chunk * K * V, V, first, K, VALUES), before)
            if block == 0:
                tl.store(matrix(inverses + chunk * C * C, C, 0, C, C), inverse)
        error = chunk_error(key, value, cumulative, before, PRECISION)
        change = chunk_change(inverse, betas, error, PRECISION)
        read = chunk_read(query, key, cumulative, change, before, C, PRECISION)
        store_rows(output, rows, valid, num_heads * V, head * V + first, read, VALUES)
        state = next_state(key, cumulative, total, change, state, PRECISION)
    if last is not None:
        tl.store(matrix(last + whole, V, first, K, VALUES), state)


@triton.jit
def walk_backward_kernel(mixed, log_decay, beta, states, inverses, gradient, last_gradient, mixed_gradient,
                         shared_gradient, log_decay_gradient, beta_gradient, initial_gradient,
                         length, num_rows, num_heads, shared_stride, scale,
                         C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                         UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid as the forward kernel's; walks from the last chunk to the first with the gradient of the state in registers.

    `gradient` is that of the output; `last_gradient` and `initial_gradient` (of the states at both ends) may be None.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    sequence, head, first = program // num_heads, program % num_heads, block * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state_gradient = tl.zeros((K, VALUES), tl.float32)
    if last_gradient is not None:
        state_gradient = tl.load(matrix(last_gradient + whole, V, first, K, VALUES))
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        query, query_factor, key, key_factor, value, decays, betas, rows, valid = load_chunk(
            mixed, log_decay, beta, sequence, head, n * C, length, num_heads, first, scale, C, K, V, VALUES, UNIT
        )
        of_output = load_rows(gradient, rows, valid, num_heads * V, head * V + first, VALUES)
        chunk = program.to(tl.int64) * num_chunks + n
        inverse = tl.load(matrix(inverses + chunk * C * C, C, 0, C, C))
        state = tl.load(matrix(states + chunk * K * V, V, first, K, VALUES))
        gradients = chunk_gradient(
            query, key, value, decays, betas, inverse, state, of_output, state_gradient, C, PRECISION
        )
        store_gradients(
            mixed_gradient, shared_gradient, log_decay_gradient, beta_gradient, gradients, query, query_factor,
            key, key_factor, rows, valid, head, num_rows, num_heads, shared_stride, block, first, scale,
            K, V, VALUES, UNIT,
        )  # fmt: skip
        state_gradient = gradients[5]
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient + whole, V, first, K, VALUES), state_gradient)
