"""Delta rule, or plain sum, with one decay per key channel: definition, chunked form, kernels, choice.

    S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t

Either nothing is erased (e = 0), or along the key (e = k, r = b * k), or e and r are free. The state is S (B, H, K, V).
The query comes scaled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.backends import Backends
from attnbench.ops.common.precision import without_autocast
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.common.scan import chunk_size, chunks_of, positions_of, scan_chunks
from attnbench.ops.delta.delta_rule import KEY_WIDTHS


class DiagonalInputs(NamedTuple):
    """Without `erase_strength` and `erase_BTHK` nothing is erased."""

    query_BTHK: Tensor
    key_BTHK: Tensor
    value_BTHV: Tensor
    log_decay_BTHK: Tensor
    """log a <= 0; in the state's dtype, float32 at least."""
    erase_strength: Tensor | None = None
    """b, of e = k and r = b * k: (B, T, H, K), or (B, T, H, 1) for one number per head."""
    write_strength: Tensor | None = None
    """w, of u = w * v: (B, T, H, V) or (B, T, H, 1); None for 1."""
    erase_BTHK: Tensor | None = None
    """Free e; requires `read_BTHK`, without `erase_strength`."""
    read_BTHK: Tensor | None = None
    """r, multiplied by the state after its decay."""

    def in_recurrence(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return q, k, u, log a, r (None if nothing is erased) and e (None if it is k)."""
        query, key, value, log_decay, erase_strength, write_strength, erase, read = self
        if write_strength is not None:
            value = (write_strength * value).to(value.dtype)
        if erase_strength is not None:
            read = (erase_strength * key).to(key.dtype)
        return query, key, value, log_decay, read, erase

    def each(self, function: Callable[[Tensor], Tensor]) -> "DiagonalInputs":
        return DiagonalInputs(*(None if x is None else function(x) for x in self))  # pyright: ignore[reportArgumentType]


def diagonal_step(
    memory_BHKV: Tensor,
    query_BHK: Tensor,
    key_BHK: Tensor,
    value_BHV: Tensor,
    log_decay_BHK: Tensor,
    reading_BHK: Tensor | None,
    erase_BHK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Inputs are those of `in_recurrence`, of one position."""
    memory_BHKV = log_decay_BHK.exp()[..., None] * memory_BHKV
    if reading_BHK is not None:
        found_BHV = read(memory_BHKV, reading_BHK)
        if erase_BHK is None:
            value_BHV = value_BHV - found_BHV
        else:
            memory_BHKV = memory_BHKV - outer(erase_BHK, found_BHV)
    memory_BHKV = memory_BHKV + outer(key_BHK, value_BHV)
    return memory_BHKV, read(memory_BHKV, query_BHK)


def _wide(*inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs_BT = DiagonalInputs(*inputs)  # pyright: ignore[reportArgumentType]
    return inputs_BT.each(lambda x: x.to(inputs_BT.log_decay_BTHK.dtype)).in_recurrence()


def _scan(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    *inputs_BT, memory, backend = inputs
    return diagonal_decay(DiagonalInputs(*inputs_BT), memory, backend)


def diagonal_decay(inputs: DiagonalInputs, memory_BHKV: Tensor | None, backend: str) -> tuple[Tensor, Tensor | None]:
    """Compute y and the last memory with backend `torch` (the definition for a single position), `triton` or `fla`. The
    last memory may be None if none was given or the given one was updated."""
    if backend == "fla":
        return _by_fla(inputs, memory_BHKV)
    if backend == "triton":
        return _by_kernels(inputs, memory_BHKV)
    if memory_BHKV is not None and inputs.query_BTHK.shape[1] == 1:
        return DIAGONAL_DECAY.define(*inputs, memory_BHKV)
    return chunked_diagonal_decay(inputs, memory_BHKV, chunk_size(inputs.query_BTHK.device.type))


def _by_kernels(inputs: DiagonalInputs, memory_BHKV: Tensor | None) -> tuple[Tensor, Tensor | None]:
    strength, beta_BTH = inputs.erase_strength, None
    if strength is not None and strength is inputs.write_strength and strength.shape[-1] == 1:
        # Our kernels read one number per head themselves.
        beta_BTH = strength.squeeze(-1)
        inputs = inputs._replace(erase_strength=None, write_strength=None)
    query, key, value, log_decay, read, erase = inputs.in_recurrence()
    if memory_BHKV is not None and query.shape[1] == 1:
        from attnbench.ops.diagonal.triton.diagonal_step import diagonal_decay_step

        tensors = (query, key, value, log_decay, read, beta_BTH, erase)
        alone = (None if x is None else x.squeeze(1) for x in tensors)
        return diagonal_decay_step(*alone, memory_BHKV)[:, None], None
    from attnbench.ops.diagonal.triton import diagonal_op as kernel

    if erase is not None:
        query, key, value, log_decay, read = _in_two(query, key, value, log_decay, read, erase)
    mixed, last_memory = kernel.diagonal_decay(
        query, key, value, log_decay, read, beta_BTH, memory_BHKV, keep_memory=memory_BHKV is not None
    )
    return mixed if erase is None else mixed[:, 1::2], last_memory


def _in_two(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, read: Tensor | None, erase: Tensor
) -> tuple[Tensor, ...]:
    """Lay out 2 T positions: each first decays and erases, each second writes and is read."""
    assert read is not None
    none_BTHK, none_BTHV = torch.zeros_like(query), torch.zeros_like(value)
    pairs = (
        (none_BTHK, query),
        (erase, key),
        (none_BTHV, value),
        (log_decay, torch.zeros_like(log_decay)),
        (read, none_BTHK),
    )
    return tuple(torch.stack(pair, dim=2).flatten(1, 2) for pair in pairs)


def _by_fla(inputs: DiagonalInputs, memory_BHKV: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute the same by the library's kernel with the least erasing that is required."""
    query, key, value, log_decay, erase_strength, write_strength, erase, read = inputs
    options = {"scale": 1.0, "initial_state": memory_BHKV, "output_final_state": memory_BHKV is not None}
    if erase is not None and read is not None:
        from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule  # pyright: ignore[reportMissingImports]

        # Its r is multiplied by the state before the decay.
        early_read = (-read * log_decay.exp()).to(read.dtype)
        return chunk_dplr_delta_rule(query, key, value, early_read, erase, gk=log_decay, **options)
    if erase_strength is None:
        from fla.ops.gla import chunk_gla  # pyright: ignore[reportMissingImports]

        return chunk_gla(query, key, inputs.in_recurrence()[2], g=log_decay, **options)
    if erase_strength is write_strength and erase_strength.shape[-1] == 1:
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        return chunk_kda(query, key, value, g=log_decay, beta=erase_strength.squeeze(-1), **options)
    from fla.ops.gdn2 import chunk_gdn2  # pyright: ignore[reportMissingImports]

    written = torch.ones_like(value) if write_strength is None else write_strength.to(value.dtype).expand_as(value)
    return chunk_gdn2(
        query, key, value, g=log_decay, b=erase_strength.to(key.dtype).expand_as(key), w=written, **options
    )


def chunked_diagonal_decay(
    inputs: DiagonalInputs, memory_BHKV: Tensor | None, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Compute the same by chunks: products and one triangular solve for all chunks, and a scan over their states.

    Within a chunk with initial state S, with g_ij the sum of log a after position j up to and including i, by channel,
    and p_i = r_i^T Diag(a_i) S_{i-1} the part that position i erases:

        (I + L) p = A u + r exp(g_i0) S,     L_ij = r_i . (exp(g_ij) e_j),  A_ij = r_i . (exp(g_ij) k_j)  for j < i
        y_i = (q_i exp(g_i0))^T S + sum_{j<=i} q_i . (exp(g_ij) (k_j u_j^T - e_j p_j^T))
        S' = Diag(exp(g_C0)) S + sum_j (exp(g_Cj) k_j) u_j^T - (exp(g_Cj) e_j) p_j^T

    If e = k these are in d = u - p alone: (I + L) d = u - r exp(g_i0) S. Products run in the dtype of query, key and
    value, which y keeps; decays, the solve and the states in that of the log decay. `num_positions`, the size of a
    chunk, is a power of 2.
    """
    batch, length, heads, key_width = inputs.query_BTHK.shape
    with without_autocast(inputs.query_BTHK.device.type):
        # A power of 2, because chunks are halved recursively.
        size = min(num_positions, 1 << (length - 1).bit_length())
        query, key, value, log_decay, read, erase = inputs.in_recurrence()
        if memory_BHKV is None:
            memory_BHKV = log_decay.new_zeros(batch, heads, key_width, value.shape[-1])
        query, key, value, log_decay = (chunks_of(x, size) for x in (query, key, value, log_decay))
        read, erase = (None if x is None else chunks_of(x, size) for x in (read, erase))
        mixed, last = _mix_chunks(query, key, value, log_decay, read, erase, memory_BHKV.flatten(0, 1))
    return positions_of(mixed, batch, length, heads), last.unflatten(0, (batch, heads))


def _mix_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    erase: Tensor | None,
    initial_XKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return y of every chunk and the last state; all tensors are (N × X, positions, ...)."""
    rows = [query] if read is None else [query, read]
    columns = [key] if erase is None else [key, erase]
    products, since, until = _decayed_products(torch.stack(rows, 2), torch.stack(columns, 2), log_decay)
    early, late = (sums.exp().to(query.dtype) for sums in (since, until))
    # Columns carry u alone, or d alone, or u and -p.
    contents = [value] if read is None or erase is not None else []
    addition = (key * late).mT @ value if contents else None
    if read is None:
        # A scan over chunks without positions only decays and adds.
        reading, erased, write = key[:, :0], key[:, :0], value[:, :0]
    else:
        write = value if erase is None else -products[:, :, 1, :, 0] @ value
        reading, write = _solved(products[:, :, 1, :, -1], read * early, write, log_decay.dtype)
        erased = columns[-1] * late
    state, change, last = scan_chunks(since[:, -1].exp(), reading, erased, write, addition, initial_XKV)
    if read is not None:
        contents.append(change)
    mixed = (query * early) @ state
    mixed = torch.baddbmm(mixed, products[:, :, 0].flatten(2), torch.stack(contents, 2).flatten(1, 2))
    for column, content in zip(columns, contents, strict=True):
        # At a first position or after full forgetting this is all of y, and a norm may follow: wide, as in matrix
        # products.
        product = (query.to(log_decay.dtype) * column).sum(-1, keepdim=True)
        mixed = mixed + product.to(content.dtype) * content
    return mixed, last


def _decayed_products(rows: Tensor, columns: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the products of every row with the columns before it, with the decay in between, and two sums of log
    decays.

    A chunk is composed recursively of halves. Rows of the later half and columns of the earlier one are decayed to the
    border between them, by sums of at most 0: no exponential overflows, no pair is computed and then masked (with a NaN
    gradient), and no large sums are subtracted.

    Args:
        rows: (X, C, R, K), R rows per position.
        columns: (X, C, M, K).
        log_decay: g, (X, C, K).

    Returns:
        sum_c rows_ic exp(g_ic + ... + g_{j+1}c) columns_jc for j < i, 0 elsewhere, as (X, C, R, C, M), in the rows'
        dtype; and the sums of g up to each position and after it, (X, C, K) both.
    """
    dtype, size, half = rows.dtype, log_decay.shape[1], 1
    # Per block of `half` positions, (X, blocks, positions, ...).
    since, until = log_decay[:, :, None], torch.zeros_like(log_decay)[:, :, None]
    products = rows.new_zeros(*rows.shape[:2], 1, rows.shape[2], 1, columns.shape[2])
    while half < size:
        # Unbound, because gradients of slices are added to zeros one by one.
        (earlier, later), (since, since_later), (until, until_later) = (
            x.unflatten(1, (-1, 2)).unbind(2) for x in (products, since, until)
        )
        late_rows = rows.unflatten(1, (-1, 2, half))[:, :, 1] * since_later[:, :, :, None].exp().to(dtype)
        early_columns = columns.unflatten(1, (-1, 2, half))[:, :, 0] * until[:, :, :, None].exp().to(dtype)
        across = late_rows.flatten(2, 3) @ early_columns.flatten(2, 3).mT
        across = across.unflatten(3, (half, -1)).unflatten(2, (half, -1))
        products = torch.cat([F.pad(earlier, (0, 0, 0, half)), torch.cat([across, later], dim=4)], dim=2)
        until = torch.cat([until + since_later[:, :, -1:], until_later], dim=2)
        since = torch.cat([since, since_later + since[:, :, -1:]], dim=2)
        half *= 2
    return products[:, 0], since[:, 0], until[:, 0]


def _solved(lower: Tensor, read: Tensor, write: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return -(I + lower)^-1 read and (I + lower)^-1 write, solved in `dtype`. Only `lower` (X, C, C) below the
    diagonal is read."""
    identity = torch.eye(lower.shape[-1], dtype=dtype, device=lower.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower.to(dtype), identity, upper=False, unitriangular=True).to(read.dtype)
    return -inverse @ read, inverse @ write


def _takes(key_width: int, value_width: float, precision: str) -> bool:
    return key_width in KEY_WIDTHS and value_width > 0 and value_width % 16 == 0


DIAGONAL_DECAY = Recurrence(
    step=diagonal_step,
    prepare=_wide,
    scan=_scan,
    backends=Backends(
        takes=_takes, heads=f"{', '.join(map(str, KEY_WIDTHS))} key channels and a multiple of 16 value channels"
    ),
)
