"""All gradients of the gated delta rule, for all chunks at once, given F, H, S and the gradient of S' of each."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product, tall_product
from attnbench.ops.delta.triton.delta_chunk import (
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
from attnbench.ops.delta.triton.delta_tiles import (
    ASKING,
    BETA,
    KEY,
    LEAVING,
    QUERY,
    READING,
    chunk_place,
    load_factor,
    load_key,
    load_query,
    load_total,
)

NARROW_KEYS = 64
"""Largest number of key channels with which three sums of (positions, channels) fit into a program's registers. Up to
it one pass is faster, beyond it two passes with fewer sums."""


@triton.jit
def gradients_of_values(
    pairs, corrections, gradient, correction_gradients, mixed_gradient, betas, of_weight, of_pairs,
    index, sequence, head, start, length, first, num_heads: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, CORRECTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For a block of values, load the output's gradient and F, store the values' gradient b H, and add to the gradients
    of Q K^T o G and R."""
    of_output = load_rows(gradient + head * V + first, sequence, start, length, num_heads * V, C, VALUES)
    correction = tl.load(matrix(corrections, index * C, V, first, C, VALUES))
    of_correction = tl.load(matrix(correction_gradients, index * C, V, first, C, VALUES))
    if not CORRECTED:
        between = tl.load(matrix(pairs, index * 2 * C, C, 0, C, C))
        change_gradient = of_correction.to(tl.float32)
        of_correction = correction_gradient(between, betas, change_gradient, PRECISION).to(correction.dtype)
    of_weight = product(of_output, tl.trans(correction), PRECISION, of_weight)
    of_pairs = product(of_correction, tl.trans(correction), PRECISION, of_pairs)
    of_value = of_correction.to(tl.float32) * betas[:, None]
    own_rows = mixed_gradient + 2 * GROUPS * K + head * V + first
    store_rows(of_value, own_rows, sequence, start, length, 2 * GROUPS * K + num_heads * V, C, VALUES)
    return of_output, correction, of_value, of_weight, of_pairs


