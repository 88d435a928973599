"""Algebra of one chunk of the gated delta rule and of its gradient, shared by the kernels.

A chunk has C positions. c_i is the sum of its log decays up to position i, g_i = exp(c_i), G_ij = exp(c_i - c_j) for j
<= i and 0 elsewhere; S (K, V) is the state before the chunk. Rows of Q (scaled), K and V are positions.

    L = K K^T o G below the diagonal,  R = L (I + b L)^-1       `resolvent`: effect of earlier positions on later ones
    F = (I - R b) (V - g K S)                                   correction of the values
    Y = g Q S + (Q K^T o G) b F                                 output
    S' = g_C S + (g_C / g K)^T b F                              state after the chunk

(I - R b) is the inverse of (I + L b). With E the gradient of b F, the gradient of V - g K S is b H for H = (I - b R)^T
E, and that of b is the row sum of F o H; neither divides by b, which may be zero.

No exponent is positive: log decays are at most 0, and pairs above the diagonal are masked before exp. Positions beyond
the end are zeros and change nothing. Queries and keys are multiplied as stored; their scaling and g are factors per
row, applied to the smaller side of a product.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product

LENGTHS = ("length",)
"""Arguments whose values do not specialise a kernel. A length of 1 would become a constant; without its loop a product
of two warpgroup tiles, compiled by Triton 3.6 for Hopper, reads beyond its shared memory."""


@triton.jit
def rows_of(pointer, sequence, start, length, STRIDE: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return addresses of WIDTH columns of a chunk's rows, STRIDE apart, and which exist."""
    row = sequence.to(tl.int64) * length + start
    return matrix(pointer, row, STRIDE, 0, C, WIDTH), (start + tl.arange(0, C) < length)[:, None]


@triton.jit
def load_rows(pointer, sequence, start, length, STRIDE: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    address, valid = rows_of(pointer, sequence, start, length, STRIDE, C, WIDTH)
    return tl.load(address, mask=valid, other=0.0)


@triton.jit
def store_rows(values, pointer, sequence, start, length, STRIDE: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr):
    address, valid = rows_of(pointer, sequence, start, length, STRIDE, C, WIDTH)
    tl.store(address, values.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def matrix(pointer, row, WIDTH: tl.constexpr, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return addresses of a block of a matrix with WIDTH columns, from a row (int64) and a column on, recomputed within
    loops: constant offsets would occupy scarce registers."""
    return pointer + ((row + tl.arange(0, ROWS))[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def row_factors(rows, scale, UNIT: tl.constexpr):
    """Return `scale`, divided by the length of each row if UNIT."""
    wide = rows.to(tl.float32)
    return scale * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) if UNIT else tl.sum(wide * 0.0, 1) + scale


@triton.jit
def scaled_rows_gradient(gradient, rows, factor, inner, scale, UNIT: tl.constexpr):
    """Return the gradient of rows that `row_factors` scaled. `gradient` is that of the scaled rows, times `factor`;
    `inner` its row sums with the rows, without `factor`."""
    if UNIT:
        gradient -= rows.to(tl.float32) * (factor * factor * inner / (scale * scale))[:, None]
    return gradient


@triton.jit
def pair_decay(cumulative, C: tl.constexpr):
    """Return G."""
    rows = tl.arange(0, C)
    not_later = rows[:, None] >= rows[None, :]
    return tl.exp(tl.where(not_later, cumulative[:, None] - cumulative[None, :], float("-inf")))


@triton.jit
def below_diagonal(values, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] > rows[None, :], values, 0.0)


@triton.jit
def on_diagonal(values, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    return tl.where(rows[:, None] == rows[None, :], values, 0.0)


@triton.jit
def diagonal(values, SIZE: tl.constexpr):
    return tl.sum(on_diagonal(values, SIZE), 1)


@triton.jit
def level_below(lower, apart, size: tl.constexpr):
    """Return the part of `lower` outside the diagonal blocks of `size`, a power of 2, and inside those twice as large.
    `apart` is row index xor column index."""
    return tl.where((apart >= size) & (apart < 2 * size), lower, 0.0)


@triton.jit
def resolvent(lower, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return R in float32, of L strictly below the diagonal; C is 16, 32 or 64.

    R of diagonal blocks of one size gives R of blocks twice as large: with N the part of L between them, R + (I - R b)
    N (I - b R). Powers of the whole matrix would lose all digits if neighbouring keys are alike. Blocks of up to 16 are
    batched products in registers.
    """
    blocks: tl.constexpr = C // 16
    index = tl.arange(0, blocks)
    own = index[:, None, None, None] == index[None, None, :, None]
    block_lower = tl.sum(tl.where(own, tl.reshape(lower, (blocks, 16, blocks, 16)), 0.0), 2)
    block_beta = tl.reshape(beta, (blocks, 1, 16))
    inside = tl.arange(0, 16)
    apart = (inside[:, None] ^ inside[None, :])[None]
    result = level_below(block_lower, apart, 1)
    for level in tl.static_range(1, 4):
        left = level_below(block_lower, apart, 1 << level)
        left -= product(result * block_beta, left, PRECISION)
        result += left - product(left * block_beta, result, PRECISION)
    result = tl.reshape(tl.where(own, result[:, :, None, :], 0.0), (C, C))
    rows = tl.arange(0, C)
    for level in tl.static_range(4, 4 + blocks // 2):
        left = level_below(lower, rows[:, None] ^ rows[None, :], 1 << level)
        left -= product(result * beta[None, :], left, PRECISION)
        result += left - product(left * beta[None, :], result, PRECISION)
    return result


@triton.jit
def correction_gradient(between, beta, change_gradient, PRECISION: tl.constexpr):
    """Return H in float32 from R (`between`) and E (`change_gradient`)."""
    scaled = (change_gradient * beta[:, None]).to(between.dtype)
    return change_gradient - product(tl.trans(between), scaled, PRECISION)


@triton.jit
def log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_total):
    """Return the gradients of log decays.

    c_i enters as exp(c_i) where position i reads and as exp(-c_i) where it is read, so its gradient is the difference
    of these row sums. Each log decay is part of c_i from its own position on; writes to S' decay by later positions, so
    `leaving_inner` sums over earlier ones. A position's reading of itself is in neither sum: for a head that forgets
    fast only its rounding would remain. `of_total` is the gradient through the decay of S.
    """
    inside = tl.cumsum(query_inner + 2 * reading_inner - key_inner, 0, reverse=True)
    return inside + tl.cumsum(leaving_inner, 0) - leaving_inner + of_total
