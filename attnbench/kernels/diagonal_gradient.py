"""Gradients of the delta rule, or of the plain sum, with a decay a key channel, of all chunks at once, when F, S and the
gradients of b F and S' are known of each."""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    LENGTHS,
    correction_gradient,
    diagonal,
    load_rows,
    matrix,
    store_rows,
)
from attnbench.kernels.delta_rule_tiles import chunk_place
from attnbench.kernels.diagonal_chunk import below, level_factors, load_strength, of_level, whole_sums
from attnbench.kernels.products import product


@triton.jit(do_not_specialize=LENGTHS)
def gradient_kernel(query, key, reader, value, beta, sums, pairs, states, corrections, gradient, state_gradients,
                    change_gradients, query_gradient, key_gradient, reader_gradient, value_gradient,
                    log_decay_gradient, beta_gradient, length, num_heads: tl.constexpr, C: tl.constexpr,
                    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ERASES: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradients of q, k, r, the log decay, v and b, over the blocks of values. Grid: chunks of all
    sequences × heads, blocks of KEYS channels of the keys. What has no channels of keys is computed by all, and stored
    by the first.

    Where nothing is erased the values' gradient is there before, and stands here for nothing. With H the gradient of F
    through (I - N b), that of V is b H, of b the row sum of F o H, of L below the diagonal -(b H) (b F)^T.

    A pair gives the log decays between its positions what it gives the sum of them: what a level's late positions get
    is added from the end on, what the early ones get taken away, and both are the same products of the same rounded
    numbers. What positions read of S is added from the end on too, what they leave for S' from the start.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = query.dtype.element_ty
    first_key = tl.program_id(1) * KEYS
    row, stride, column = index * C, num_heads * K, head * K + first_key
    strength = load_strength(beta, sequence, head, start, length, num_heads, C)
    of_weight, of_lower = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_query, of_key = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, KEYS), tl.float32)
    of_reader, of_total = tl.zeros((C, KEYS), tl.float32), tl.zeros((KEYS,), tl.float32)
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        state = tl.load(matrix(states, index * V + first, K, first_key, VALUES, KEYS))
        after = tl.load(matrix(state_gradients, index * V + first, K, first_key, VALUES, KEYS))
        of_query = product(of_output, state, PRECISION, of_query)
        if ERASES:
            correction = tl.load(matrix(corrections, row, V, first, C, VALUES))
            of_change = tl.load(matrix(change_gradients, row, V, first, C, VALUES)).to(tl.float32)
            between = tl.load(matrix(pairs, (index * 2 + 1) * C, C, 0, C, C))
            of_correction = correction_gradient(between, strength, of_change, PRECISION)
            of_lower = product(of_correction.to(dtype), tl.trans(correction), PRECISION, of_lower)
            of_value = (of_correction * strength[:, None]).to(dtype)
            if first_key == 0:
                own_rows = value_gradient + head * V + first
                store_rows(of_value, own_rows, sequence, start, length, num_heads * V, C, VALUES)
            of_reader = product(of_value, state, PRECISION, of_reader)
            change = (correction.to(tl.float32) * strength[:, None]).to(dtype)
        else:
            change = load_rows(value + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        of_weight = product(of_output, tl.trans(change), PRECISION, of_weight)
        of_key = product(change, after, PRECISION, of_key)
        of_total += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0)
    if ERASES and beta is not None:
        positions = start + tl.arange(0, C)
        entries = (sequence.to(tl.int64) * length + positions) * num_heads + head
        is_own = (positions < length) & (first_key == 0)
        tl.store(beta_gradient + entries, diagonal(of_lower, C), mask=is_own)

    asked = load_rows(query + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
    kept = load_rows(key + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
    erased = kept
    if ERASES and reader is not None:
        erased = load_rows(reader + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
    within = tl.load(matrix(sums, row, K, first_key, C, KEYS))
    since, until, total = whole_sums(sums, within, row, first_key, C, K, KEYS)
    of_query *= tl.exp(since)
    of_key *= tl.exp(until)
    of_reader *= -tl.exp(since)
    # Of the log decays: what is added from the end on, and what from the start.
    inside = asked * of_query
    if ERASES:
        inside += erased * of_reader
    left = kept * of_key
    of_log_decay = tl.cumsum(left, 0) - left + (of_total * tl.exp(total))[None, :]
    if ERASES and reader is None:
        of_key += of_reader

    own = diagonal(of_weight, C)[:, None]
    of_query += own * kept
    of_key += own * asked
    of_weight = below(of_weight, C)
    of_weight = (of_weight + tl.trans(of_weight)).to(dtype)
    if ERASES:
        of_lower = below(of_lower * -strength[:, None] * strength[None, :], C)
        of_lower = (of_lower + tl.trans(of_lower)).to(dtype)
    for level in tl.static_range(0, 6 if C == 64 else 5):
        factor, is_late = level_factors(sums, within, row, first_key, C, K, KEYS, 1 << level)
        sign = tl.where(is_late, 1.0, -1.0)[:, None]
        met = (tl.where(is_late[:, None], asked, kept) * factor).to(dtype)
        of_met = product(of_level(of_weight, C, 1 << level).to(dtype), met, PRECISION)
        inside += sign * met.to(tl.float32) * of_met
        of_met *= factor
        of_query += tl.where(is_late[:, None], of_met, 0.0)
        of_key += tl.where(is_late[:, None], 0.0, of_met)
        if ERASES:
            met = (tl.where(is_late[:, None], erased, kept) * factor).to(dtype)
            of_met = product(of_level(of_lower, C, 1 << level).to(dtype), met, PRECISION)
            inside += sign * met.to(tl.float32) * of_met
            of_met *= factor
            if reader is None:
                of_key += of_met
            else:
                of_reader += tl.where(is_late[:, None], of_met, 0.0)
                of_key += tl.where(is_late[:, None], 0.0, of_met)
    of_log_decay += tl.cumsum(inside, 0, reverse=True)
    store_rows(of_query, query_gradient + column, sequence, start, length, stride, C, KEYS)
    store_rows(of_key, key_gradient + column, sequence, start, length, stride, C, KEYS)
    if ERASES and reader is not None:
        store_rows(of_reader, reader_gradient + column, sequence, start, length, stride, C, KEYS)
    store_rows(of_log_decay, log_decay_gradient + column, sequence, start, length, stride, C, KEYS)
