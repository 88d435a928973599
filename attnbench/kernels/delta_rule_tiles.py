"""Tiles of the gated delta rule between memory and the kernels: a chunk of a head in, its gradients out; and the two
kernels that do all chunks at once, whatever form carries the state from one to the next.

Values are cut into blocks of channels, which do not depend on each other but for the gradients that they share.
"""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import (
    LENGTHS,
    chunk_resolvent,
    correction_gradient,
    key_gradient,
    load_rows,
    log_decay_gradients,
    matrix,
    on_diagonal,
    pair_decay,
    query_gradient,
    scaled_rows,
    scaled_rows_gradient,
    store_rows,
)
from attnbench.kernels.products import product


@triton.jit
def chunk_rows(sequence, start, length, C: tl.constexpr):
    """Rows of a chunk, counted over the batch, and which of them exist."""
    positions = start + tl.arange(0, C)
    return sequence.to(tl.int64) * length + positions, positions < length


@triton.jit
def chunk_place(length, num_heads, C: tl.constexpr):
    """Where a program works that has a chunk to itself: its chunk counted over all heads of all sequences, which is its
    place on the first axis of the grid (the others end at 65,535), sequence, head and first position."""
    index = tl.program_id(0)
    num_chunks = tl.cdiv(length, C)
    program = index // num_chunks
    return index.to(tl.int64), program // num_heads, program % num_heads, index % num_chunks * C


@triton.jit
def load_key(mixed, log_decay, beta, sequence, head, start, length, num_heads,
             C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Key (scaled, with the factors of its rows), log decay and beta of one chunk of a head, and its rows."""
    rows, valid = chunk_rows(sequence, start, length, C)
    key = load_rows(mixed, rows, valid, num_heads * (2 * K + V), (num_heads + head) * K, K)
    key, factor = scaled_rows(key, 1.0, UNIT)
    decays = tl.load(log_decay + rows * num_heads + head, mask=valid, other=0.0)
    betas = tl.load(beta + rows * num_heads + head, mask=valid, other=0.0)
    return key, factor, decays, betas, rows, valid


@triton.jit
def load_query(mixed, rows, valid, head, num_heads, scale, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr):
    """Query, scaled, with the factors of its rows."""
    query = load_rows(mixed, rows, valid, num_heads * (2 * K + V), head * K, K)
    return scaled_rows(query, scale, UNIT)


@triton.jit
def load_value(mixed, rows, valid, head, num_heads, first,
               K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """A block of the values' channels, from `first` on."""
    column = 2 * num_heads * K + head * V + first
    return load_rows(mixed, rows, valid, num_heads * (2 * K + V), column, VALUES)


@triton.jit(do_not_specialize=LENGTHS)
def resolvent_kernel(mixed, log_decay, beta, resolvents, length, num_heads,
                     C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """R of every chunk, (X, N, C, C). Grid: chunks of all sequences × heads."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key, _, decays, betas, _, _ = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    result = chunk_resolvent(key, decays, betas, C, PRECISION)
    tl.store(matrix(resolvents + index * C * C, C, 0, C, C), result.to(key.dtype))


@triton.jit(do_not_specialize=LENGTHS)
def gradient_kernel(mixed, log_decay, beta, states, corrections, gradient, state_gradients, correction_gradients,
                    resolvents, mixed_gradient, log_decay_gradient, beta_gradient, length, num_heads, scale,
                    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of every chunk, over the blocks of values. Grid: chunks of all sequences × heads.

    Of every chunk there are S (`states`), F (`corrections`), H (`correction_gradients`) and the gradient of S'
    (`state_gradients`); where `resolvents` (R) are given, E stands in the place of H. `gradient` is the output's.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key, key_factor, decays, betas, rows, valid = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    query, query_factor = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
    dtype: tl.constexpr = key.dtype
    stride = num_heads * (2 * K + V)
    of_weight, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    asking, reading, leaving = (
        tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32),
    )  # fmt: skip
    of_beta, of_total = tl.zeros((C,), tl.float32), 0.0
    for first in range(0, V, VALUES):
        of_output = load_rows(gradient, rows, valid, num_heads * V, head * V + first, VALUES)
        correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES)).to(tl.float32)
        of_correction = tl.load(matrix(correction_gradients + index * C * V, V, first, C, VALUES)).to(tl.float32)
        if resolvents is not None:
            between = tl.load(matrix(resolvents + index * C * C, C, 0, C, C))
            of_correction = correction_gradient(between, betas, of_correction, PRECISION)
        of_beta += tl.sum(correction * of_correction, 1)
        change, of_value = (correction * betas[:, None]).to(dtype), (of_correction * betas[:, None]).to(dtype)
        store_rows(mixed_gradient, rows, valid, stride, 2 * num_heads * K + head * V + first, of_value, VALUES)
        of_weight = product(of_output, tl.trans(change), PRECISION, of_weight)
        of_pairs = product(of_value, tl.trans(change), PRECISION, of_pairs)
        state = tl.load(matrix(states + index * K * V, V, first, K, VALUES))
        asking = product(of_output, tl.trans(state), PRECISION, asking)
        reading = product(of_value, tl.trans(state), PRECISION, reading)
        after = tl.load(matrix(state_gradients + index * K * V, V, first, K, VALUES))
        leaving = product(change, tl.trans(after), PRECISION, leaving)
        of_total += tl.sum(tl.sum(state.to(tl.float32) * after.to(tl.float32), 1), 0)
    tl.store(beta_gradient + rows * num_heads + head, of_beta, mask=valid)

    cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    decay = pair_decay(cumulative, C, OWN=False)
    of_own, of_weight = on_diagonal(of_weight, C).to(dtype), (of_weight * decay).to(dtype)
    of_pairs = (-of_pairs * decay).to(dtype)
    of_query, query_inner, query_whole = query_gradient(query, key, cumulative, of_weight, of_own, asking, PRECISION)
    of_query = scaled_rows_gradient(of_query, query, query_factor, query_whole, scale, UNIT)
    store_rows(mixed_gradient, rows, valid, stride, head * K, of_query, K)
    of_key, reading_inner, key_inner, leaving_inner, key_whole = key_gradient(
        query, key, cumulative, total, of_weight, of_own, of_pairs, reading, leaving, PRECISION
    )
    of_key = scaled_rows_gradient(of_key, key, key_factor, key_whole, 1.0, UNIT)
    store_rows(mixed_gradient, rows, valid, stride, (num_heads + head) * K, of_key, K)
    of_decay = log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_total * tl.exp(total))
    tl.store(log_decay_gradient + rows * num_heads + head, of_decay, mask=valid)
