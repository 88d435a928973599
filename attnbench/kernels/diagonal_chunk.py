"""One chunk of the delta rule, or of the plain sum, with a decay a key channel, as the kernels beside this file put it
together; and what the positions of a chunk do to each other, by a kernel that does all chunks at once.

A chunk has C positions, in blocks of 16. With s_i the sum of log decays, by channel, of the chunk's positions up to i,
t_j that of those behind j, and s_ij that of those behind j up to i; S (K, V) is the state before the chunk, rows of Q
(scaled), K, R and V are positions, and b is a number a position, or 1:

    W_ij = sum_c q_ic exp(s_ijc) k_jc  for j <= i,  L_ij = sum_c r_ic exp(s_ijc) k_jc  for j < i
    A = Q exp(s),  Y = K exp(t),  N = L (I + b L)^-1,  D = (I - N b) R exp(s)
    F = (I - N b) V - D S               correction of what the state and earlier positions would answer
    y = A S + W b F                     what the positions read
    S' = exp(s_C) S + Y^T b F           the state after the chunk

Where nothing is erased R is 0, b is 1 and F is V. Where the key itself says what is erased, r = b k and what is written
b v, R is K here, and V the values before that strength.

No sum is ever the difference of two far apart, and no exponent is above zero. Positions i and j > 15 apart, or in other
blocks, or in other halves of a block, of its halves' halves and so on, meet at the border between: i has what came
since, j what comes until there. So there are as many levels as bits in an index: that of a pair is the highest bit in
which both differ. At a level a position is either late, behind its border, or early, and has one factor; the product of
all late queries with all early keys is that of one matrix, late rows queries and early rows keys, with itself, of which
the pairs of this level are taken. The others are finite too, whatever decays: none can spoil a gradient.

Positions beyond the sequence's end have zeros throughout (log decay and b too), which changes nothing.
"""

# A decorated function is not seen to return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.kernels.delta_rule_chunk import LENGTHS, load_rows, matrix, on_diagonal, resolvent
from attnbench.kernels.delta_rule_tiles import chunk_place
from attnbench.kernels.products import product


@triton.jit
def load_strength(beta, sequence, head, start, length, num_heads, C: tl.constexpr):
    """b of a chunk's positions; ones where there is none."""
    positions = start + tl.arange(0, C)
    if beta is None:
        strength = tl.full((C,), 1.0, tl.float32)
    else:
        entries = (sequence.to(tl.int64) * length + positions) * num_heads + head
        strength = tl.load(beta + entries, mask=positions < length, other=0.0)
    return strength


@triton.jit
def load_sums(sums, row, rows, K: tl.constexpr, first, COLUMNS: tl.constexpr, mask):
    """Rows of a chunk's sums by their indices, from row (int64) and column `first` on; zeros where `mask` is not."""
    columns = first + tl.arange(0, COLUMNS)
    return tl.load(sums + ((row + rows)[:, None] * K + columns[None, :]), mask=mask[:, None], other=0.0)


