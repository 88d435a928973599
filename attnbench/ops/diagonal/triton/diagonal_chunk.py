"""Algebra of one chunk of the delta rule, or of the plain sum, with one decay per key channel; and the pairs of
positions within a chunk, by two kernels over all chunks.

A chunk has C positions, in blocks of 16. With s_i the sum of log decays, by channel, of the chunk's positions up to i,
t_j of those after j, and s_ij of those after j up to i; S (K, V) is the state before the chunk, rows of Q (scaled), K,
R and V are positions, and b is a number per position, or 1:

    W_ij = sum_c q_ic exp(s_ijc) k_jc  for j <= i,  L_ij = sum_c r_ic exp(s_ijc) k_jc  for j < i
    A = Q exp(s),  Y = K exp(t),  N = L (I + b L)^-1,  D = (I - N b) R exp(s)
    F = (I - N b) V - D S               correction of the values
    y = A S + W b F                     output
    S' = exp(s_C) S + Y^T b F           state after the chunk

If nothing is erased R is 0, b is 1 and F is V. If erasing is along the key, r = b k and the written value b v, R is K
here and V the values without b.

The decay of a pair is a product of factors of its positions, which must neither overflow nor lose the pair. If a whole
chunk forgets no channel by more than exp(-RANGE), they are exp(s_i - h) and exp(h - s_j), with h half of the sum over
the chunk. Otherwise pairs within a block of 16 have such factors for the block, or none if the block forgets more;
pairs in different halves of 64, 32 and so on are decayed to the border between the halves. The level of a pair is the
highest bit in which its indices differ. All factors are finite, so that masked pairs cannot spoil gradients, and none
is the exponential of a difference of sums beyond its own range.

Positions beyond the end are zeros and change nothing. Grids are chunks of all sequences × heads.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import LENGTHS, load_rows, matrix, resolvent
from attnbench.ops.delta.triton.delta_tiles import chunk_place

RANGE = tl.constexpr(80.0)
"""Factors of a pair lie within exp(-RANGE / 2) and exp(RANGE / 2): 1e17, far from the limits of bfloat16 and float32.
"""


@triton.jit
def load_strength(beta, sequence, head, start, length, num_heads, C: tl.constexpr):
    positions = start + tl.arange(0, C)
    if beta is None:
        strength = tl.full((C,), 1.0, tl.float32)
    else:
        entries = (sequence.to(tl.int64) * length + positions) * num_heads + head
        strength = tl.load(beta + entries, mask=positions < length, other=0.0)
    return strength


@triton.jit
def block_sums(sums, row, first, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr):
    """Return the sums of log decays of every block of 16, and of the blocks before and behind it, (C / 16, KEYS) each.
    `sums` counts from the start of each block; the chunk begins at `row` and column `first`."""
    BLOCKS: tl.constexpr = C // 16
    block, last = tl.arange(0, BLOCKS), sums + row * K + first + 15 * K + tl.arange(0, KEYS)[None, :]
    own = tl.load(last + (block * (16 * K))[:, None])
    before, behind = tl.zeros((BLOCKS, KEYS), tl.float32), tl.zeros((BLOCKS, KEYS), tl.float32)
    for apart in tl.static_range(1, BLOCKS):
        before += tl.load(last + ((block - apart) * (16 * K))[:, None], mask=(block >= apart)[:, None], other=0.0)
        is_there = (block + apart < BLOCKS)[:, None]
        behind += tl.load(last + ((block + apart) * (16 * K))[:, None], mask=is_there, other=0.0)
    return own, before, behind


@triton.jit
def sums_since(within, before, C: tl.constexpr, KEYS: tl.constexpr):
    """Return s, (C, KEYS), from the sums `within` and `before` each block."""
    return tl.reshape(tl.reshape(within, (C // 16, 16, KEYS)) + before[:, None, :], (C, KEYS))


@triton.jit
def sums_until(within, own, behind, C: tl.constexpr, KEYS: tl.constexpr):
    inside = tl.reshape(within, (C // 16, 16, KEYS))
    return tl.reshape(tl.minimum(own[:, None, :] - inside, 0.0) + behind[:, None, :], (C, KEYS))


@triton.jit
def first_level_of(own, C: tl.constexpr):
    """Return the level of a chunk's first pairs: the whole chunk, blocks of 16, or neighbours."""
    is_mild, is_mild_in_blocks = tl.min(tl.sum(own, 0)) >= -RANGE, tl.min(own) >= -RANGE
    return tl.where(is_mild, 6 if C == 64 else 5, tl.where(is_mild_in_blocks, 4, 0))


