"""The recurrence of diagonal_chunk.py with one program per head that walks the chunks with the state in registers,
transposed as in delta_walk.py. `chunk_kernel` runs before. Grids are sequences × heads, and blocks of values."""

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import LENGTHS, load_rows, matrix, store_rows
from attnbench.ops.diagonal.triton.diagonal_chunk import load_strength


@triton.jit(do_not_specialize=LENGTHS)
def walk_forward_kernel(asking, reading, leaving, totals, pairs, value, beta, initial, output, last, states,
                        corrections, length, num_heads: tl.constexpr, VALUE_ROW: tl.constexpr, C: tl.constexpr,
                        K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, ERASES: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """`initial`, `last`, and for the gradient `states` (S, transposed) and `corrections` (F, if something is erased)
    may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks, count = tl.cdiv(length, C), 2 if ERASES else 1
    whole = program.to(tl.int64) * K
    state = tl.zeros((VALUES, K), tl.float32)
    if initial is not None:
        state = tl.trans(tl.load(matrix(initial, whole, V, first, K, VALUES)))
    for n in range(num_chunks):
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        asked = tl.load(matrix(asking, chunk * C, K, 0, C, K))
        left = tl.load(matrix(leaving, chunk * C, K, 0, C, K))
        weight = tl.load(matrix(pairs, chunk * count * C, C, 0, C, C))
        change = tl.trans(load_rows(value + head * V + first, sequence, start, length, VALUE_ROW, C, VALUES))
        before = state.to(asked.dtype)
        if states is not None:
            tl.store(matrix(states, chunk * V + first, K, 0, VALUES, K), before)
        if ERASES:
            erased = tl.load(matrix(reading, chunk * C, K, 0, C, K))
            between = tl.load(matrix(pairs, (chunk * 2 + 1) * C, C, 0, C, C))
            strength = load_strength(beta, sequence, head, start, length, num_heads, C)
            written = change.to(tl.float32)
            correction = product((written * strength[None, :]).to(asked.dtype), tl.trans(between), PRECISION)
            correction = written - product(before, tl.trans(erased), PRECISION, correction)
            if corrections is not None:
                tl.store(matrix(corrections, chunk * C, V, first, C, VALUES), tl.trans(correction.to(asked.dtype)))
            change = (correction * strength[None, :]).to(asked.dtype)
        read = product(before, tl.trans(asked), PRECISION)
        read = product(change, tl.trans(weight), PRECISION, read)
        own_rows = output + head * V + first
        store_rows(tl.trans(read.to(asked.dtype)), own_rows, sequence, start, length, num_heads * V, C, VALUES)
        total = tl.load(totals + chunk * K + tl.arange(0, K))
        state = product(change, left, PRECISION, state * total[None, :])
    if last is not None:
        tl.store(matrix(last, whole, V, first, K, VALUES), tl.trans(state))


@triton.jit(do_not_specialize=LENGTHS)
def walk_backward_kernel(asking, reading, leaving, totals, pairs, beta, gradient, last_gradient, initial_gradient,
                         state_gradients, change_gradients, length, num_heads: tl.constexpr, C: tl.constexpr,
                         K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, ERASES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Write the gradients of S' (`state_gradients`, transposed) and of b F (`change_gradients`; rows of all positions
    if F is V) of each chunk. Gradients of the states at both ends may be None."""
    program, first = tl.program_id(0), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    num_chunks, count = tl.cdiv(length, C), 2 if ERASES else 1
    whole = program.to(tl.int64) * K
    of_state = tl.zeros((VALUES, K), tl.float32)
    if last_gradient is not None:
        of_state = tl.trans(tl.load(matrix(last_gradient, whole, V, first, K, VALUES)))
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        start, chunk = n * C, program.to(tl.int64) * num_chunks + n
        asked = tl.load(matrix(asking, chunk * C, K, 0, C, K))
        left = tl.load(matrix(leaving, chunk * C, K, 0, C, K))
        weight = tl.load(matrix(pairs, chunk * count * C, C, 0, C, C))
        of_output = tl.trans(load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES))
        after = of_state.to(asked.dtype)
        tl.store(matrix(state_gradients, chunk * V + first, K, 0, VALUES, K), after)
        of_change = product(of_output, weight, PRECISION)
        of_change = product(after, tl.trans(left), PRECISION, of_change)
        total = tl.load(totals + chunk * K + tl.arange(0, K))
        of_state = product(of_output, asked, PRECISION, of_state * total[None, :])
        rounded = tl.trans(of_change.to(asked.dtype))
        if ERASES:
            tl.store(matrix(change_gradients, chunk * C, V, first, C, VALUES), rounded)
            erased = tl.load(matrix(reading, chunk * C, K, 0, C, K))
            strength = load_strength(beta, sequence, head, start, length, num_heads, C)
            of_state = product((of_change * -strength[None, :]).to(asked.dtype), erased, PRECISION, of_state)
        else:
            own_rows = change_gradients + head * V + first
            store_rows(rounded, own_rows, sequence, start, length, num_heads * V, C, VALUES)
    if initial_gradient is not None:
        tl.store(matrix(initial_gradient, whole, V, first, K, VALUES), tl.trans(of_state))
