"""Kernels of linear attention with one decay per head: walks of the state over chunks, and all gradients of a chunk.

A chunk has C positions. c_i is the sum of its log decays up to position i, S (K, V) the state before it, w_j the write
weight of position j and o_i the weight with which position i reads itself. Rows of Q (scaled), K and V are positions,
and W_ji = exp(c_i - c_j) w_j for j < i, o_i for j = i and 0 elsewhere:

    Y = exp(c) Q S + (K Q^T o W)^T V                    output
    S' = exp(c_C) S + (exp(c_C - c) w K)^T V            state after the chunk

No exponent is positive: log decays are at most 0, and later sources are masked before exp. Positions beyond the
sequence's end are zeros, log decays too, and change nothing.

States are transposed, (V, K): as left operand of a product they stay in registers, on Hopper too. Pairs are (source,
position), so that only one of their three products transposes them. Padded channels are masked. No product has 64 or
more rows with another side below 64 (see docs/kernels.md, "When a compiler is wrong").
"""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnbench.ops.common.triton.products import product
from attnbench.ops.delta.triton.delta_chunk import log_decay_gradients

UNSPECIALIZED = ("length", "segment", "num_segments")
"""Arguments whose values do not specialise a kernel."""


@triton.jit
def _place(length, segment, H: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr):
    """Return sequence, head, first channel of the block of values, first position, end, and number of the segment.
    Programs that read the same keys are neighbours in the grid."""
    blocks: tl.constexpr = (V + VALUES - 1) // VALUES
    num_segments = tl.cdiv(length, segment)
    rest = tl.program_id(0) // blocks
    head, part = rest % H, rest // H % num_segments
    sequence = rest // H // num_segments
    start = part * segment
    slot = (sequence * H + head) * num_segments + part
    return sequence, head, tl.program_id(0) % blocks * VALUES, start, min(start + segment, length), slot.to(tl.int64)


