"""One chunk of the gated delta rule and of its gradient, as the kernels of gated_delta_rule.py put them together.

A chunk has C positions. c_i is the sum of its log decays up to position i, g_i = exp(c_i), G_ij = exp(c_i - c_j) for
j <= i and 0 elsewhere; S (K, V) is the state before the chunk. Rows of Q (scaled), K and V are positions.

    A = b_i (K K^T o G)_ij below the diagonal,   T = (I + A)^-1
    D = T b (V - g K S)             what the positions add to the state, here `change`
    Y = g Q S + (Q K^T o G) D       what they read
    S' = g_C S + (g_C / g K)^T D    the state after the chunk

No exponent is above zero: log decays are not positive, and what lies above the diagonal is masked before exp.
Tiles of positions beyond the sequence's end are zero (log decay and beta too), which changes nothing.
"""

import triton
import triton.language as tl

from attnbench.kernels.support import interpreted

# Triton's interpreter multiplies the bits of bfloat16 as integers.
WIDEN = tl.constexpr(interpreted())


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """left @ right, in float32; both have one dtype. PRECISION is what becomes of float32: "tf32" or "tf32x3"."""
    if WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=PRECISION)


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
def pair_decay(cumulative, C: tl.constexpr):
    """G."""
    rows = tl.arange(0, C)
    before = rows[:, None] >= rows[None, :]
    return tl.exp(tl.where(before, cumulative[:, None] - cumulative[None, :], float("-inf")))


@triton.jit
def below_diagonal(values, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] > rows[None, :], values, 0.0)


@triton.jit
def unit_inverse(lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 in float32, for a matrix strictly below the diagonal.

    The inverse X of the diagonal blocks of `size` gives that of blocks twice as large: with N what lies below them
    inside the larger ones, X - X N X. Powers of the whole matrix, the shorter way, grow beyond all digits where
    neighbouring keys are alike.
    """
    rows = tl.arange(0, C)
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    inverse -= tl.where(rows[:, None] // 2 == rows[None, :] // 2, lower, 0.0)
    for level in tl.static_range(1, 6):
        size = 1 << level
        if size < C:
            same = rows[:, None] // (2 * size) == rows[None, :] // (2 * size)
            fresh = rows[:, None] // size != rows[None, :] // size
            between = tl.where(same & fresh, lower, 0.0)
            inverse -= product(product(inverse, between, PRECISION), inverse, PRECISION)
    return inverse


@triton.jit
def chunk_inverse(key, cumulative, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """T, in float32."""
    lower = product(key, tl.trans(key), PRECISION) * pair_decay(cumulative, C) * beta[:, None]
    return unit_inverse(below_diagonal(lower, C), C, PRECISION)


@triton.jit
def chunk_error(key, value, cumulative, state, PRECISION: tl.constexpr):
    """V - g K S, in float32: how the values differ from what the state would answer to their keys."""
    return value.to(tl.float32) - product(key, state, PRECISION) * tl.exp(cumulative)[:, None]


@triton.jit
def chunk_change(inverse, beta, error, PRECISION: tl.constexpr):
    """D, in the dtype of the inverse."""
    return product(inverse, (error * beta[:, None]).to(inverse.dtype), PRECISION).to(inverse.dtype)


@triton.jit
def chunk_read(query, key, cumulative, change, state, C: tl.constexpr, PRECISION: tl.constexpr):
    """Y, in float32."""
    weight = product(query, tl.trans(key), PRECISION) * pair_decay(cumulative, C)
    read = product(query, state, PRECISION) * tl.exp(cumulative)[:, None]
    return read + product(weight.to(change.dtype), change, PRECISION)


@triton.jit
def next_state(key, cumulative, total, change, state, PRECISION: tl.constexpr):
    """S', in float32, as S is here."""
    remaining = key.to(tl.float32) * tl.exp(total - cumulative)[:, None]
    return state * tl.exp(total) + product(tl.trans(remaining.to(key.dtype)), change, PRECISION)


@triton.jit
def chunk_gradient(
    query, key, value, log_decay, beta, inverse, state, gradient, state_gradient,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from that of its Y (`gradient`) and that of S' (`state_gradient`, float32).

    Returns those of Q, of K, of V, of the log decays, of beta and of S, and the row sums of Q dQ and of K dK.

    c_i enters as exp(c_i) wherever position i reads (its query, and its key in A) and as exp(-c_i) where it is read
    (its key in A, in Q K^T and in S'), so its gradient is the difference of the row sums of the two.
    """
    dtype = key.dtype
    cumulative, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
    decay, gain = pair_decay(cumulative, C), tl.exp(cumulative)[:, None]
    remaining = tl.exp(total - cumulative)[:, None]
    error = chunk_error(key, value, cumulative, state, PRECISION)
    change = chunk_change(inverse, beta, error, PRECISION)
    after = state_gradient.to(dtype)

    # Through D: of what is read in the chunk and of the state it leaves.
    weight = product(query, tl.trans(key), PRECISION) * decay
    change_gradient = product(tl.trans(weight.to(dtype)), gradient, PRECISION)
    change_gradient += product(key, after, PRECISION) * remaining
    # Through T: of b (V - g K S), and of A.
    error_gradient = product(tl.trans(inverse), change_gradient.to(dtype), PRECISION)
    lower_gradient = product(error_gradient.to(dtype), tl.trans(change), PRECISION) * decay
    lower_gradient = -below_diagonal(lower_gradient, C)
    beta_gradient = tl.sum(error_gradient * error, 1)
    beta_gradient += tl.sum(lower_gradient * product(key, tl.trans(key), PRECISION), 1)
    value_gradient = error_gradient * beta[:, None]
    value_change = value_gradient.to(dtype)

    pair_gradient = (lower_gradient * beta[:, None]).to(dtype)
    weight_gradient = (product(gradient, tl.trans(change), PRECISION) * decay).to(dtype)
    query_gradient = product(gradient, tl.trans(state), PRECISION) * gain
    query_gradient += product(weight_gradient, key, PRECISION)
    reading_gradient = product(pair_gradient, key, PRECISION)
    reading_gradient -= product(value_change, tl.trans(state), PRECISION) * gain
    leaving_gradient = product(change, tl.trans(after), PRECISION) * remaining
    written_gradient = product(tl.trans(weight_gradient), query, PRECISION)
    written_gradient += product(tl.trans(pair_gradient), key, PRECISION)

    wide_key, wide_query = key.to(tl.float32), query.to(tl.float32)
    query_inner = tl.sum(wide_query * query_gradient, 1)
    reading_inner = tl.sum(wide_key * reading_gradient, 1)
    leaving_inner = tl.sum(wide_key * leaving_gradient, 1)
    written_inner = tl.sum(wide_key * written_gradient, 1) + leaving_inner
    of_total = tl.sum(tl.sum(state.to(tl.float32) * state_gradient, 1), 0) * tl.exp(total) + tl.sum(leaving_inner, 0)
    log_decay_gradient = tl.cumsum(query_inner + reading_inner - written_inner, 0, reverse=True) + of_total

    before = state_gradient * tl.exp(total)
    before += product(tl.trans((wide_query * gain).to(dtype)), gradient, PRECISION)
    before -= product(tl.trans((wide_key * gain).to(dtype)), value_change, PRECISION)
    return (
        query_gradient, reading_gradient + written_gradient + leaving_gradient, value_gradient, log_decay_gradient,
        beta_gradient, before, query_inner, reading_inner + written_inner,
    )  # fmt: skip
