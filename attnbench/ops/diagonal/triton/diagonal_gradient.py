"""All gradients of the recurrence of diagonal_chunk.py, for all chunks at once, given F, S and the gradients of b F and
S' of each."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import LENGTHS, correction_gradient, diagonal, load_rows, matrix, store_rows
from attnbench.ops.delta.triton.delta_tiles import chunk_place
from attnbench.ops.diagonal.triton.diagonal_chunk import (
    block_sums,
    first_level_of,
    load_strength,
    of_level,
    pair_factors,
    sums_since,
    sums_until,
)


@triton.jit(do_not_specialize=LENGTHS)
def pair_gradient_kernel(value, beta, pairs, corrections, gradient, change_gradients, value_gradient, beta_gradient,
                         pair_gradients, length, num_heads: tl.constexpr, VALUE_ROW: tl.constexpr, C: tl.constexpr,
                         V: tl.constexpr, VALUES: tl.constexpr, ERASES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradients of W and L, laid out as `pairs` (meaningless above the diagonal), and of v and b.

    If nothing is erased there are no L and b, and the values' gradient exists already. With H the gradient of F through
    (I - N b), that of V is b H, of b the row sum of F o H, of L -(b H) (b F)^T.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = gradient.dtype.element_ty
    row, count = index * C, 2 if ERASES else 1
    strength = load_strength(beta, sequence, head, start, length, num_heads, C)
    of_weight, of_lower = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        if ERASES:
            correction = tl.load(matrix(corrections, row, V, first, C, VALUES))
            of_change = tl.load(matrix(change_gradients, row, V, first, C, VALUES)).to(tl.float32)
            between = tl.load(matrix(pairs, (index * 2 + 1) * C, C, 0, C, C))
            of_correction = correction_gradient(between, strength, of_change, PRECISION)
            of_lower = product(of_correction.to(dtype), tl.trans(correction), PRECISION, of_lower)
            own_rows = value_gradient + head * V + first
            of_value = of_correction * strength[:, None]
            store_rows(of_value, own_rows, sequence, start, length, num_heads * V, C, VALUES)
            change = (correction.to(tl.float32) * strength[:, None]).to(dtype)
        else:
            change = load_rows(value + head * V + first, sequence, start, length, VALUE_ROW, C, VALUES)
        of_weight = product(of_output, tl.trans(change), PRECISION, of_weight)
    if ERASES and beta is not None:
        positions = start + tl.arange(0, C)
        entries = (sequence.to(tl.int64) * length + positions) * num_heads + head
        tl.store(beta_gradient + entries, diagonal(of_lower, C), mask=positions < length)
    tl.store(matrix(pair_gradients, row * count, C, 0, C, C), of_weight.to(dtype))
    if ERASES:
        of_lower *= -strength[:, None] * strength[None, :]
        tl.store(matrix(pair_gradients, row * count + C, C, 0, C, C), of_lower.to(dtype))


@triton.jit(do_not_specialize=LENGTHS)
def gradient_kernel(query, key, reader, value, beta, sums, states, corrections, gradient, state_gradients,
                    pair_gradients, value_gradient, query_gradient, key_gradient, reader_gradient, log_decay_gradient,
                    length, num_heads: tl.constexpr, QUERY_ROW: tl.constexpr, KEY_ROW: tl.constexpr,
                    VALUE_ROW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr,
                    VALUES: tl.constexpr, ERASES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradients of q, k, r and the log decay from those of v and of the pairs. The grid's second axis is
    blocks of KEYS key channels.

    A pair contributes to all log decays between its positions: at each level, contributions of late positions are added
    from the end on and of early ones subtracted, both from the same rounded products. Reads of S are summed from the
    end too, writes to S' from the start.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = query.dtype.element_ty
    LEVELS: tl.constexpr = 6 if C == 64 else 5
    first_key, count = tl.program_id(1) * KEYS, 2 if ERASES else 1
    row, stride, column = index * C, num_heads * K, head * K + first_key
    ERASED_ROW: tl.constexpr = KEY_ROW if reader is None else num_heads * K
    asked = load_rows(query + column, sequence, start, length, QUERY_ROW, C, KEYS)
    kept = load_rows(key + column, sequence, start, length, KEY_ROW, C, KEYS)
    positions = tl.arange(0, C)
    own = tl.load(pair_gradients + (row * count + positions) * C + positions).to(tl.float32)[:, None]
    of_query, of_key = own * kept.to(tl.float32), own * asked.to(tl.float32)
    of_reader, inside = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, KEYS), tl.float32)
    in_block, before, behind = block_sums(sums, row, first_key, C, K, KEYS)
    first_level = first_level_of(in_block, C)
    for level in range(first_level, LEVELS + 1):
        # Loaded again at each level, mostly only one: values held over a loop cost registers.
        later, earlier = pair_factors(sums, row, first_key, level, first_level, C, K, KEYS)
        kept = load_rows(key + column, sequence, start, length, KEY_ROW, C, KEYS)
        met = (kept.to(tl.float32) * earlier).to(dtype)
        asked = load_rows(query + column, sequence, start, length, QUERY_ROW, C, KEYS)
        meeting = (asked.to(tl.float32) * later).to(dtype)
        of_pairs = of_level(tl.load(matrix(pair_gradients, row * count, C, 0, C, C)), level, first_level, C).to(dtype)
        of_meeting = product(of_pairs, met, PRECISION)
        of_query += later * of_meeting
        inside += meeting.to(tl.float32) * of_meeting
        of_met = product(tl.trans(of_pairs), meeting, PRECISION)
        if ERASES:
            erased_rows = key if reader is None else reader
            erased = load_rows(erased_rows + column, sequence, start, length, ERASED_ROW, C, KEYS)
            meeting = (erased.to(tl.float32) * later).to(dtype)
            of_pairs = tl.load(matrix(pair_gradients, row * count + C, C, 0, C, C))
            of_pairs = of_level(of_pairs, level, first_level, C).to(dtype)
            of_meeting = product(of_pairs, met, PRECISION)
            inside += meeting.to(tl.float32) * of_meeting
            if reader is None:
                of_key += later * of_meeting
            else:
                of_reader += later * of_meeting
            of_met = product(tl.trans(of_pairs), meeting, PRECISION, of_met)
        of_key += earlier * of_met
        inside -= met.to(tl.float32) * of_met

    since = tl.exp(sums_since(tl.load(matrix(sums, row, K, first_key, C, KEYS)), before, C, KEYS))
    read = tl.zeros((C, KEYS), tl.float32)
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        state = tl.load(matrix(states, index * V + first, K, first_key, VALUES, KEYS))
        read = product(of_output, state, PRECISION, read)
    read *= since
    of_query += read
    asked = load_rows(query + column, sequence, start, length, QUERY_ROW, C, KEYS)
    inside += asked.to(tl.float32) * read
    store_rows(of_query, query_gradient + column, sequence, start, length, stride, C, KEYS)
    if ERASES:
        read = tl.zeros((C, KEYS), tl.float32)
        for first in range(0, V, VALUES):
            own_rows = value_gradient + head * V + first
            of_value = load_rows(own_rows, sequence, start, length, num_heads * V, C, VALUES)
            state = tl.load(matrix(states, index * V + first, K, first_key, VALUES, KEYS))
            read = product(of_value, state, PRECISION, read)
        read *= -since
        erased_rows = key if reader is None else reader
        erased = load_rows(erased_rows + column, sequence, start, length, ERASED_ROW, C, KEYS)
        inside += erased.to(tl.float32) * read
        if reader is None:
            of_key += read
        else:
            store_rows(of_reader + read, reader_gradient + column, sequence, start, length, stride, C, KEYS)
    strength = load_strength(beta, sequence, head, start, length, num_heads, C)
    written, of_total = tl.zeros((C, KEYS), tl.float32), tl.zeros((KEYS,), tl.float32)
    for first in range(0, V, VALUES):
        if ERASES:
            correction = tl.load(matrix(corrections, row, V, first, C, VALUES))
            change = (correction.to(tl.float32) * strength[:, None]).to(dtype)
        else:
            change = load_rows(value + head * V + first, sequence, start, length, VALUE_ROW, C, VALUES)
        state = tl.load(matrix(states, index * V + first, K, first_key, VALUES, KEYS))
        after = tl.load(matrix(state_gradients, index * V + first, K, first_key, VALUES, KEYS))
        written = product(change, after, PRECISION, written)
        of_total += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0)
    until = sums_until(tl.load(matrix(sums, row, K, first_key, C, KEYS)), in_block, behind, C, KEYS)
    written *= tl.exp(until)
    store_rows(of_key + written, key_gradient + column, sequence, start, length, stride, C, KEYS)
    kept = load_rows(key + column, sequence, start, length, KEY_ROW, C, KEYS)
    left = kept.to(tl.float32) * written
    of_total *= tl.exp(tl.sum(in_block, 0))
    of_log_decay = tl.cumsum(inside, 0, reverse=True) + (tl.cumsum(left, 0) - left + of_total[None, :])
    store_rows(of_log_decay, log_decay_gradient + column, sequence, start, length, stride, C, KEYS)