@triton.jit
def whole_sums(sums, within, row, first, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr):
    """s, t and the sum over the chunk, (KEYS,), from what `sums` has of every position, `within`: the sum from the
    start of its block of 16 on."""
    positions = tl.arange(0, C)
    block = positions // 16
    everywhere = block >= 0
    since = within
    until = tl.minimum(load_sums(sums, row, block * 16 + 15, K, first, KEYS, everywhere) - within, 0.0)
    for apart in tl.static_range(1, C // 16):
        since += load_sums(sums, row, (block - apart) * 16 + 15, K, first, KEYS, block >= apart)
        until += load_sums(sums, row, (block + apart) * 16 + 15, K, first, KEYS, block + apart < C // 16)
    columns = first + tl.arange(0, KEYS)
    total = tl.load(sums + (row + 15) * K + columns)
    for other in tl.static_range(1, C // 16):
        total += tl.load(sums + (row + other * 16 + 15) * K + columns)
    return since, until, total


@triton.jit
def level_factors(sums, within, row, first, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr):
    """Decay of every position since the border of its level, or until there, and which are late; a level is named by
    the half of its blocks."""
    positions = tl.arange(0, C)
    is_late = (positions & HALF) != 0
    everywhere = positions >= 0
    if HALF < 16:
        border = positions // (2 * HALF) * (2 * HALF) + HALF - 1
        decay = -tl.abs(within - load_sums(sums, row, border, K, first, KEYS, everywhere))
    else:
        block = positions // 16
        behind = tl.minimum(load_sums(sums, row, block * 16 + 15, K, first, KEYS, everywhere) - within, 0.0)
        decay = tl.where(is_late[:, None], within, behind)
        if HALF > 16:
            # Between a position's own block and the border lies another, or none.
            other = tl.where(is_late, block - 1, block + 1) * 16 + 15
            is_between = is_late == ((positions & 16) != 0)
            decay += load_sums(sums, row, other, K, first, KEYS, is_between)
    return tl.exp(decay), is_late


@triton.jit
def of_level(values, C: tl.constexpr, HALF: tl.constexpr):
    """Pairs of one level, on both sides of the diagonal; zeros elsewhere."""
    rows = tl.arange(0, C)
    apart = rows[:, None] ^ rows[None, :]
    return tl.where((apart >= HALF) & (apart < 2 * HALF), values, 0.0)


@triton.jit
def below(values, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] > rows[None, :], values, 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_kernel(query, key, reader, log_decay, beta, sums, totals, asking, reading, leaving, pairs, length,
                 num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, ERASES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Fill, of every chunk, `sums` and `totals` (exp(s_C)) in float32, A, D, Y and `pairs` (X, N, 2, C, C): W and N.

    Grid: chunks of all sequences × heads. Keys come in blocks of KEYS channels. `reader` (R) may be None, for the key,
    and so may `beta`; unless ERASES, there are neither D nor N.
    """
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = query.dtype.element_ty
    row, stride, count = index * C, num_heads * K, 2 if ERASES else 1
    weight, lower = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    for first in range(0, K, KEYS):
        column = head * K + first
        asked = load_rows(query + column, sequence, start, length, stride, C, KEYS)
        kept = load_rows(key + column, sequence, start, length, stride, C, KEYS)
        decays = load_rows(log_decay + column, sequence, start, length, stride, C, KEYS)
        within = tl.reshape(tl.cumsum(tl.reshape(decays, (C // 16, 16, KEYS)), 1), (C, KEYS))
        tl.store(matrix(sums, row, K, first, C, KEYS), within)
        # What one thread has written others read below.
        tl.debug_barrier()
        since, until, total = whole_sums(sums, within, row, first, C, K, KEYS)
        tl.store(totals + index * K + first + tl.arange(0, KEYS), tl.exp(total))
        asked, kept = asked.to(tl.float32), kept.to(tl.float32)
        tl.store(matrix(asking, row, K, first, C, KEYS), (asked * tl.exp(since)).to(dtype))
        tl.store(matrix(leaving, row, K, first, C, KEYS), (kept * tl.exp(until)).to(dtype))
        own += tl.sum(asked * kept, 1)
        erased = kept
        if ERASES and reader is not None:
            erased = load_rows(reader + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
        for level in tl.static_range(0, 6 if C == 64 else 5):
            factor, is_late = level_factors(sums, within, row, first, C, K, KEYS, 1 << level)
            met = (tl.where(is_late[:, None], asked, kept) * factor).to(dtype)
            weight += of_level(product(met, tl.trans(met), PRECISION), C, 1 << level)
            if ERASES:
                met = (tl.where(is_late[:, None], erased, kept) * factor).to(dtype)
                lower += of_level(product(met, tl.trans(met), PRECISION), C, 1 << level)
    rows = tl.arange(0, C)
    weight = tl.where(rows[:, None] == rows[None, :], own[:, None], below(weight, C))
    tl.store(matrix(pairs, row * count, C, 0, C, C), weight.to(dtype))
    if ERASES:
        strength = load_strength(beta, sequence, head, start, length, num_heads, C)
        between = resolvent(below(lower, C), strength, C, PRECISION).to(dtype)
        tl.store(matrix(pairs, row * count + C, C, 0, C, C), between)
        for first in range(0, K, KEYS):
            column = head * K + first
            if reader is None:
                erased = load_rows(key + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
            else:
                erased = load_rows(reader + column, sequence, start, length, stride, C, KEYS).to(tl.float32)
            within = tl.load(matrix(sums, row, K, first, C, KEYS))
            since, _, _ = whole_sums(sums, within, row, first, C, K, KEYS)
            erased *= tl.exp(since)
            erased -= product(between, (erased * strength[:, None]).to(dtype), PRECISION)
            tl.store(matrix(reading, row, K, first, C, KEYS), erased.to(dtype))
