"""One position of the recurrence of scalar_kernels.py: a single pass over the state, updated in place."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 16
"""Value channels per program: few enough that one sequence of few heads occupies part of a large GPU."""


@torch.library.custom_op("attnbench::scalar_decay_step", mutates_args=("memory_BHKV",))
def scalar_decay_step(
    mixed_BC: Tensor,
    log_decay_BH: Tensor,
    write_BH: Tensor | None,
    memory_BHKV: Tensor,
    num_groups: int,
    scale: float,
    late_key_BHK: Tensor | None = None,
    late_value_BHV: Tensor | None = None,
    late_BH: Tensor | None = None,
) -> Tensor:
    """Return y of one position, (B, H, V) in the dtype of `mixed_BC`; `scalar_step` is its definition.

    Args:
        mixed_BC: packed query, key and value, (GK | GK | HV), see `scalar_decay`.
        memory_BHKV: the state, float32 and contiguous, updated in place.
        late_key_BHK, late_value_BHV, late_BH: key, value and weight of a pair that is first added to the state; or
            None.
    """
    batch, heads, key_width, value_width = memory_BHKV.shape
    assert memory_BHKV.is_contiguous()
    assert mixed_BC.shape[1] == 2 * num_groups * key_width + heads * value_width
    output_BHV = mixed_BC.new_empty(batch, heads, value_width)
    gates = (log_decay_BH, write_BH, late_key_BHK, late_value_BHV, late_BH)
    log_decay, write, late_key, late_value, late = (None if x is None else x.float().contiguous() for x in gates)
    _step[(batch * heads, triton.cdiv(value_width, VALUES))](
        mixed_BC.contiguous(), log_decay, write, memory_BHKV, output_BHV, late_key, late_value, late, scale,
        G=num_groups, H=heads, K=key_width, V=value_width, KEYS=triton.next_power_of_2(key_width), VALUES=VALUES,
    )  # fmt: skip
    return output_BHV


scalar_decay_step.register_fake(lambda mixed, log_decay, write, memory, *_: mixed.new_empty(memory[:, :, 0].shape))


@triton.jit
def _step(mixed, log_decay, write, memory, output, late_key, late_value, late, scale, G: tl.constexpr, H: tl.constexpr,
          K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values."""
    program, channels = tl.program_id(0).to(tl.int64), tl.arange(0, KEYS)
    values = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = channels < K, values < V
    sequence, head = program // H, program % H
    inputs = mixed + sequence * (2 * G * K + H * V)
    query = inputs + head // (H // G) * K + channels
    key_K = tl.load(query + G * K, mask=is_key, other=0.0).to(tl.float32)
    query_K = tl.load(query, mask=is_key, other=0.0).to(tl.float32) * scale
    value_V = tl.load(inputs + 2 * G * K + head * V + values, mask=is_value, other=0.0).to(tl.float32)
    if write is not None:
        value_V *= tl.load(write + program)
    address = memory + program * K * V + channels[:, None] * V + values[None, :]
    exists = is_key[:, None] & is_value[None, :]
    state = tl.load(address, mask=exists, other=0.0)
    if late is not None:
        late_K = tl.load(late_key + program * K + channels, mask=is_key, other=0.0) * tl.load(late + program)
        state += late_K[:, None] * tl.load(late_value + program * V + values, mask=is_value, other=0.0)[None, :]
    state *= tl.exp(tl.load(log_decay + program))
    state += key_K[:, None] * value_V[None, :]
    tl.store(address, state, mask=exists)
    y_V = tl.sum(state * query_K[:, None], 0)
    tl.store(output + program * V + values, y_V.to(output.dtype.element_ty), mask=is_value)
