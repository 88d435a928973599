"""Loads and stores of the gated delta rule's tiles, and the kernel over the pairs of positions of all chunks."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import (
    LENGTHS,
    below_diagonal,
    load_rows,
    matrix,
    pair_decay,
    resolvent,
    row_factors,
)

FACTORS = tl.constexpr(7)
"""Rows of a chunk's factors. Walks and gradients, short of registers, load each where it is used: held over a chunk, it
would take as many registers per thread as a product has rows. A scan, waiting anyway, loads them first."""

QUERY, KEY = tl.constexpr(0), tl.constexpr(1)
"""Factors that make Q and K of the stored query and key."""

ASKING, READING, LEAVING = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
"""Total factors on the query, on the key where it reads and on the key where it writes: for g Q, g K and g_C / g K."""

BETA, TOTAL = tl.constexpr(5), tl.constexpr(6)
"""b; and g_C, at every position."""


@triton.jit
def chunk_place(length, num_heads, C: tl.constexpr):
    """Return a program's chunk, sequence, head and first position. The grid's first axis counts chunks over all heads
    of all sequences; the others end at 65,535."""
    index = tl.program_id(0)
    num_chunks = tl.cdiv(length, C)
    program = index // num_chunks
    return index.to(tl.int64), program // num_heads, program % num_heads, index % num_chunks * C


@triton.jit
def load_query(mixed, sequence, head, start, length, num_heads: tl.constexpr, GROUPS: tl.constexpr,
               C: tl.constexpr, K: tl.constexpr, V: tl.constexpr):  # fmt: skip
    column = head // (num_heads // GROUPS) * K
    return load_rows(mixed + column, sequence, start, length, 2 * GROUPS * K + num_heads * V, C, K)


@triton.jit
def load_key(mixed, sequence, head, start, length, num_heads: tl.constexpr, GROUPS: tl.constexpr,
             C: tl.constexpr, K: tl.constexpr, V: tl.constexpr):  # fmt: skip
    column = (GROUPS + head // (num_heads // GROUPS)) * K
    return load_rows(mixed + column, sequence, start, length, 2 * GROUPS * K + num_heads * V, C, K)


@triton.jit
def load_value(mixed, sequence, head, start, length, first, num_heads: tl.constexpr, GROUPS: tl.constexpr,
               C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    column = 2 * GROUPS * K + head * V + first
    return load_rows(mixed + column, sequence, start, length, 2 * GROUPS * K + num_heads * V, C, VALUES)


@triton.jit
def load_pairs(pairs, index, C: tl.constexpr):
    first = index * 2 * C
    return tl.load(matrix(pairs, first, C, 0, C, C)), tl.load(matrix(pairs, first + C, C, 0, C, C))


@triton.jit
def load_factor(factors, index, NAME: tl.constexpr, C: tl.constexpr):
    return tl.load(factors + (index * FACTORS + NAME) * C + tl.arange(0, C))


@triton.jit
def load_total(factors, index, C: tl.constexpr):
    return tl.load(factors + (index * FACTORS + TOTAL) * C)


@triton.jit(do_not_specialize=LENGTHS)
def pairs_kernel(mixed, log_decay, beta, pairs, factors, length, scale, num_heads: tl.constexpr,
                 GROUPS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Compute `pairs` (X, N, 2, C, C), R and Q K^T o G, and `factors` (X, N, FACTORS, C). Grid: chunks of all sequences
    × heads."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    key = load_key(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    query = load_query(mixed, sequence, head, start, length, num_heads, GROUPS, C, K, V)
    key_factor, query_factor = row_factors(key, 1.0, UNIT), row_factors(query, scale, UNIT)
    positions = tl.arange(0, C)
    entries, valid = (sequence.to(tl.int64) * length + start + positions) * num_heads + head, start + positions < length
    decays = tl.load(log_decay + entries, mask=valid, other=0.0)
    betas = tl.load(beta + entries, mask=valid, other=0.0)
    cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    row = factors + index * FACTORS * C + positions
    tl.store(row + QUERY * C, query_factor)
    tl.store(row + KEY * C, key_factor)
    tl.store(row + ASKING * C, query_factor * tl.exp(cumulative))
    tl.store(row + READING * C, key_factor * tl.exp(cumulative))
    tl.store(row + LEAVING * C, key_factor * tl.exp(total - cumulative))
    tl.store(row + BETA * C, betas)
    tl.store(row + TOTAL * C, tl.exp(total + 0.0 * cumulative))
    decay = pair_decay(cumulative, C) * key_factor[None, :]
    weight = product(query, tl.trans(key), PRECISION) * decay * query_factor[:, None]
    tl.store(matrix(pairs, (index * 2 + 1) * C, C, 0, C, C), weight.to(key.dtype))
    lower = below_diagonal(product(key, tl.trans(key), PRECISION) * decay * key_factor[:, None], C)
    between = resolvent(lower, betas, C, PRECISION)
    tl.store(matrix(pairs, index * 2 * C, C, 0, C, C), between.to(key.dtype))
