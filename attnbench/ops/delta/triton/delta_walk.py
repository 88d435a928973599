"""The gated delta rule with one program per head that walks the chunks with the state in registers, after
`pairs_kernel`: the form for many heads and few chunks. Grids are sequences × heads, and blocks of values.

All tiles are transposed: rows are value channels, columns key channels or positions. Hopper's four-warp instructions
multiply 64 rows of a left operand from registers, where the state is, and chunks may be short. With more than 128 key
channels the state is two halves, `left` and `right`: registers hold only one of them as operand.
"""

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import LENGTHS, load_rows, matrix, store_rows
from attnbench.ops.delta.triton.delta_tiles import (
    ASKING,
    BETA,
    LEAVING,
    READING,
    load_factor,
    load_pairs,
    load_total,
    load_value,
)


@triton.jit(do_not_specialize=LENGTHS)
def walk_forward_kernel(mixed, pairs, factors, initial, output, last, states, corrections, length,
                        num_heads: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                        V: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`initial`, `last`, and for the gradient `states` (S, transposed) and `corrections` (F) may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks = tl.cdiv(length, C)
    LEFT: tl.constexpr = K if K <= 128 else K // 2
    STRIDE: tl.constexpr = 2 * GROUPS * K + num_heads * V
    group = head // (num_heads // GROUPS)
    queries, keys = mixed + group * K, mixed + (GROUPS + group) * K
    whole = program.to(tl.int64) * K
    left = tl.zeros((VALUES, LEFT), tl.float32)
    if initial is not None:
        left = tl.trans(tl.load(matrix(initial, whole, V, first, LEFT, VALUES)))
    if LEFT < K:
        right = tl.zeros((VALUES, LEFT), tl.float32)
        if initial is not None:
            right = tl.trans(tl.load(matrix(initial, whole + LEFT, V, first, LEFT, VALUES)))
    for n in range(num_chunks):
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        key = load_rows(keys, sequence, start, length, STRIDE, C, LEFT)
        query = load_rows(queries, sequence, start, length, STRIDE, C, LEFT)
        value = load_value(mixed, sequence, head, start, length, first, num_heads, GROUPS, C, K, V, VALUES)
        between, weight = load_pairs(pairs, chunk, C)
        before = left.to(key.dtype)
        if states is not None:
            tl.store(matrix(states, chunk * V + first, K, 0, VALUES, LEFT), before)
        read = product(before, tl.trans(query), PRECISION)
        correction = product(before, tl.trans(key), PRECISION)
        if LEFT < K:
            right_key = load_rows(keys + LEFT, sequence, start, length, STRIDE, C, LEFT)
            right_query = load_rows(queries + LEFT, sequence, start, length, STRIDE, C, LEFT)
            before = right.to(key.dtype)
            if states is not None:
                tl.store(matrix(states, chunk * V + first, K, LEFT, VALUES, LEFT), before)
            read = product(before, tl.trans(right_query), PRECISION, read)
            correction = product(before, tl.trans(right_key), PRECISION, correction)
        read *= load_factor(factors, chunk, ASKING, C)[None, :]
        correction *= load_factor(factors, chunk, READING, C)[None, :]
        correction = tl.trans(value).to(tl.float32) - correction
        betas = load_factor(factors, chunk, BETA, C)
        correction -= product((correction * betas[None, :]).to(key.dtype), tl.trans(between), PRECISION)
        if corrections is not None:
            tl.store(matrix(corrections, chunk * C, V, first, C, VALUES), tl.trans(correction.to(key.dtype)))
        change = correction * betas[None, :]
        read = product(change.to(key.dtype), tl.trans(weight), PRECISION, read)
        own_rows = output + head * V + first
        store_rows(tl.trans(read.to(key.dtype)), own_rows, sequence, start, length, num_heads * V, C, VALUES)
        change *= load_factor(factors, chunk, LEAVING, C)[None, :]
        change, total = change.to(key.dtype), load_total(factors, chunk, C)
        left = product(change, key, PRECISION, left * total)
        if LEFT < K:
            right = product(change, right_key, PRECISION, right * total)
    if last is not None:
        tl.store(matrix(last, whole, V, first, LEFT, VALUES), tl.trans(left))
        if LEFT < K:
            tl.store(matrix(last, whole + LEFT, V, first, LEFT, VALUES), tl.trans(right))


@triton.jit(do_not_specialize=LENGTHS)
def walk_backward_kernel(mixed, pairs, factors, gradient, last_gradient, initial_gradient, state_gradients,
                         correction_gradients, length,
                         num_heads: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                         V: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradient of S' (`state_gradients`, transposed) and H (`correction_gradients`) of each chunk. Gradients
    of the states at both ends may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks = tl.cdiv(length, C)
    whole = program.to(tl.int64) * K
    LEFT: tl.constexpr = K if K <= 128 else K // 2
    STRIDE: tl.constexpr = 2 * GROUPS * K + num_heads * V
    group = head // (num_heads // GROUPS)
    queries, keys = mixed + group * K, mixed + (GROUPS + group) * K
    left = tl.zeros((VALUES, LEFT), tl.float32)
    if last_gradient is not None:
        left = tl.trans(tl.load(matrix(last_gradient, whole, V, first, LEFT, VALUES)))
    if LEFT < K:
        right = tl.zeros((VALUES, LEFT), tl.float32)
        if last_gradient is not None:
            right = tl.trans(tl.load(matrix(last_gradient, whole + LEFT, V, first, LEFT, VALUES)))
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        key = load_rows(keys, sequence, start, length, STRIDE, C, LEFT)
        query = load_rows(queries, sequence, start, length, STRIDE, C, LEFT)
        own_rows = gradient + head * V + first
        of_output = tl.trans(load_rows(own_rows, sequence, start, length, num_heads * V, C, VALUES))
        between, weight = load_pairs(pairs, chunk, C)
        after = left.to(key.dtype)
        tl.store(matrix(state_gradients, chunk * V + first, K, 0, VALUES, LEFT), after)
        change_gradient = product(after, tl.trans(key), PRECISION)
        if LEFT < K:
            right_key = load_rows(keys + LEFT, sequence, start, length, STRIDE, C, LEFT)
            right_query = load_rows(queries + LEFT, sequence, start, length, STRIDE, C, LEFT)
            after = right.to(key.dtype)
            tl.store(matrix(state_gradients, chunk * V + first, K, LEFT, VALUES, LEFT), after)
            change_gradient = product(after, tl.trans(right_key), PRECISION, change_gradient)
        change_gradient *= load_factor(factors, chunk, LEAVING, C)[None, :]
        change_gradient = product(of_output, weight, PRECISION, change_gradient)
        betas = load_factor(factors, chunk, BETA, C)
        of_correction = change_gradient
        of_correction -= product((change_gradient * betas[None, :]).to(key.dtype), between, PRECISION)
        own_place = matrix(correction_gradients, chunk * C, V, first, C, VALUES)
        tl.store(own_place, tl.trans(of_correction.to(key.dtype)))
        of_read = (of_output.to(tl.float32) * load_factor(factors, chunk, ASKING, C)[None, :]).to(key.dtype)
        total = load_total(factors, chunk, C)
        left = product(of_read, query, PRECISION, left * total)
        if LEFT < K:
            right = product(of_read, right_query, PRECISION, right * total)
        of_error = (of_correction * (betas * -load_factor(factors, chunk, READING, C))[None, :]).to(key.dtype)
        left = product(of_error, key, PRECISION, left)
        if LEFT < K:
            right = product(of_error, right_key, PRECISION, right)
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient, whole, V, first, LEFT, VALUES), tl.trans(left))
        if LEFT < K:
            tl.store(matrix(initial_gradient, whole + LEFT, V, first, LEFT, VALUES), tl.trans(right))
