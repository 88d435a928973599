"""Tiles of the gated delta rule between memory and the kernels: a chunk of a head in, its gradients out; and the two
kernels that do all chunks at once, whatever form carries the state from one to the next.

Values are cut into blocks of channels, which do not depend on each other. Gradients that several blocks share (all but
that of the values) are written block by block and added outside.
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
    log_decay_gradient,
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
                    resolvents, mixed_gradient, shared_gradient, log_decay_gradients, beta_gradients,
                    length, num_rows, num_heads, shared_stride, scale,
                    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr,
                    UNIT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of every chunk. Grid: chunks of all sequences × heads, blocks of values.

    Of every chunk there are S (`states`), F (`corrections`), H (`correction_gradients`) and the gradient of S'
    (`state_gradients`); where `resolvents` (R) are given, E stands in the place of H. `gradient` is the output's.
    Gradients of query and key go to columns 0 and HK of `shared_gradient`, which is the packed gradient itself where
    there is one block of values, and else has an axis of blocks first, as those of log decay and beta always have.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    block = tl.program_id(1)
    first = block * VALUES
    key, key_factor, decays, betas, rows, valid = load_key(
        mixed, log_decay, beta, sequence, head, start, length, num_heads, C, K, V, UNIT
    )
    dtype: tl.constexpr = key.dtype
    own_rows = block.to(tl.int64) * num_rows + rows
    cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    query, query_factor = load_query(mixed, rows, valid, head, num_heads, scale, K, V, UNIT)
    of_output = load_rows(gradient, rows, valid, num_heads * V, head * V + first, VALUES)

    correction = tl.load(matrix(corrections + index * C * V, V, first, C, VALUES)).to(tl.float32)
    of_correction = tl.load(matrix(correction_gradients + index * C * V, V, first, C, VALUES)).to(tl.float32)
    if resolvents is not None:
        between = tl.load(matrix(resolvents + index * C * C, C, 0, C, C))
        of_correction = correction_gradient(between, betas, of_correction, PRECISION)
    tl.store(beta_gradients + own_rows * num_heads + head, tl.sum(correction * of_correction, 1), mask=valid)
    change, of_value = (correction * betas[:, None]).to(dtype), (of_correction * betas[:, None]).to(dtype)
    value_column = 2 * num_heads * K + head * V + first
    store_rows(mixed_gradient, rows, valid, num_heads * (2 * K + V), value_column, of_value, VALUES)

    decay = pair_decay(cumulative, C, OWN=False)
    of_weight = product(of_output, tl.trans(change), PRECISION)
    of_own, of_weight = on_diagonal(of_weight, C).to(dtype), (of_weight * decay).to(dtype)
    of_pairs = (-product(of_value, tl.trans(change), PRECISION) * decay).to(dtype)

    state = tl.load(matrix(states + index * K * V, V, first, K, VALUES))
    of_query, query_inner, query_whole = query_gradient(
        query, key, cumulative, of_weight, of_own, of_output, state, PRECISION
    )
    of_query = scaled_rows_gradient(of_query, query, query_factor, query_whole, scale, UNIT)
    store_rows(shared_gradient, own_rows, valid, shared_stride, head * K, of_query, K)

    after = tl.load(matrix(state_gradients + index * K * V, V, first, K, VALUES))
    of_key, reading_inner, key_inner, leaving_inner, key_whole = key_gradient(
        query, key, cumulative, total, of_weight, of_own, of_pairs, change, of_value, state, after, PRECISION
    )
    of_key = scaled_rows_gradient(of_key, key, key_factor, key_whole, 1.0, UNIT)
    store_rows(shared_gradient, own_rows, valid, shared_stride, (num_heads + head) * K, of_key, K)
    of_decay = log_decay_gradient(total, query_inner, reading_inner, key_inner, leaving_inner, state, after)
    tl.store(log_decay_gradients + own_rows * num_heads + head, of_decay, mask=valid)
