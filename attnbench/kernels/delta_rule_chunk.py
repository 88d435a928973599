"""One chunk of the gated delta rule and of its gradient, as the kernels beside this file put them together.

A chunk has C positions. c_i is the sum of its log decays up to position i, g_i = exp(c_i), G_ij = exp(c_i - c_j) for
j <= i and 0 elsewhere; S (K, V) is the state before the chunk. Rows of Q (scaled), K and V are positions.

    L = K K^T o G below the diagonal,  R = L (I + b L)^-1       `resolvent`: what earlier positions do to later ones
    F = (I - R b) (V - g K S)                                   `correction` of what the state and they would answer
    Y = g Q S + (Q K^T o G) b F                                 what the positions read
    S' = g_C S + (g_C / g K)^T b F                              the state after the chunk

(I - R b) is the inverse of (I + L b), and its transpose's counterpart (I - b R)^T takes gradients back: with E the
gradient of b F, that of V - g K S is b H for H = (I - b R)^T E, and that of b is the row sum of F o H, in which neither
divides by a b that may be zero.

No exponent is above zero: log decays are not positive, and what lies above the diagonal is masked before exp.
Positions beyond the sequence's end have zeros throughout (log decay and beta too), which changes nothing.
"""

import triton
import triton.language as tl

from attnbench.kernels.products import product, tall_product

LENGTHS = ("length",)
"""What no kernel is compiled anew for. A length of 1 would become a constant, and without its loop a product of two
warpgroup tiles reads, compiled by Triton 3.6 for Hopper, from beyond its shared memory."""


@triton.jit
def load_rows(pointer, rows, valid, row_stride, first, WIDTH: tl.constexpr):
    """WIDTH columns from `first` on of some rows of a matrix; zeros where a row is not valid."""
    columns = first + tl.arange(0, WIDTH)
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def store_rows(pointer, rows, valid, row_stride, first, values, WIDTH: tl.constexpr):
    """The counterpart of `load_rows`."""
    columns = first + tl.arange(0, WIDTH)
    address = pointer + rows[:, None] * row_stride + columns[None, :]
    tl.store(address, values.to(pointer.dtype.element_ty), mask=valid[:, None])


