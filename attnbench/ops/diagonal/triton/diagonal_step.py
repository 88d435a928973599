"""One position of the recurrence of diagonal_chunk.py: a single pass over the state, updated in place."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 16
"""Value channels per program: few enough that one sequence of few heads occupies part of a large GPU."""


@torch.library.custom_op("attnbench::diagonal_decay_step", mutates_args=("memory_BHKV",))
def diagonal_decay_step(
    query_BHK: Tensor,
    key_BHK: Tensor,
    value_BHV: Tensor,
    log_decay_BHK: Tensor,
    reader_BHK: Tensor | None,
    beta_BH: Tensor | None,
    eraser_BHK: Tensor | None,
    memory_BHKV: Tensor,
) -> Tensor:
    """Return y of one position, (B, H, V) in the value's dtype; `diagonal_step` is its definition.

    Args:
        query_BHK: scaled; bfloat16 or float32, like key, value, reader and eraser; K is a power of 2, V a multiple of
            16.
        reader_BHK, eraser_BHK: r, None for 0 or, with beta, for beta times the key (and value); e, None for the key.
        memory_BHKV: the state, float32 and contiguous, updated in place.
    """
    batch, heads, key_width, value_width = memory_BHKV.shape
    assert memory_BHKV.is_contiguous()
    inputs = (query_BHK, key_BHK, value_BHV, log_decay_BHK.float(), reader_BHK, beta_BH, eraser_BHK)
    output_BHV = torch.empty_like(value_BHV, memory_format=torch.contiguous_format)
    tensors: list[Any] = [None if x is None else x.contiguous() for x in (*inputs, memory_BHKV, output_BHV)]
    _step[(batch * heads, value_width // VALUES)](*tensors, K=key_width, V=value_width, VALUES=VALUES)
    return output_BHV


diagonal_decay_step.register_fake(lambda query, key, value, *_: value.new_empty(value.shape))


@triton.jit
def _step(query, key, value, log_decay, reader, beta, eraser, memory, output,
          K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values."""
    program, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * VALUES
    channels, values = program * K + tl.arange(0, K), program * V + first + tl.arange(0, VALUES)
    address = memory + channels[:, None] * V + (first + tl.arange(0, VALUES))[None, :]
    state = tl.load(address) * tl.exp(tl.load(log_decay + channels))[:, None]
    kept, change = tl.load(key + channels).to(tl.float32), tl.load(value + values).to(tl.float32)
    if beta is not None:
        change = (change - tl.sum(state * kept[:, None], 0)) * tl.load(beta + program)
    if reader is not None:
        read = tl.sum(state * tl.load(reader + channels).to(tl.float32)[:, None], 0)
        if eraser is None:
            change -= read
        else:
            state -= tl.load(eraser + channels).to(tl.float32)[:, None] * read[None, :]
    state += kept[:, None] * change[None, :]
    tl.store(address, state)
    mixed = tl.sum(state * tl.load(query + channels).to(tl.float32)[:, None], 0)
    tl.store(output + values, mixed.to(output.dtype.element_ty))
