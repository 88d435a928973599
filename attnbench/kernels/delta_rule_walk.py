"""The gated delta rule's state carried by one program a head, which walks the chunks with it in registers: the form for
many heads and few chunks. What a chunk's positions do to each other is there before (`pairs_kernel`), in either
direction.

All is transposed here: rows are channels of the values, columns those of the keys, or positions. Hopper's instructions
for a group of four warps multiply 64 rows at once, of a left operand that they can take from registers, where the state
is; and where positions are columns, chunks may be short.
"""

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import LENGTHS, load_rows, matrix, store_rows
from attnbench.kernels.delta_rule_tiles import load_factors, load_key, load_pairs, load_query, load_value
from attnbench.kernels.products import product


@triton.jit(do_not_specialize=LENGTHS)
def walk_forward_kernel(mixed, pairs, factors, initial, output, last, states, corrections, length,
                        num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                        VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values. `initial` and `last` may be None, and so may what the gradient needs,
    `states` (S, transposed) and `corrections` (F) of every chunk.
    """
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state = tl.zeros((VALUES, K), tl.float32)
    if initial is not None:
        state = tl.trans(tl.load(matrix(initial + whole, V, first, K, VALUES)))
    for n in range(num_chunks):
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        key = load_key(mixed, sequence, head, start, length, num_heads, C, K, V)
        query = load_query(mixed, sequence, head, start, length, num_heads, C, K, V)
        value = load_value(mixed, sequence, head, start, length, first, num_heads, C, K, V, VALUES)
        between, weight = load_pairs(pairs, chunk, C)
        asking, reading, leaving, betas, keeping = load_factors(factors, chunk, C)
        before = state.to(key.dtype)
        if states is not None:
            tl.store(matrix(states + chunk * K * V + first * K, K, 0, VALUES, K), before)
        correction = tl.trans(value).to(tl.float32) - product(before, tl.trans(key), PRECISION) * reading[None, :]
        read = product(before, tl.trans(query), PRECISION) * asking[None, :]
        correction -= product((correction * betas[None, :]).to(key.dtype), tl.trans(between), PRECISION)
        if corrections is not None:
            tl.store(matrix(corrections + chunk * C * V, V, first, C, VALUES), tl.trans(correction.to(key.dtype)))
        change = correction * betas[None, :]
        read = product(change.to(key.dtype), tl.trans(weight), PRECISION, read)
        own_rows = output + head * V + first
        store_rows(tl.trans(read.to(key.dtype)), own_rows, sequence, start, length, num_heads * V, C, VALUES)
        state = product((change * leaving[None, :]).to(key.dtype), key, PRECISION, state * keeping)
    if last is not None:
        tl.store(matrix(last + whole, V, first, K, VALUES), tl.trans(state))


@triton.jit(do_not_specialize=LENGTHS)
def walk_backward_kernel(mixed, pairs, factors, gradient, last_gradient, initial_gradient, state_gradients,
                         correction_gradients, length,
                         num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                         VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """From the last chunk to the first: of each the gradient of S' (`state_gradients`, transposed) and H
    (`correction_gradients`).

    Grid as the forward kernel's. `gradient` is the output's; those of the states at both ends may be None.
    """
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K * V
    state_gradient = tl.zeros((VALUES, K), tl.float32)
    if last_gradient is not None:
        state_gradient = tl.trans(tl.load(matrix(last_gradient + whole, V, first, K, VALUES)))
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        key = load_key(mixed, sequence, head, start, length, num_heads, C, K, V)
        query = load_query(mixed, sequence, head, start, length, num_heads, C, K, V)
        own_rows = gradient + head * V + first
        of_output = tl.trans(load_rows(own_rows, sequence, start, length, num_heads * V, C, VALUES))
        between, weight = load_pairs(pairs, chunk, C)
        asking, reading, leaving, betas, keeping = load_factors(factors, chunk, C)
        after = state_gradient.to(key.dtype)
        tl.store(matrix(state_gradients + chunk * K * V + first * K, K, 0, VALUES, K), after)
        change_gradient = product(after, tl.trans(key), PRECISION) * leaving[None, :]
        change_gradient = product(of_output, weight, PRECISION, change_gradient)
        of_correction = change_gradient
        of_correction -= product((change_gradient * betas[None, :]).to(key.dtype), between, PRECISION)
        own_place = matrix(correction_gradients + chunk * C * V, V, first, C, VALUES)
        tl.store(own_place, tl.trans(of_correction.to(key.dtype)))
        of_read = (of_output.to(tl.float32) * asking[None, :]).to(key.dtype)
        state_gradient = product(of_read, query, PRECISION, state_gradient * keeping)
        of_error = (of_correction * (betas * -reading)[None, :]).to(key.dtype)
        state_gradient = product(of_error, key, PRECISION, state_gradient)
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient + whole, V, first, K, VALUES), tl.trans(state_gradient))
