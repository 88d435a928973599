"""The gated delta rule's state carried by one program a head, which walks the chunks with it in registers: the form for
many heads and few chunks. R of every chunk (`resolvents`) is there before, in either direction."""

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    LENGTHS,
    chunk_correction,
    chunk_read,
    correction_gradient,
    gradient_before,
    load_rows,
    matrix,
    next_state,
    read_change_gradient,
    state_change_gradient,
    store_rows,
)
from attnbench.kernels.delta_rule_tiles import load_key, load_query, load_value


@triton.jit(do_not_specialize=LENGTHS)
def walk_forward_kernel(mixed, log_decay, beta, resolvents, initial, output, last, states, corrections,
                        length, num_heads, scale,
                        C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                        UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values. `initial` and `last` may be None, and so may what the gradient needs,
    `states` (S) and `corrections` (F) of every chunk.
    """
    program, block = tl.program_id(0), tl.program_id(1)
    sequence, head, first = program // num_heads, program % num_heads, block * VALUES
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state = tl.zeros((K, VALUES), tl.float32)
    if initial is not None:
        state = tl.load(matrix(initial + whole, V, first, K, VALUES))
    for n in range(num_chunks):
        key, _, decays, betas, rows, valid = load_key(
            mixed, log_decay, beta, sequence, head, n * C, length, num_heads, C, K, V, UNIT
        )
        query, _ = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
        value = load_value(mixed, rows, valid, head, num_heads, first, K, V, VALUES)
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        chunk = program.to(tl.int64) * num_chunks + n
        between = tl.load(matrix(resolvents + chunk * C * C, C, 0, C, C))
        before = state.to(key.dtype)
        if states is not None:
            tl.store(matrix(states + chunk * K * V, V, first, K, VALUES), before)
        correction = chunk_correction(key, value, cumulative, betas, between, before, PRECISION)
        if corrections is not None:
            tl.store(matrix(corrections + chunk * C * V, V, first, C, VALUES), correction.to(key.dtype))
        change = (correction * betas[:, None]).to(key.dtype)
        read = chunk_read(query, key, cumulative, change, before, C, PRECISION)
        store_rows(output, rows, valid, num_heads * V, head * V + first, read, VALUES)
        state = next_state(key, cumulative, total, change, state, PRECISION)
    if last is not None:
        tl.store(matrix(last + whole, V, first, K, VALUES), state)


@triton.jit(do_not_specialize=LENGTHS)
def walk_backward_kernel(mixed, log_decay, beta, resolvents, gradient, last_gradient, initial_gradient, state_gradients,
                         correction_gradients, length, num_heads, scale,
                         C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                         UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """From the last chunk to the first: of each the gradient of S' (`state_gradients`) and H (`correction_gradients`).

    Grid as the forward kernel's. `gradient` is the output's; those of the states at both ends may be None.
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
        key, _, decays, betas, rows, valid = load_key(
            mixed, log_decay, beta, sequence, head, n * C, length, num_heads, C, K, V, UNIT
        )
        query, _ = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
        of_output = load_rows(gradient, rows, valid, num_heads * V, head * V + first, VALUES)
        chunk = program.to(tl.int64) * num_chunks + n
        between = tl.load(matrix(resolvents + chunk * C * C, C, 0, C, C))
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        after = state_gradient.to(key.dtype)
        tl.store(matrix(state_gradients + chunk * K * V, V, first, K, VALUES), after)
        change_gradient = read_change_gradient(query, key, cumulative, of_output, C, PRECISION)
        change_gradient += state_change_gradient(key, cumulative, total, after, PRECISION)
        of_correction = correction_gradient(between, betas, change_gradient, PRECISION)
        tl.store(matrix(correction_gradients + chunk * C * V, V, first, C, VALUES), of_correction.to(key.dtype))
        of_value = (of_correction * betas[:, None]).to(key.dtype)
        state_gradient = gradient_before(query, key, cumulative, total, of_output, of_value, state_gradient, PRECISION)
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient + whole, V, first, K, VALUES), state_gradient)