@triton.jit
def store_of_head(values, mixed_gradient, heads_gradient, sequence, head, start, length, num_heads: tl.constexpr,
                  C: tl.constexpr, K: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Store the gradient of a head's query or key: in that of `mixed`, or if heads share them, in `heads_gradient` (B,
    T, 2, H, K), to be summed."""
    if heads_gradient is None:
        store_rows(values, mixed_gradient + head * K, sequence, start, length, num_heads * (2 * K + V), C, K)
    else:
        store_rows(values, heads_gradient + head * K, sequence, start, length, 2 * num_heads * K, C, K)


@triton.jit(do_not_specialize=LENGTHS)
def gradient_kernel(mixed, log_decay, pairs, factors, states, corrections, gradient, state_gradients,
                    correction_gradients, mixed_gradient, heads_gradient, log_decay_gradient, beta_gradient, length,
                    scale, num_heads: tl.constexpr, GROUPS: tl.constexpr,
                    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, CORRECTED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of every chunk, from S (`states`) and the gradient of S' (`state_gradients`), both transposed, F
    (`corrections`) and H or, unless CORRECTED, E (`correction_gradients`). Grid: chunks of all sequences × heads.

    A term whose row sum with Q or K is taken must not become a product's `sum` afterwards: that accumulates in the same
    registers, and ptxas (12.8 to 13.0) may confuse the row sums before and after. The diagonal's term is a product,
    because a row-wise form spills registers.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    dtype: tl.constexpr = key.dtype
    betas = load_factor(factors, index, BETA, C)
    reading, leaving = load_factor(factors, index, READING, C), load_factor(factors, index, LEAVING, C)
    of_weight, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_query, of_key = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
    of_written, of_state = tl.zeros((C, K), tl.float32), 0.0
    for first in range(0, V, VALUES):
        of_output, correction, of_value, of_weight, of_pairs = gradients_of_values(
            pairs, corrections, gradient, correction_gradients, mixed_gradient, betas, of_weight, of_pairs,
            index, sequence, head, start, length, first, num_heads, GROUPS, C, K, V, VALUES, CORRECTED, PRECISION
        )  # fmt: skip
        state = tl.load(matrix(states, index * V + first, K, 0, VALUES, K))
        of_query = product(of_output, state, PRECISION, of_query)
        of_key = product((-of_value * reading[:, None]).to(dtype), state, PRECISION, of_key)
        after = tl.load(matrix(state_gradients, index * V + first, K, 0, VALUES, K))
        written = correction.to(tl.float32) * (betas * leaving)[:, None]
        of_written = product(written.to(dtype), after, PRECISION, of_written)
        of_state += tl.sum(tl.sum(state.to(tl.float32) * after.to(tl.float32), 1), 0)
    positions = tl.arange(0, C)
    entries, valid = (sequence.to(tl.int64) * length + start + positions) * num_heads + head, start + positions < length
    tl.store(beta_gradient + entries, diagonal(of_pairs, C), mask=valid)

    query_factor, key_factor = load_factor(factors, index, QUERY, C), load_factor(factors, index, KEY, C)
    asking = load_factor(factors, index, ASKING, C)
    cumulative = tl.cumsum(tl.load(log_decay + entries, mask=valid, other=0.0), 0)
    decay = pair_decay(cumulative, C) * key_factor[None, :]
    of_weight *= decay * query_factor[:, None] * betas[None, :]
    of_own, of_weight = on_diagonal(of_weight, C).to(dtype), below_diagonal(of_weight, C).to(dtype)
    of_pairs = below_diagonal(of_pairs * decay * (-betas * key_factor)[:, None] * betas[None, :], C).to(dtype)

    query = load_query(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    wide = query.to(tl.float32)
    own = product(of_own, key, PRECISION)
    own_inner = tl.sum(wide * own, 1)
    of_query = product(of_weight, key, PRECISION, of_query * asking[:, None])
    query_inner = tl.sum(wide * of_query, 1)
    of_query = scaled_rows_gradient(of_query + own, query, query_factor, query_inner + own_inner, scale, UNIT)
    store_of_head(of_query, mixed_gradient, heads_gradient, sequence, head, start, length, num_heads, C, K, V)

    wide = key.to(tl.float32)
    of_key = product(of_pairs, key, PRECISION, of_key)
    reading_inner, leaving_inner = tl.sum(wide * of_key, 1), tl.sum(wide * of_written, 1)
    of_written += of_key
    of_key = product(tl.trans(of_weight), query, PRECISION)
    of_key = product(tl.trans(of_pairs), key, PRECISION, of_key)
    key_inner = reading_inner + tl.sum(wide * of_key, 1)
    of_key = product(of_own, query, PRECISION, of_key + of_written)
    of_key = scaled_rows_gradient(of_key, key, key_factor, key_inner + leaving_inner + own_inner, 1.0, UNIT)
    store_of_head(of_key, mixed_gradient, heads_gradient, sequence, num_heads + head, start, length, num_heads, C, K, V)
    of_total = of_state * load_total(factors, index, C)
    of_log_decay = log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_total)
    tl.store(log_decay_gradient + entries, of_log_decay, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def wide_gradient_kernel(mixed, log_decay, pairs, factors, states, corrections, gradient, state_gradients,
                    correction_gradients, mixed_gradient, heads_gradient, log_decay_gradient, beta_gradient, length,
                    scale, num_heads: tl.constexpr, GROUPS: tl.constexpr,
                    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, CORRECTED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`gradient_kernel` for more than NARROW_KEYS key channels, in two passes over the blocks of values: through S and
    the pairs, then through S'. At most two key-sized sums, transposed, exist at a time, and row sums are of whole sums.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    dtype: tl.constexpr = key.dtype
    betas = load_factor(factors, index, BETA, C)
    reading, leaving = load_factor(factors, index, READING, C), load_factor(factors, index, LEAVING, C)
    of_weight, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_query, of_reading = tl.zeros((K, C), tl.float32), tl.zeros((K, C), tl.float32)
    for first in range(0, V, VALUES):
        of_output, correction, of_value, of_weight, of_pairs = gradients_of_values(
            pairs, corrections, gradient, correction_gradients, mixed_gradient, betas, of_weight, of_pairs,
            index, sequence, head, start, length, first, num_heads, GROUPS, C, K, V, VALUES, CORRECTED, PRECISION
        )  # fmt: skip
        state = tl.load(matrix(states, index * V + first, K, 0, VALUES, K))
        of_query = tall_product(tl.trans(state), tl.trans(of_output), PRECISION, of_query)
        of_read = (-of_value * reading[:, None]).to(dtype)
        of_reading = tall_product(tl.trans(state), tl.trans(of_read), PRECISION, of_reading)
    positions = tl.arange(0, C)
    entries, valid = (sequence.to(tl.int64) * length + start + positions) * num_heads + head, start + positions < length
    tl.store(beta_gradient + entries, diagonal(of_pairs, C), mask=valid)
    of_weight *= betas[None, :]
    of_pairs *= betas[:, None] * betas[None, :]

    query_factor, key_factor = load_factor(factors, index, QUERY, C), load_factor(factors, index, KEY, C)
    asking = load_factor(factors, index, ASKING, C)
    cumulative = tl.cumsum(tl.load(log_decay + entries, mask=valid, other=0.0), 0)
    decay = pair_decay(cumulative, C) * key_factor[None, :]
    through_weight = of_weight * tl.load(matrix(pairs, (index * 2 + 1) * C, C, 0, C, C)).to(tl.float32)
    below, own = below_diagonal(through_weight, C), diagonal(through_weight, C)
    of_weight = (of_weight * decay * query_factor[:, None]).to(dtype)
    of_pairs = below_diagonal(-of_pairs * decay * key_factor[:, None], C)
    through_pairs = of_pairs * product(key, tl.trans(key), PRECISION)

    query = load_query(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    wide = tl.trans(query).to(tl.float32)
    of_query *= asking[None, :]
    query_inner = tl.sum(wide * of_query, 0) + tl.sum(below, 1)
    of_query = tall_product(tl.trans(key), tl.trans(of_weight), PRECISION, of_query)
    if UNIT:
        of_query -= wide * (query_factor * query_factor * (query_inner + own) / (scale * scale))[None, :]
    of_query = tl.trans(of_query.to(dtype))
    store_of_head(of_query, mixed_gradient, heads_gradient, sequence, head, start, length, num_heads, C, K, V)

    wide = tl.trans(key).to(tl.float32)
    reading_inner = tl.sum(wide * of_reading, 0) + tl.sum(through_pairs, 1)
    of_key = tall_product(tl.trans(query), of_weight, PRECISION, of_reading)
    of_key = tall_product(tl.trans(key), (of_pairs + tl.trans(of_pairs)).to(dtype), PRECISION, of_key)
    of_written, of_decay = tl.zeros((K, C), tl.float32), tl.zeros((VALUES, VALUES), tl.float32)
    for first in range(0, V, VALUES):
        correction = tl.load(matrix(corrections, index * C, V, first, C, VALUES))
        after = tl.load(matrix(state_gradients, index * V + first, K, 0, VALUES, K))
        written = (correction.to(tl.float32) * (betas * leaving)[:, None]).to(dtype)
        of_written = tall_product(tl.trans(after), tl.trans(written), PRECISION, of_written)
        state = tl.load(matrix(states, index * V + first, K, 0, VALUES, K))
        of_decay = product(state, tl.trans(after), PRECISION, of_decay)
    leaving_inner = tl.sum(wide * of_written, 0)
    key_inner = reading_inner + tl.sum(through_pairs, 0) + tl.sum(below, 0)
    of_key += of_written
    if UNIT:
        of_key -= wide * (key_factor * key_factor * (key_inner + leaving_inner + own))[None, :]
    of_key = tl.trans(of_key.to(dtype))
    store_of_head(of_key, mixed_gradient, heads_gradient, sequence, num_heads + head, start, length, num_heads, C, K, V)
    # Not the sum of row sums, which Triton (3.6, 3.7.1) cannot compile for Blackwell data-centre GPUs.
    of_total = tl.sum(on_diagonal(of_decay, VALUES)) * load_total(factors, index, C)
    of_log_decay = log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_total)
    tl.store(log_decay_gradient + entries, of_log_decay, mask=valid)