@triton.jit
def matrix(pointer, row_stride, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of a whole block (ROWS, COLUMNS) of a matrix, from column `first` on."""
    return pointer + tl.arange(0, ROWS)[:, None] * row_stride + (first + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def scaled_rows(rows, scale, UNIT: tl.constexpr):
    """scale × rows, each divided by its length first if UNIT; keeps the dtype. Also the factor of each row."""
    wide = rows.to(tl.float32)
    factor = tl.sum(wide * 0.0, 1) + scale
    if UNIT:
        factor = scale * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    return (wide * factor[:, None]).to(rows.dtype), factor


@triton.jit
def scaled_rows_gradient(gradient, scaled, factor, inner, scale, UNIT: tl.constexpr):
    """The gradient of `scaled_rows` in its rows; `inner` is the sum of scaled × gradient over each row."""
    if UNIT:
        gradient -= scaled.to(tl.float32) * (inner / (scale * scale))[:, None]
    return gradient * factor[:, None]


@triton.jit
def pair_decay(cumulative, C: tl.constexpr, OWN: tl.constexpr):
    """G; without its diagonal unless OWN."""
    rows = tl.arange(0, C)
    before = rows[:, None] >= rows[None, :] if OWN else rows[:, None] > rows[None, :]
    return tl.exp(tl.where(before, cumulative[:, None] - cumulative[None, :], float("-inf")))


@triton.jit
def level_below(lower, apart, size: tl.constexpr):
    """What of `lower` is outside the diagonal blocks of `size`, a power of 2, and inside those twice as large.

    `apart` is row index xor column index.
    """
    return tl.where((apart >= size) & (apart < 2 * size), lower, 0.0)


@triton.jit
def resolvent(lower, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """R in float32, of L strictly below the diagonal; C is 32 or 64.

    R of the diagonal blocks of a size gives that of blocks twice as large: with N what of L lies below the ones inside
    the others, R + (I - R b) N (I - b R). Powers of the whole matrix, the shorter way, grow beyond all digits where
    neighbouring keys are alike. Blocks of up to 16 are products of their own, which the small matrix instructions do
    without leaving the registers.
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
    for level in tl.static_range(4, 6 if C == 64 else 5):
        left = level_below(lower, rows[:, None] ^ rows[None, :], 1 << level)
        left -= product(result * beta[None, :], left, PRECISION)
        result += left - product(left * beta[None, :], result, PRECISION)
    return result


@triton.jit
def chunk_resolvent(key, log_decay, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """R, in float32."""
    lower = product(key, tl.trans(key), PRECISION) * pair_decay(tl.cumsum(log_decay, 0), C, OWN=False)
    return resolvent(lower, beta, C, PRECISION)


@triton.jit
def chunk_correction(key, value, cumulative, beta, between, state, PRECISION: tl.constexpr):
    """F, in float32; `between` is R."""
    error = value.to(tl.float32) - product(key, state, PRECISION) * tl.exp(cumulative)[:, None]
    return error - product(between, (error * beta[:, None]).to(between.dtype), PRECISION)


@triton.jit
def chunk_read(query, key, cumulative, change, state, C: tl.constexpr, PRECISION: tl.constexpr):
    """Y, in float32; `change` is b F."""
    weight = product(query, tl.trans(key), PRECISION) * pair_decay(cumulative, C, OWN=True)
    read = product(query, state, PRECISION) * tl.exp(cumulative)[:, None]
    return read + product(weight.to(change.dtype), change, PRECISION)


@triton.jit
def next_state(key, cumulative, total, change, state, PRECISION: tl.constexpr):
    """S', in float32, as S is here; `change` is b F."""
    remaining = key.to(tl.float32) * tl.exp(total - cumulative)[:, None]
    return state * tl.exp(total) + tall_product(tl.trans(remaining.to(key.dtype)), change, PRECISION)


@triton.jit
def read_change_gradient(query, key, cumulative, gradient, C: tl.constexpr, PRECISION: tl.constexpr):
    """The part of E that comes from what the chunk's own queries read; `gradient` is that of Y."""
    weight = product(query, tl.trans(key), PRECISION) * pair_decay(cumulative, C, OWN=True)
    return product(tl.trans(weight.to(key.dtype)), gradient, PRECISION)


@triton.jit
def state_change_gradient(key, cumulative, total, after, PRECISION: tl.constexpr):
    """The part of E that comes from S', whose gradient is `after`."""
    return product(key, after, PRECISION) * tl.exp(total - cumulative)[:, None]


@triton.jit
def correction_gradient(between, beta, change_gradient, PRECISION: tl.constexpr):
    """H, in float32; `between` is R and `change_gradient` E."""
    scaled = (change_gradient * beta[:, None]).to(between.dtype)
    return change_gradient - product(tl.trans(between), scaled, PRECISION)


@triton.jit
def gradient_before(query, key, cumulative, total, gradient, value_gradient, state_gradient, PRECISION: tl.constexpr):
    """The gradient of S, from that of S' (`state_gradient`), of Y and of V; states in float32."""
    gain = tl.exp(cumulative)[:, None]
    before = state_gradient * tl.exp(total)
    before += tall_product(tl.trans((query.to(tl.float32) * gain).to(key.dtype)), gradient, PRECISION)
    return before - tall_product(tl.trans((key.to(tl.float32) * gain).to(key.dtype)), value_gradient, PRECISION)


@triton.jit
def on_diagonal(values, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] == rows[None, :], values, 0.0)


@triton.jit
def diagonal_product(diagonal, right, PRECISION: tl.constexpr):
    """`product` of a diagonal matrix.

    Row by row spills registers in bfloat16, as it needs `right` laid out like the sum; in float32, where a product may
    be three, it spills fewer.
    """
    by_row = tl.sum(diagonal, 1)[:, None] * right
    return by_row if right.dtype == tl.float32 else product(diagonal, right, PRECISION)


@triton.jit
def query_gradient(query, key, cumulative, weight_gradient, own_gradient, asking, PRECISION: tl.constexpr):
    """That of Q, and row sums of Q times it: without its part from the position itself, and with.

    `weight_gradient` is that of Q K^T below the diagonal, `own_gradient` that on it, where nothing decays. `asking` is
    the gradient of Y times S^T.
    """
    wide = query.to(tl.float32)
    result = asking * tl.exp(cumulative)[:, None]
    result += product(weight_gradient, key, PRECISION)
    inner = tl.sum(wide * result, 1)
    result += diagonal_product(own_gradient, key, PRECISION)
    return result, inner, tl.sum(wide * result, 1)


@triton.jit
def key_gradient(query, key, cumulative, total, weight_gradient, own_gradient, pair_gradient, reading, leaving,
                 PRECISION: tl.constexpr):  # fmt: skip
    """That of K, and row sums of K times parts of it: what comes from where K reads, this and what comes from where
    later positions of the chunk read it, the part through S', and all.

    `pair_gradient` is the gradient of K K^T where it stands in L, `reading` that of V times S^T, `leaving` b F times
    that of S' transposed; the others as for `query_gradient`.
    """
    wide = key.to(tl.float32)
    result = product(pair_gradient, key, PRECISION)
    result -= reading * tl.exp(cumulative)[:, None]
    reading_inner = tl.sum(wide * result, 1)
    result += product(tl.trans(weight_gradient), query, PRECISION)
    result += product(tl.trans(pair_gradient), key, PRECISION)
    inner = tl.sum(wide * result, 1)
    leaving *= tl.exp(total - cumulative)[:, None]
    leaving_inner = tl.sum(wide * leaving, 1)
    result += leaving
    result += diagonal_product(own_gradient, query, PRECISION)
    return result, reading_inner, inner, leaving_inner, tl.sum(wide * result, 1)


@triton.jit
def log_decay_gradients(query_inner, reading_inner, key_inner, leaving_inner, of_total):
    """c_i enters as exp(c_i) wherever position i reads (its query, and its key in L) and as exp(-c_i) where it is read
    (its key in L and in Q K^T), so its gradient is the difference of the row sums of the two, and each log decay is in
    the c_i of all positions from its own on; what leaves for S' decays by all that come after.

    What a position reads of itself would be in both sums and is in neither, and what leaves is summed from where it
    starts: a head that forgets fast has little else, and the rounding of these would be what is left. `of_total` is
    what the decay of S itself gives each."""
    inside = tl.cumsum(query_inner + 2 * reading_inner - key_inner, 0, reverse=True)
    return inside + tl.cumsum(leaving_inner, 0) - leaving_inner + of_total
