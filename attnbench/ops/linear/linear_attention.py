"""Linear attention with normaliser (Katharopoulos et al., 2020): definition, chunked form, kernels and their choice.

    S_t = S_{t-1} + k_t v_t^T,   z_t = z_{t-1} + k_t,   y_t = S_t^T q_t / (q_t . z_t + EPS)

Query and key have passed a non-negative feature map. With rotary positions S is written and read by rotated features, z
by unrotated ones.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.ops.common.backends import Backends
from attnbench.ops.common.cumulative_sum import cumulative_sum
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.common.recurrence import Recurrence, outer, read
from attnbench.ops.layers.rotary import rotate_both

EPS = 1e-6
"""Keeps the quotient finite if every feature of a query is 0, as with relu."""

CHUNK_SIZE = 64
"""Positions per chunk of the torch form; does not change the result."""


def feature(x: Tensor, name: str) -> Tensor:
    """Apply elu (elu(x) + 1), relu, or softmax over the last axis; keeps shape and dtype."""
    if name == "elu":
        # Not elu(x) + 1, which is 0 in bfloat16 below -6, although the normaliser makes ratios of features matter. Cast
        # back, because autocast takes exp to float32.
        return F.relu(x) + x.clamp(max=0).exp().to(x.dtype)
    if name == "relu":
        return F.relu(x)
    return x.softmax(-1, dtype=accumulation_dtype(x.dtype)).to(x.dtype)


def linear_step(
    memory: tuple[Tensor, Tensor],
    query_BHK: Tensor,
    key_BHK: Tensor,
    turned_query_BHK: Tensor,
    turned_key_BHK: Tensor,
    value_BHV: Tensor,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    memory_BHKV, normaliser_BHK = memory
    memory_BHKV = memory_BHKV + outer(turned_key_BHK, value_BHV)
    normaliser_BHK = normaliser_BHK + key_BHK
    total_BH1 = read(normaliser_BHK[..., None], query_BHK)
    return (memory_BHKV, normaliser_BHK), read(memory_BHKV, turned_query_BHK) / (total_BH1 + EPS)


def _turned(query: Tensor, key: Tensor, value: Tensor, angles: Tensor | None) -> tuple[Tensor, ...]:
    return query, key, *rotate_both(query, key, angles), value


def linear_attention(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    memory_BHKV: Tensor | None,
    normaliser_BHK: Tensor | None,
    angles: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same by torch or fla: S_t^T q_t by chunks, and the normaliser by a sum over all keys. Return y (B, T,
    H, V) in the value's dtype, the last memory and normaliser. `angles` are those of ops/layers/rotary.py or None."""
    inputs = (*rotate_both(query_BTHK, key_BTHK, angles), value_BTHV)
    if backend == "fla":
        from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

        # Without its normaliser, which has no state.
        options = {"initial_state": memory_BHKV, "output_final_state": memory_BHKV is not None, "normalize": False}
        mixed_BTHV, last_memory = chunk_linear_attn(*inputs, scale=1.0, **options)
    else:
        mixed_BTHV, last_memory = chunked_linear_attention(*inputs, memory_BHKV, CHUNK_SIZE)
    # Sums over thousands of keys need float32 at least.
    normaliser_BTHK = cumulative_sum(key_BTHK.to(accumulation_dtype(key_BTHK.dtype)))
    if normaliser_BHK is not None:
        normaliser_BTHK = normaliser_BTHK + normaliser_BHK[:, None]
    total_BTH = (query_BTHK * normaliser_BTHK).sum(-1)
    mixed_BTHV = (mixed_BTHV / (total_BTH[..., None] + EPS)).to(value_BTHV.dtype)
    return mixed_BTHV, last_memory, normaliser_BTHK[:, -1]


def packed_linear_attention(
    mixed_BTC: Tensor,
    memory_BHKV: Tensor | None,
    normaliser_BHK: Tensor | None,
    angles: Tensor | None,
    num_heads: int,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same by our kernel from packed query, key and value. `feature_map` is elu, relu, or identity if
    applied before."""
    from attnbench.ops.linear.triton import linear_op as kernel

    return kernel.linear_attention(mixed_BTC, memory_BHKV, normaliser_BHK, num_heads, feature_map, EPS, angles)


def chunked_linear_attention(
    query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor, memory_BHKV: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute S_t^T q_t by chunks: masked products within, a sum of states between. Return y (B, T, H, V) and the last
    state (B, H, K, V), the state in float32 at least."""
    length, state_dtype = query_BTHK.shape[1], accumulation_dtype(key_BTHK.dtype)
    size = min(chunk_size, length)
    padding = -length % size
    query, key, value = (
        # Padded by zeros, which change no state. Layout: (B, H, N, chunk, channels).
        F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)
        for x in (query_BTHK, key_BTHK, value_BTHV)
    )
    within = (query @ key.mT).tril() @ value
    # Sums over the whole past need float32 at least.
    memory_BHNKV = cumulative_sum((key.mT @ value).to(state_dtype).transpose(1, 2)).transpose(1, 2)
    if memory_BHKV is not None:
        memory_BHNKV = memory_BHNKV + memory_BHKV[:, :, None]
        before = torch.cat([memory_BHKV[:, :, None], memory_BHNKV[:, :, :-1]], dim=2)
    else:
        before = F.pad(memory_BHNKV[:, :, :-1], (0, 0, 0, 0, 1, 0))
    mixed = within + query @ before.to(query.dtype)
    return mixed.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], memory_BHNKV[:, :, -1]


def _takes(key_width: int, value_width: float, precision: str) -> bool:
    return 16 <= key_width <= 128


def _scan(*inputs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    query, key, value, angles, memory, backend = inputs
    memory, normaliser = memory or (None, None)
    mixed, *last = linear_attention(query, key, value, memory, normaliser, angles, backend)
    return mixed, (last[0], last[1])


def _packed(mixer: Any, packed_BTC: Tensor, angles: Tensor | None, feature_map: str, memory: Any) -> Any:
    memory, normaliser = memory or (None, None)
    mixed, *last = packed_linear_attention(packed_BTC, memory, normaliser, angles, mixer.heads, feature_map)
    return mixed, (last[0], last[1])


LINEAR_ATTENTION = Recurrence(
    step=linear_step,
    prepare=_turned,
    scan=_scan,
    packed=_packed,
    backends=Backends(takes=_takes, heads="16 to 128 channels", has_gates=False),
)
