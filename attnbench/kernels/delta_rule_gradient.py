"""All gradients of the gated delta rule, of all chunks at once, when F, H, S and the gradient of S' are known of each:
one kernel for narrow keys and one for wide.
"""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    LENGTHS,
    below_diagonal,
    correction_gradient,
    diagonal,
    load_rows,
    log_decay_gradients,
    matrix,
    on_diagonal,
    pair_decay,
    scaled_rows_gradient,
    store_rows,
)
from attnbench.kernels.delta_rule_tiles import FACTORS, chunk_place, load_factor, load_factors, load_key, load_query
from attnbench.kernels.products import product, tall_product

NARROW_KEYS = 64
"""Channels of a key up to which three sums of as many channels a position fit into a program's registers. Beyond that
fewer sums and more products are faster, below it slower (64 × 64, an H200: 0.22 ms for 0.10)."""


@triton.jit
def load_correction_gradient(correction_gradients, pairs, betas, index, first,
                             C: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, CORRECTED: tl.constexpr,
                             PRECISION: tl.constexpr):  # fmt: skip
    """H of a block of values; of E, unless CORRECTED."""
    result = tl.load(matrix(correction_gradients + index * C * V, V, first, C, VALUES))
    if not CORRECTED:
        between = tl.load(matrix(pairs + index * 2 * C * C, C, 0, C, C))
        result = correction_gradient(between, betas, result.to(tl.float32), PRECISION).to(result.dtype)
    return result