@triton.jit
def centred_sums(sums, row, first, first_level, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr):
    """Return exponents of the factors at the first level."""
    within = tl.load(matrix(sums, row, K, first, C, KEYS))
    own, before, _ = block_sums(sums, row, first, C, K, KEYS)
    is_whole, is_in_blocks = first_level > 4, first_level == 4
    total = tl.sum(own, 0)[None, :]
    origin = tl.where(is_whole, 0.5 * total - before, tl.where(is_in_blocks, 0.5 * own, 0.0))
    inside = tl.reshape(within, (C // 16, 16, KEYS)) - origin[:, None, :]
    return tl.where(first_level > 0, tl.reshape(inside, (C, KEYS)), 0.0)


@triton.jit
def border_sums(sums, row, first, size, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr):
    """Return the log decay of every position since the middle of its part of `size` positions, or until there."""
    positions, half = tl.arange(0, C), size // 2
    is_late = (positions & half) != 0
    columns = sums + row * K + first + tl.arange(0, KEYS)[None, :]
    # In parts of several blocks of 16 it counts from its own block's start, or to its end.
    border = tl.where(size <= 16, (positions & -size) + half - 1, positions | 15)
    is_there = (size <= 16) | ~is_late[:, None]
    # Loaded again: inputs of a rarely taken branch would otherwise stay in registers.
    within = tl.load(columns + positions[:, None] * K)
    result = -tl.abs(within - tl.load(columns + border[:, None] * K, mask=is_there, other=0.0))
    # In a part of 64, another block or none lies between its own block and the middle.
    other = tl.where(is_late, positions - 16, positions + 16) | 15
    is_there = ((size > 32) & (is_late == ((positions & 16) != 0)))[:, None]
    return result + tl.load(columns + other[:, None] * K, mask=is_there, other=0.0)


@triton.jit
def pair_factors(sums, row, first, level, first_level, C: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr):
    """Return factors of positions as the later and as the earlier one of a pair in parts of 2^level positions: at the
    first level of any pair, later of pairs in different halves."""
    if level > first_level:
        later = border_sums(sums, row, first, 1 << level, C, K, KEYS)
        earlier = later
    else:
        later = centred_sums(sums, row, first, first_level, C, K, KEYS)
        earlier = -later
    return tl.exp(later), tl.exp(earlier)


@triton.jit
def of_level(values, level, first_level, C: tl.constexpr):
    """Keep pairs below the diagonal that have the factors of `pair_factors`."""
    rows, size = tl.arange(0, C), 1 << level
    apart = rows[:, None] ^ rows[None, :]
    nearest = tl.where(level > first_level, size // 2, 1)
    is_of = (rows[:, None] > rows[None, :]) & (apart >= nearest) & (apart < size)
    return tl.where(is_of, values, 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_kernel(query, key, reader, log_decay, sums, totals, asking, reading, leaving, pairs, length,
                 num_heads: tl.constexpr, QUERY_ROW: tl.constexpr, KEY_ROW: tl.constexpr, C: tl.constexpr,
                 K: tl.constexpr, KEYS: tl.constexpr, ERASES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fill `sums` and `totals` (exp(s_C)) in float32, A, R exp(s), Y and `pairs` (X, N, 2, C, C): W and L. `reader` (R)
    is None for the key; without ERASES there are neither R exp(s) nor L."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = query.dtype.element_ty
    LEVELS: tl.constexpr = 6 if C == 64 else 5
    row, stride, count = index * C, num_heads * K, 2 if ERASES else 1
    ERASED_ROW: tl.constexpr = KEY_ROW if reader is None else num_heads * K
    weight, lower = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    for first in range(0, K, KEYS):
        column = head * K + first
        asked = load_rows(query + column, sequence, start, length, QUERY_ROW, C, KEYS)
        kept = load_rows(key + column, sequence, start, length, KEY_ROW, C, KEYS)
        decays = load_rows(log_decay + column, sequence, start, length, stride, C, KEYS)
        within = tl.reshape(tl.cumsum(tl.reshape(decays, (C // 16, 16, KEYS)), 1), (C, KEYS))
        tl.store(matrix(sums, row, K, first, C, KEYS), within)
        # Other threads read these below.
        tl.debug_barrier()
        in_block, before, behind = block_sums(sums, row, first, C, K, KEYS)
        tl.store(totals + index * K + first + tl.arange(0, KEYS), tl.exp(tl.sum(in_block, 0)))
        since, until = sums_since(within, before, C, KEYS), sums_until(within, in_block, behind, C, KEYS)
        wide_asked, wide_kept = asked.to(tl.float32), kept.to(tl.float32)
        tl.store(matrix(asking, row, K, first, C, KEYS), (wide_asked * tl.exp(since)).to(dtype))
        tl.store(matrix(leaving, row, K, first, C, KEYS), (wide_kept * tl.exp(until)).to(dtype))
        if ERASES:
            erased_rows = key if reader is None else reader
            erased = load_rows(erased_rows + column, sequence, start, length, ERASED_ROW, C, KEYS)
            tl.store(matrix(reading, row, K, first, C, KEYS), (erased.to(tl.float32) * tl.exp(since)).to(dtype))
        own += tl.sum(wide_asked * wide_kept, 1)
        first_level = first_level_of(in_block, C)
        for level in range(first_level, LEVELS + 1):
            # Loaded again at each level, mostly only one: values held over a loop cost registers.
            asked = load_rows(query + column, sequence, start, length, QUERY_ROW, C, KEYS)
            kept = load_rows(key + column, sequence, start, length, KEY_ROW, C, KEYS)
            later, earlier = pair_factors(sums, row, first, level, first_level, C, K, KEYS)
            met = tl.trans((kept.to(tl.float32) * earlier).to(dtype))
            meeting = (asked.to(tl.float32) * later).to(dtype)
            weight += of_level(product(meeting, met, PRECISION), level, first_level, C)
            if ERASES:
                erased_rows = key if reader is None else reader
                erased = load_rows(erased_rows + column, sequence, start, length, ERASED_ROW, C, KEYS)
                meeting = (erased.to(tl.float32) * later).to(dtype)
                lower += of_level(product(meeting, met, PRECISION), level, first_level, C)
    rows = tl.arange(0, C)
    weight = tl.where(rows[:, None] == rows[None, :], own[:, None], weight)
    tl.store(matrix(pairs, row * count, C, 0, C, C), weight.to(dtype))
    if ERASES:
        tl.store(matrix(pairs, row * count + C, C, 0, C, C), lower.to(dtype))


@triton.jit(do_not_specialize=LENGTHS)
def resolve_kernel(beta, reading, pairs, length, num_heads: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                   KEYS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Replace L by N, and R exp(s) by D."""
    index, sequence, head, start = chunk_place(length, num_heads, C)
    dtype: tl.constexpr = reading.dtype.element_ty
    row = index * C
    strength = load_strength(beta, sequence, head, start, length, num_heads, C)
    lower = tl.load(matrix(pairs, row * 2 + C, C, 0, C, C)).to(tl.float32)
    between = resolvent(lower, strength, C, PRECISION).to(dtype)
    # Wait until all threads have read.
    tl.debug_barrier()
    tl.store(matrix(pairs, row * 2 + C, C, 0, C, C), between)
    for first in range(0, K, KEYS):
        erased = tl.load(matrix(reading, row, K, first, C, KEYS)).to(tl.float32)
        erased -= product(between, (erased * strength[:, None]).to(dtype), PRECISION)
        tl.debug_barrier()
        tl.store(matrix(reading, row, K, first, C, KEYS), erased.to(dtype))
