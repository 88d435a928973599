"""Kernels of flash_op.py.

Tensors (B, T, H, K) and (B, T, H, V) come with their strides along B, T and H. With SPLIT, programs along the grid's
second axis have parts of one walk and write them one after the other along B. With FORGETS, `cumulative` is the sum of
log f up to every key's position, (B, H, S) in float64. A program rounds differences from the middle of its block, which
are small where weights are large.
"""

import triton
import triton.language as tl

from attnbench.ops.attention.triton.flash_parts import LOG2_E, MASKED_SCORE, own_part
from attnbench.ops.layers.triton.rotary_kernels import load_rows, store_rows, turn

LENGTHS = ("num_queries", "num_keys", "length")
"""Arguments whose values do not specialise a kernel."""


@triton.jit
def _visible(query_position, key_position, num_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The last query is at the position of the last key."""
    seen = key_position < num_keys
    if CAUSAL:
        seen &= key_position <= query_position
    if WINDOW > 0:
        seen &= query_position - key_position < WINDOW
    return seen


@triton.jit
def _keys_in_view(
    first_query, offset, num_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """For a block of queries, return the first visible key, the end of the keys that all see, and the end of the
    visible keys."""
    first, stop, all_seen = 0, num_keys, num_keys
    if CAUSAL:
        stop = tl.minimum(num_keys, first_query + QUERIES + offset)
        all_seen = tl.minimum(num_keys, first_query + offset + 1)
    if WINDOW > 0:
        first = tl.maximum(0, first_query + offset - WINDOW + 1) // KEYS * KEYS
        all_seen = first
    return first, all_seen // KEYS * KEYS, stop


@triton.jit
def _forgotten(cumulative, position, num_keys, since):
    """Return log2 of the gates' product between each position and the one with the sum `since`, float32. Positions past
    the last count as the last."""
    own = tl.load(cumulative + tl.minimum(position, num_keys - 1))
    lost = ((since - own) * LOG2_E).to(tl.float32)
    # An identity that keeps each thread from recomputing float64 differences for all its scores.
    return tl.gather(lost, tl.arange(0, position.shape[0]), 0)


@triton.jit
def _forgotten_until(cumulative, position, num_keys, since):
    return ((since - tl.load(cumulative + tl.minimum(position, num_keys - 1))) * LOG2_E).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def flash_forward_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, cumulative, mixed, logsumexp,
    num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, FORGETS: tl.constexpr,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute y and z of one block of queries of one head; `mixed` is contiguous."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    # The last block sees most keys: it starts first, so that short blocks fill up the end.
    first_query = (num_blocks - 1 - tl.program_id(0) % num_blocks) * QUERIES
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    query += batch * query_strides[0] + head * query_strides[2]
    key += batch * key_strides[0] + head // SHARED_BY * key_strides[2]
    value += batch * value_strides[0] + head // SHARED_BY * value_strides[2]
    position = first_query + tl.arange(0, QUERIES)
    query_tile = load_rows(query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
    if ROTATE_QUERY:
        query_tile = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False).to(query_tile.dtype)
    offset = num_keys - num_queries
    first, middle, stop = _keys_in_view(first_query, offset, num_keys, CAUSAL, WINDOW, QUERIES, KEYS)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, KEYS)
    if FORGETS:
        cumulative += sequence * num_keys
        since = tl.load(cumulative + tl.minimum(first_query + offset + QUERIES // 2, num_keys - 1))
    accumulated = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], MASKED_SCORE, tl.float32)
    for masked in tl.static_range(2):
        for first_key in range(middle if masked else first, stop if masked else middle, KEYS):
            key_position = first_key + tl.arange(0, KEYS)
            key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            if ROTATE_KEY:
                key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
            if masked or FORGETS:
                # Scaled before masking: a GPU multiplies and subtracts with one rounding, and 1e30 minus its rounded
                # self leaves a large remainder.
                if masked:
                    seen = _visible(position[:, None] + offset, key_position[None, :], num_keys, CAUSAL, WINDOW)
                score *= scale * LOG2_E
                if FORGETS:
                    score += _forgotten(cumulative, key_position, num_keys, since)[None, :]
                if masked:
                    score = tl.where(seen, score, MASKED_SCORE)
                new_largest = tl.maximum(largest, tl.max(score, 1))
                weight = tl.exp2(score - new_largest[:, None])
            else:
                new_largest = tl.maximum(largest, tl.max(score, 1) * (scale * LOG2_E))
                weight = tl.exp2(score * (scale * LOG2_E) - new_largest[:, None])
            correction = tl.exp2(largest - new_largest)
            total = total * correction + tl.sum(weight, 1)
            value_tile = load_rows(
                value, value_strides[1], key_position, num_keys, VALUE_WIDTH, VALUE_PADDED, masked == 1
            )
            accumulated = tl.dot(
                weight.to(value_tile.dtype), value_tile, accumulated * correction[:, None], input_precision=PRECISION
            )
            largest = new_largest
    if SPLIT:
        # In an empty part a row has seen no key, not even a masked one.
        total = tl.where(total > 0, total, 1.0)
        sequence += tl.program_id(1) * (tl.num_programs(0) // num_blocks)
        batch = sequence // HEADS
    if FORGETS:
        # The common part of a row's scores, left out until here.
        largest -= _forgotten(cumulative, position + offset, num_keys, since)
    mixed += (batch * num_queries * HEADS + head) * VALUE_WIDTH
    mixed_tile = accumulated / total[:, None]
    store_rows(mixed, HEADS * VALUE_WIDTH, position, num_queries, mixed_tile, VALUE_WIDTH, VALUE_PADDED)
    logsumexp += sequence * num_queries + position
    tl.store(logsumexp, (largest + tl.log2(total)) / LOG2_E, mask=position < num_queries)


@triton.jit(do_not_specialize=LENGTHS)
def flash_query_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, cumulative, mixed, logsumexp,
    gradient, gradient_strides, own_product, lost, row_sum, query_gradient, query_gradient_strides,
    num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, FORGETS: tl.constexpr,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the query gradient of one block of queries of one head, and r_t. With FORGETS also the sums of d_ts over
    keys before t, and `lost`: log2 of the weights' divisor times the gates' product between t and the middle of its
    block."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    first_query = (num_blocks - 1 - tl.program_id(0) % num_blocks) * QUERIES
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, head = sequence // HEADS, sequence % HEADS
    query += batch * query_strides[0] + head * query_strides[2]
    key += batch * key_strides[0] + head // SHARED_BY * key_strides[2]
    value += batch * value_strides[0] + head // SHARED_BY * value_strides[2]
    gradient += batch * gradient_strides[0] + head * gradient_strides[2]
    mixed += (batch * num_queries * HEADS + head) * VALUE_WIDTH
    position = first_query + tl.arange(0, QUERIES)
    query_tile = load_rows(query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
    if ROTATE_QUERY:
        query_tile = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False).to(query_tile.dtype)
    gradient_tile = load_rows(gradient, gradient_strides[1], position, num_queries, VALUE_WIDTH, VALUE_PADDED, True)
    mixed_tile = load_rows(mixed, HEADS * VALUE_WIDTH, position, num_queries, VALUE_WIDTH, VALUE_PADDED, True)
    row, inside = sequence * num_queries + position, position < num_queries
    row_product = tl.sum(gradient_tile.to(tl.float32) * mixed_tile.to(tl.float32), 1)
    # All parts of a split walk write the same.
    tl.store(own_product + row, row_product, mask=inside)
    logsumexp_log2 = tl.load(logsumexp + row, mask=inside, other=0.0) * LOG2_E
    offset = num_keys - num_queries
    first, middle, stop = _keys_in_view(first_query, offset, num_keys, CAUSAL, WINDOW, QUERIES, KEYS)
    if FORGETS:
        # A query's own key, whose score has lost nothing, must be in the masked loop.
        middle = tl.minimum(middle, (first_query + offset) // KEYS * KEYS)
        cumulative += sequence * num_keys
        since = tl.load(cumulative + tl.minimum(first_query + offset + QUERIES // 2, num_keys - 1))
        logsumexp_log2 += _forgotten(cumulative, position + offset, num_keys, since)
        tl.store(lost + row, logsumexp_log2, mask=inside)
        sum_before = tl.zeros([QUERIES], tl.float32)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, KEYS)
    accumulated = tl.zeros([QUERIES, PADDED], tl.float32)
    for masked in tl.static_range(2):
        for first_key in range(middle if masked else first, stop if masked else middle, KEYS):
            key_position = first_key + tl.arange(0, KEYS)
            key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, masked == 1)
            value_tile = load_rows(
                value, value_strides[1], key_position, num_keys, VALUE_WIDTH, VALUE_PADDED, masked == 1
            )
            if ROTATE_KEY:
                key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
            if FORGETS:
                forgotten = _forgotten(cumulative, key_position, num_keys, since)
                weight = tl.exp2(score * (scale * LOG2_E) + forgotten[None, :] - logsumexp_log2[:, None])
            else:
                weight = tl.exp2(score * (scale * LOG2_E) - logsumexp_log2[:, None])
            if masked:
                seen = _visible(position[:, None] + offset, key_position[None, :], num_keys, CAUSAL, WINDOW)
                weight = tl.where(seen, weight, 0.0)
            weight_gradient = tl.dot(gradient_tile, tl.trans(value_tile), input_precision=PRECISION)
            score_gradient = weight * (weight_gradient - row_product[:, None])
            if FORGETS:
                before = score_gradient
                if masked:
                    before = tl.where(position[:, None] + offset > key_position[None, :], score_gradient, 0.0)
                sum_before += tl.sum(before, 1)
            accumulated = tl.dot(score_gradient.to(key_tile.dtype), key_tile, accumulated, input_precision=PRECISION)
    accumulated *= scale
    if ROTATE_QUERY:
        accumulated = turn(accumulated, rotation, position, num_queries, WIDTH, PADDED, True)
    if SPLIT:
        batch += tl.program_id(1) * (tl.num_programs(0) // (num_blocks * HEADS))
    if FORGETS:
        tl.store(row_sum + (batch * HEADS + head) * num_queries + position, sum_before, mask=inside)
    query_gradient += batch * query_gradient_strides[0] + head * query_gradient_strides[2]
    store_rows(query_gradient, query_gradient_strides[1], position, num_queries, accumulated, WIDTH, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def flash_key_value_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, rotation, cumulative, logsumexp,
    gradient, gradient_strides, own_product, row_sum, key_gradient, key_gradient_strides,
    value_gradient, value_gradient_strides, cumulative_gradient, num_queries, num_keys, scale,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, FORGETS: tl.constexpr, FORGETS_BY: tl.constexpr,
    HEADS: tl.constexpr, SHARED_BY: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys of one key/value head, over all query heads that share it.

    Tiles are (keys, queries). With SPLIT, `cumulative`'s gradient lacks `row_sum`. With FORGETS, `logsumexp` is the
    other kernel's `lost`, with blocks of FORGETS_BY queries, a multiple of QUERIES.
    """
    num_blocks = tl.cdiv(num_keys, KEYS)
    first_key = tl.program_id(0) % num_blocks * KEYS
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch, group = sequence // (HEADS // SHARED_BY), sequence % (HEADS // SHARED_BY)
    key += batch * key_strides[0] + group * key_strides[2]
    value += batch * value_strides[0] + group * value_strides[2]
    key_position = first_key + tl.arange(0, KEYS)
    key_tile = load_rows(key, key_strides[1], key_position, num_keys, WIDTH, PADDED, True)
    value_tile = load_rows(value, value_strides[1], key_position, num_keys, VALUE_WIDTH, VALUE_PADDED, True)
    if ROTATE_KEY:
        key_tile = turn(key_tile, rotation, key_position, num_keys, WIDTH, PADDED, False).to(key_tile.dtype)
    offset = num_keys - num_queries
    # Queries from `first` on see some of these keys, from `middle` on all of them (with a window, possibly none does).
    first, middle, stop = 0, 0, num_queries
    if CAUSAL:
        first = tl.maximum(0, first_key - offset) // QUERIES * QUERIES
        # The last key's own query, whose score has lost nothing, must be in the masked loop.
        middle = tl.cdiv(tl.maximum(0, first_key + (KEYS if FORGETS else KEYS - 1) - offset), QUERIES) * QUERIES
        if WINDOW > 0:
            stop = tl.minimum(num_queries, first_key + KEYS - 1 - offset + WINDOW)
            middle = stop
        middle = tl.minimum(middle, stop)
    if SPLIT:
        first, middle, stop = own_part(first, middle, stop, QUERIES)
    key_accumulated = tl.zeros([KEYS, PADDED], tl.float32)
    value_accumulated = tl.zeros([KEYS, VALUE_PADDED], tl.float32)
    for member in range(SHARED_BY):
        head = group * SHARED_BY + member
        head_query = query + batch * query_strides[0] + head * query_strides[2]
        head_gradient = gradient + batch * gradient_strides[0] + head * gradient_strides[2]
        head_row = (batch * HEADS + head) * num_queries
        if FORGETS:
            head_cumulative = cumulative + (batch * HEADS + head) * num_keys
            since = tl.load(head_cumulative + tl.minimum(first_key + KEYS // 2, num_keys - 1))
            forgotten = _forgotten(head_cumulative, key_position, num_keys, since)
            sum_after = tl.zeros([KEYS], tl.float32)
        for masked in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            for first_query in range(first if masked else middle, middle if masked else stop, QUERIES):
                position = first_query + tl.arange(0, QUERIES)
                row, inside = head_row + position, position < num_queries
                query_tile = load_rows(head_query, query_strides[1], position, num_queries, WIDTH, PADDED, True)
                gradient_tile = load_rows(
                    head_gradient, gradient_strides[1], position, num_queries, VALUE_WIDTH, VALUE_PADDED, True
                )
                lost = tl.load(logsumexp + row, mask=inside, other=0.0)
                row_product = tl.load(own_product + row, mask=inside, other=0.0)
                if ROTATE_QUERY:
                    turned = turn(query_tile, rotation, position, num_queries, WIDTH, PADDED, False)
                    query_tile = turned.to(query_tile.dtype)
                score = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
                if FORGETS:
                    if masked:
                        # A query past the last must weigh nothing: the weight of a key behind the middle of its block
                        # could be infinite.
                        lost = tl.where(inside, lost, -MASKED_SCORE)
                    middle_query = first_query // FORGETS_BY * FORGETS_BY + FORGETS_BY // 2
                    kept = forgotten - _forgotten_until(head_cumulative, middle_query + offset, num_keys, since)
                    weight = tl.exp2(score * (scale * LOG2_E) + kept[:, None] - lost[None, :])
                else:
                    weight = tl.exp2(score * (scale * LOG2_E) - (lost * LOG2_E)[None, :])
                if masked:
                    seen = _visible(position[None, :] + offset, key_position[:, None], num_keys, CAUSAL, WINDOW)
                    weight = tl.where(seen, weight, 0.0)
                value_accumulated = tl.dot(
                    weight.to(gradient_tile.dtype), gradient_tile, value_accumulated, input_precision=PRECISION
                )
                weight_gradient = tl.dot(value_tile, tl.trans(gradient_tile), input_precision=PRECISION)
                score_gradient = weight * (weight_gradient - row_product[None, :])
                if FORGETS:
                    after = score_gradient
                    if masked:
                        after = tl.where(position[None, :] + offset > key_position[:, None], score_gradient, 0.0)
                    sum_after += tl.sum(after, 1)
                score_gradient = score_gradient.to(query_tile.dtype)
                key_accumulated = tl.dot(score_gradient, query_tile, key_accumulated, input_precision=PRECISION)
        if FORGETS:
            own, own_batch = -sum_after, batch
            if SPLIT:
                own_batch += tl.program_id(1) * (tl.num_programs(0) // (num_blocks * (HEADS // SHARED_BY)))
            else:
                # The other kernel's sums are per query; the first query is at key `offset`.
                inside = (key_position >= offset) & (key_position < num_keys)
                own += tl.load(row_sum + head_row + key_position - offset, mask=inside, other=0.0)
            column = cumulative_gradient + (own_batch * HEADS + head) * num_keys + key_position
            tl.store(column, own.to(column.dtype.element_ty), mask=key_position < num_keys)
    key_accumulated *= scale
    if ROTATE_KEY:
        key_accumulated = turn(key_accumulated, rotation, key_position, num_keys, WIDTH, PADDED, True)
    if SPLIT:
        batch += tl.program_id(1) * (tl.num_programs(0) // (num_blocks * (HEADS // SHARED_BY)))
    key_gradient += batch * key_gradient_strides[0] + group * key_gradient_strides[2]
    store_rows(key_gradient, key_gradient_strides[1], key_position, num_keys, key_accumulated, WIDTH, PADDED)
    value_gradient += batch * value_gradient_strides[0] + group * value_gradient_strides[2]
    value_row = value_gradient_strides[1]
    store_rows(value_gradient, value_row, key_position, num_keys, value_accumulated, VALUE_WIDTH, VALUE_PADDED)