@triton.jit
def _tile(pointer, row, STRIDE: tl.constexpr, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return addresses of a block of a matrix with rows of STRIDE, from a row (int64) and a column on, and which
    exist."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    address = pointer + ((row + rows)[:, None] * STRIDE + (column + columns)[None, :])
    return address, (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit
def _load(pointer, row, STRIDE: tl.constexpr, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    address, exists = _tile(pointer, row, STRIDE, column, num_rows, num_columns, ROWS, COLUMNS)
    return tl.load(address, mask=exists, other=0.0)


@triton.jit
def _store(values, pointer, row, STRIDE: tl.constexpr, column, num_rows, num_columns):
    address, exists = _tile(pointer, row, STRIDE, column, num_rows, num_columns, values.shape[0], values.shape[1])
    tl.store(address, values.to(pointer.dtype.element_ty), mask=exists)


@triton.jit
def _gate(gate, row, head, num_rows, H: tl.constexpr, C: tl.constexpr, OTHER: tl.constexpr):
    """Load a number per position of a chunk; OTHER beyond the end, and if the gate is None."""
    positions = tl.arange(0, C)
    if gate is None:
        numbers = tl.full((C,), OTHER, tl.float32)
    else:
        numbers = tl.load(gate + (row + positions) * H + head, mask=positions < num_rows, other=OTHER)
    return numbers


@triton.jit
def _pair_decay(cumulative, C: tl.constexpr):
    """exp(c_i - c_j), by source j and position i; 0 for later sources."""
    rows = tl.arange(0, C)
    not_later = rows[:, None] <= rows[None, :]
    return tl.exp(tl.where(not_later, cumulative[None, :] - cumulative[:, None], float("-inf")))


@triton.jit
def _pair_weight(writes, owns, C: tl.constexpr):
    """Return w_j off the diagonal and o_i on it."""
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] == rows[None, :], owns[None, :], writes[:, None])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def walk_forward_kernel(mixed, log_decay, write, own, initial, output, last, totals, states, length, segment, scale,
                        G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                        KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Grid: segments of heads × blocks of values.

    May be None: `write`, `own`, the states before and after a segment (`initial`, `last`), `output`, the decay over a
    segment (`totals`) and the states before every chunk (`states`).
    """
    sequence, head, first, start, end, slot = _place(length, segment, H, V, VALUES)
    STRIDE: tl.constexpr = 2 * G * K + H * V
    query_column, value_column = head // (H // G) * K, 2 * G * K + head * V + first
    chunk = (sequence * H + head).to(tl.int64) * tl.cdiv(length, C) + start // C
    state, leaves = tl.zeros((VALUES, KEYS), tl.float32), 0.0
    if initial is not None:
        state = _load(initial, slot * V + first, K, 0, V - first, K, VALUES, KEYS)
    for place in range(start, end, C):
        row, num_rows = sequence.to(tl.int64) * length + place, end - place
        key = _load(mixed, row, STRIDE, query_column + G * K, num_rows, K, C, KEYS)
        value = tl.trans(_load(mixed, row, STRIDE, value_column, num_rows, V - first, C, VALUES))
        decays, writes = _gate(log_decay, row, head, num_rows, H, C, 0.0), _gate(write, row, head, num_rows, H, C, 1.0)
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        before = state.to(key.dtype)
        if states is not None:
            _store(before, states, chunk * V + first, K, 0, V - first, K)
        if output is not None:
            query = _load(mixed, row, STRIDE, query_column, num_rows, K, C, KEYS)
            owns = writes if own is None else _gate(own, row, head, num_rows, H, C, 1.0)
            weight = product(key, tl.trans(query), PRECISION) * scale
            weight = (weight * _pair_decay(cumulative, C) * _pair_weight(writes, owns, C)).to(key.dtype)
            read = product(before, tl.trans(query), PRECISION) * (tl.exp(cumulative) * scale)[None, :]
            read = product(value, weight, PRECISION, read)
            _store(tl.trans(read.to(key.dtype)), output, row, H * V, head * V + first, num_rows, V - first)
        leaving = (value.to(tl.float32) * (tl.exp(total - cumulative) * writes)[None, :]).to(key.dtype)
        state = product(leaving, key, PRECISION, state * tl.exp(total))
        leaves += total
        chunk += 1
    if last is not None:
        _store(state, last, slot * V + first, K, 0, V - first, K)
    if totals is not None:
        tl.store(totals + slot, tl.exp(leaves))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def walk_backward_kernel(mixed, log_decay, gradient, last_gradient, initial_gradient, totals, of_states, length,
                         segment, scale,
                         G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                         KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradients of the states after every chunk (`of_states`) and before the segment (`initial_gradient`).
    Grid and None as forward."""
    sequence, head, first, start, end, slot = _place(length, segment, H, V, VALUES)
    STRIDE: tl.constexpr = 2 * G * K + H * V
    num_chunks = tl.cdiv(end - start, C)
    chunk = (sequence * H + head).to(tl.int64) * tl.cdiv(length, C) + start // C
    of_state, leaves = tl.zeros((VALUES, KEYS), tl.float32), 0.0
    if last_gradient is not None:
        of_state = _load(last_gradient, slot * V + first, K, 0, V - first, K, VALUES, KEYS)
    for done in range(num_chunks):
        n = num_chunks - 1 - done
        row, num_rows = sequence.to(tl.int64) * length + start + n * C, end - start - n * C
        query = _load(mixed, row, STRIDE, head // (H // G) * K, num_rows, K, C, KEYS)
        of_output = _load(gradient, row, H * V, head * V + first, num_rows, V - first, C, VALUES)
        decays = _gate(log_decay, row, head, num_rows, H, C, 0.0)
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        if of_states is not None:
            _store(of_state, of_states, (chunk + n) * V + first, K, 0, V - first, K)
        of_read = tl.trans(of_output).to(tl.float32) * (tl.exp(cumulative) * scale)[None, :]
        of_state = product(of_read.to(query.dtype), query, PRECISION, of_state * tl.exp(total))
        leaves += total
    if initial_gradient is not None:
        _store(of_state, initial_gradient, slot * V + first, K, 0, V - first, K)
    if totals is not None:
        tl.store(totals + slot, tl.exp(leaves))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def carry_kernel(sums, totals, start, end, num_segments, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                 REVERSE: tl.constexpr):  # fmt: skip
    """Replace each segment's sum, of SIZE numbers, by the state before the segment; `end` is the state after the last.
    Grid: heads of all sequences, blocks of the state. `start` and `end` may be None."""
    program = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = numbers < SIZE
    state = tl.zeros((BLOCK,), tl.float32)
    if start is not None:
        state = tl.load(start + program * SIZE + numbers, mask=exists, other=0.0)
    # Prefetch later segments.
    for done in tl.range(num_segments, num_stages=4):
        slot = program * num_segments + (num_segments - 1 - done if REVERSE else done)
        added = tl.load(sums + slot * SIZE + numbers, mask=exists, other=0.0)
        total = tl.load(totals + slot)
        tl.store(sums + slot * SIZE + numbers, state, mask=exists)
        state = state * total + added
    if end is not None:
        tl.store(end + program * SIZE + numbers, state, mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(mixed, log_decay, write, own, states, gradient, of_states, of_mixed, of_log_decay, of_write, of_own,
                    length, scale, OF_QUERY: tl.constexpr, OF_KEY: tl.constexpr,
                    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute all gradients of every chunk from the states before (`states`) and the gradients of those after
    (`of_states`). Grid: chunks of all sequences × groups of heads that share query and key, whose gradients a program
    sums. Keys of 128 channels, short of registers, run first with OF_QUERY, leaving the query's part of the log decay's
    gradient in `of_log_decay`, then with OF_KEY. `write` and `own` may be None, and their gradients, and that of the
    log decay."""
    num_chunks = tl.cdiv(length, C)
    start, rest = tl.program_id(0) % num_chunks * C, tl.program_id(0) // num_chunks
    group, sequence = rest % G, (rest // G).to(tl.int64)
    STRIDE: tl.constexpr = 2 * G * K + H * V
    row, num_rows, positions = sequence * length + start, length - start, tl.arange(0, C)
    valid, is_own = positions < num_rows, positions[:, None] == positions[None, :]
    query = _load(mixed, row, STRIDE, group * K, num_rows, K, C, KEYS)
    key = _load(mixed, row, STRIDE, (G + group) * K, num_rows, K, C, KEYS)
    dtype: tl.constexpr = key.dtype
    of_query, of_key = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, KEYS), tl.float32)
    for member in range(H // G):
        head = group * (H // G) + member
        decays, writes = _gate(log_decay, row, head, num_rows, H, C, 0.0), _gate(write, row, head, num_rows, H, C, 1.0)
        owns = writes if own is None else _gate(own, row, head, num_rows, H, C, 1.0)
        cumulative, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        asking, leaving = tl.exp(cumulative) * scale, tl.exp(total - cumulative)
        decay = _pair_decay(cumulative, C) * scale
        score = product(key, tl.trans(query), PRECISION) * decay
        chunk = (sequence * H + head) * num_chunks + start // C
        of_pairs, of_total = tl.zeros((C, C), tl.float32), 0.0
        of_read, of_left = tl.zeros((C, KEYS), tl.float32), tl.zeros((C, KEYS), tl.float32)
        for first in range(0, V, VALUES):
            value_column = 2 * G * K + head * V + first
            before = _load(states, chunk * V + first, K, 0, V - first, K, VALUES, KEYS)
            value = _load(mixed, row, STRIDE, value_column, num_rows, V - first, C, VALUES)
            of_output = _load(gradient, row, H * V, head * V + first, num_rows, V - first, C, VALUES)
            if OF_KEY:
                after = _load(of_states, chunk * V + first, K, 0, V - first, K, VALUES, KEYS)
                if of_log_decay is not None:
                    of_total += tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)
                weight = (score * _pair_weight(writes, owns, C)).to(dtype)
                of_value = product(key, tl.trans(after), PRECISION) * (leaving * writes)[:, None]
                of_value = product(weight, of_output, PRECISION, of_value)
                _store(of_value, of_mixed, row, STRIDE, value_column, num_rows, V - first)
            of_pairs = product(value, tl.trans(of_output), PRECISION, of_pairs)
            if OF_QUERY:
                of_read = product(of_output, before, PRECISION, of_read)
            if OF_KEY:
                of_left = product(value, after, PRECISION, of_left)
        of_score = (of_pairs * decay * _pair_weight(writes, owns, C)).to(dtype)
        through, entries = of_pairs * score, (row + positions) * H + head
        of_owns, through = tl.sum(tl.where(is_own, through, 0.0), 0), tl.where(is_own, 0.0, through)
        if OF_QUERY:
            if of_log_decay is not None:
                query_inner = tl.sum(through * writes[:, None], 0)
                query_inner += tl.sum(query.to(tl.float32) * of_read, 1) * asking
                if not OF_KEY:
                    tl.store(of_log_decay + entries, query_inner, mask=valid)
            of_query += of_read * asking[:, None]
            of_query = product(tl.trans(of_score), key, PRECISION, of_query)
        if OF_KEY:
            key_inner, left_inner = tl.sum(through, 1), tl.sum(key.to(tl.float32) * of_left, 1) * leaving
            if of_log_decay is not None:
                if not OF_QUERY:
                    query_inner = tl.load(of_log_decay + entries, mask=valid, other=0.0)
                of_total *= tl.exp(total)
                of_decays = log_decay_gradients(query_inner, 0.0, key_inner * writes, left_inner * writes, of_total)
                tl.store(of_log_decay + entries, of_decays, mask=valid)
            if of_write is not None:
                of_writes = key_inner + left_inner + (of_owns if own is None else 0.0)
                tl.store(of_write + entries, of_writes, mask=valid)
            if of_own is not None:
                tl.store(of_own + entries, of_owns, mask=valid)
            of_key += of_left * (leaving * writes)[:, None]
            of_key = product(of_score, query, PRECISION, of_key)
    if OF_QUERY:
        _store(of_query, of_mixed, row, STRIDE, group * K, num_rows, K)
    if OF_KEY:
        _store(of_key, of_mixed, row, STRIDE, (G + group) * K, num_rows, K)