@triton.jit(do_not_specialize=LENGTHS)
def gradient_kernel(mixed, log_decay, pairs, factors, states, corrections, gradient, state_gradients,
                    correction_gradients, mixed_gradient, log_decay_gradient, beta_gradient, length, scale,
                    num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, CORRECTED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of every chunk, over the blocks of values. Grid: chunks of all sequences × heads.

    Of every chunk there are S (`states`) and the gradient of S' (`state_gradients`), both transposed, F (`corrections`)
    and H or, unless CORRECTED, E (`correction_gradients`). `gradient` is the output's.

    The gradient of a log decay takes row sums of Q and K times parts of their gradients. A part of which a row sum is
    taken is no product's `sum` afterwards: that accumulates in the same registers, and ptxas (12.8 to 13.0) can take
    the same row sum before and after for one value. What the diagonal of the pairs gives is a product too: row by row
    it spills registers.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, C, K, V)
    dtype: tl.constexpr = key.dtype
    stride: tl.constexpr = num_heads * (2 * K + V)
    _, reading, leaving, betas, keeping = load_factors(factors, index, C)
    of_weight, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_query, of_key = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    of_written, of_state = tl.zeros((C, K), tl.float32), 0.0
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES))
        of_correction = load_correction_gradient(
            correction_gradients, pairs, betas, index, first, C, V, VALUES, CORRECTED, PRECISION
        )
        of_weight = product(of_output, tl.trans(correction), PRECISION, of_weight)
        of_pairs = product(of_correction, tl.trans(correction), PRECISION, of_pairs)
        of_value = of_correction.to(tl.float32) * betas[:, None]
        value_column = 2 * num_heads * K + head * V + first
        store_rows(of_value, mixed_gradient + value_column, sequence, start, length, stride, C, VALUES)
        state = tl.load(matrix(states + index * K * V + first * K, K, 0, VALUES, K))
        of_query = product(of_output, state, PRECISION, of_query)
        of_key = product((-of_value * reading[:, None]).to(dtype), state, PRECISION, of_key)
        after = tl.load(matrix(state_gradients + index * K * V + first * K, K, 0, VALUES, K))
        written = correction.to(tl.float32) * (betas * leaving)[:, None]
        of_written = product(written.to(dtype), after, PRECISION, of_written)
        of_state += tl.sum(tl.sum(state.to(tl.float32) * after.to(tl.float32), 1), 0)
    positions = tl.arange(0, C)
    places, valid = (sequence.to(tl.int64) * length + start + positions) * num_heads + head, start + positions < length
    tl.store(beta_gradient + places, diagonal(of_pairs, C), mask=valid)

    row = factors + index * FACTORS * C
    query_factor, key_factor, asking = load_factor(row, 0, C), load_factor(row, 1, C), load_factor(row, 2, C)
    cumulative = tl.cumsum(tl.load(log_decay + places, mask=valid, other=0.0), 0)
    decay = pair_decay(cumulative, C) * key_factor[None, :]
    of_weight *= decay * query_factor[:, None] * betas[None, :]
    of_own, of_weight = on_diagonal(of_weight, C).to(dtype), below_diagonal(of_weight, C).to(dtype)
    of_pairs = below_diagonal(of_pairs * decay * (-betas * key_factor)[:, None] * betas[None, :], C).to(dtype)

    query = load_query(mixed, sequence, head, start, length, num_heads, C, K, V)
    wide = query.to(tl.float32)
    own = product(of_own, key, PRECISION)
    own_inner = tl.sum(wide * own, 1)
    of_query = product(of_weight, key, PRECISION, of_query * asking[:, None])
    query_inner = tl.sum(wide * of_query, 1)
    of_query = scaled_rows_gradient(of_query + own, query, query_factor, query_inner + own_inner, scale, UNIT)
    store_rows(of_query, mixed_gradient + head * K, sequence, start, length, stride, C, K)

    wide = key.to(tl.float32)
    of_key = product(of_pairs, key, PRECISION, of_key)
    reading_inner, leaving_inner = tl.sum(wide * of_key, 1), tl.sum(wide * of_written, 1)
    of_written += of_key
    of_key = product(tl.trans(of_weight), query, PRECISION)
    of_key = product(tl.trans(of_pairs), key, PRECISION, of_key)
    key_inner = reading_inner + tl.sum(wide * of_key, 1)
    of_key = product(of_own, query, PRECISION, of_key + of_written)
    of_key = scaled_rows_gradient(of_key, key, key_factor, key_inner + leaving_inner + own_inner, 1.0, UNIT)
    store_rows(of_key, mixed_gradient + (num_heads + head) * K, sequence, start, length, stride, C, K)
    of_log_decay = log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_state * keeping)
    tl.store(log_decay_gradient + places, of_log_decay, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def wide_gradient_kernel(mixed, log_decay, pairs, factors, states, corrections, gradient, state_gradients,
                    correction_gradients, mixed_gradient, log_decay_gradient, beta_gradient, length, scale,
                    num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, CORRECTED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`gradient_kernel` for more than NARROW_KEYS channels of the keys: row sums of the parts through S and S' are had
    as sums over values, and those through pairs as sums over pairs, so that each gradient is one sum, transposed.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, C, K, V)
    dtype: tl.constexpr = key.dtype
    stride: tl.constexpr = num_heads * (2 * K + V)
    _, reading, leaving, betas, keeping = load_factors(factors, index, C)
    of_weight, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_query, of_key = tl.zeros((K, C), tl.float32), tl.zeros((K, C), tl.float32)
    of_decay = tl.zeros((VALUES, VALUES), tl.float32)
    reading_inner, leaving_inner = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
        correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES))
        of_correction = load_correction_gradient(
            correction_gradients, pairs, betas, index, first, C, V, VALUES, CORRECTED, PRECISION
        )
        of_weight = product(of_output, tl.trans(correction), PRECISION, of_weight)
        of_pairs = product(of_correction, tl.trans(correction), PRECISION, of_pairs)
        of_value = of_correction.to(tl.float32) * betas[:, None]
        value_column = 2 * num_heads * K + head * V + first
        store_rows(of_value, mixed_gradient + value_column, sequence, start, length, stride, C, VALUES)
        state = tl.load(matrix(states + index * K * V + first * K, K, 0, VALUES, K))
        of_query = tall_product(tl.trans(state), tl.trans(of_output), PRECISION, of_query)
        of_read = -of_value * reading[:, None]
        reading_inner += tl.sum(of_read * product(key, tl.trans(state), PRECISION), 1)
        of_key = tall_product(tl.trans(state), tl.trans(of_read.to(dtype)), PRECISION, of_key)
        after = tl.load(matrix(state_gradients + index * K * V + first * K, K, 0, VALUES, K))
        written = correction.to(tl.float32) * (betas * leaving)[:, None]
        leaving_inner += tl.sum(written * product(key, tl.trans(after), PRECISION), 1)
        of_key = tall_product(tl.trans(after), tl.trans(written.to(dtype)), PRECISION, of_key)
        of_decay = product(state, tl.trans(after), PRECISION, of_decay)
    positions = tl.arange(0, C)
    places, valid = (sequence.to(tl.int64) * length + start + positions) * num_heads + head, start + positions < length
    tl.store(beta_gradient + places, diagonal(of_pairs, C), mask=valid)
    of_weight *= betas[None, :]
    of_pairs *= betas[:, None] * betas[None, :]

    row = factors + index * FACTORS * C
    query_factor, key_factor, asking = load_factor(row, 0, C), load_factor(row, 1, C), load_factor(row, 2, C)
    cumulative = tl.cumsum(tl.load(log_decay + places, mask=valid, other=0.0), 0)
    decay = pair_decay(cumulative, C) * key_factor[None, :]
    through_weight = of_weight * tl.load(matrix(pairs + (index * 2 + 1) * C * C, C, 0, C, C)).to(tl.float32)
    below, own = below_diagonal(through_weight, C), diagonal(through_weight, C)
    of_weight = (of_weight * decay * query_factor[:, None]).to(dtype)
    of_pairs = below_diagonal(-of_pairs * decay * key_factor[:, None], C)
    through_pairs = of_pairs * product(key, tl.trans(key), PRECISION)

    query = load_query(mixed, sequence, head, start, length, num_heads, C, K, V)
    query_inner = asking * tl.sum(tl.trans(query).to(tl.float32) * of_query, 0) + tl.sum(below, 1)
    of_query = tall_product(tl.trans(key), tl.trans(of_weight), PRECISION, of_query * asking[None, :])
    of_query = scaled_rows_gradient(tl.trans(of_query), query, query_factor, query_inner + own, scale, UNIT)
    store_rows(of_query, mixed_gradient + head * K, sequence, start, length, stride, C, K)

    of_key = tall_product(tl.trans(query), of_weight, PRECISION, of_key)
    of_key = tall_product(tl.trans(key), (of_pairs + tl.trans(of_pairs)).to(dtype), PRECISION, of_key)
    reading_inner += tl.sum(through_pairs, 1)
    key_inner = reading_inner + tl.sum(through_pairs, 0) + tl.sum(below, 0)
    key_whole = key_inner + leaving_inner + own
    of_key = scaled_rows_gradient(tl.trans(of_key), key, key_factor, key_whole, 1.0, UNIT)
    store_rows(of_key, mixed_gradient + (num_heads + head) * K, sequence, start, length, stride, C, K)
    of_state = tl.sum(diagonal(of_decay, VALUES), 0)
    of_log_decay = log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_state * keeping)
    tl.store(log_decay_gradient + places, of_log_decay, mask=valid)
