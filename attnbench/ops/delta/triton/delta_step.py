"""One position of the gated delta rule: a single pass over the state, updated in place. Torch's form takes a dozen
kernels, each longer to launch than to run."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.ops.delta.triton.delta_chunk import row_factors

VALUES = 16
"""Value channels per program: few enough that one sequence of few heads occupies part of a large GPU."""


@torch.library.custom_op("attnbench::gated_delta_rule_step", mutates_args=("memory_BHKV",))
def gated_delta_rule_step(
    mixed_BC: Tensor, log_decay_BH: Tensor, beta_BH: Tensor, memory_BHKV: Tensor, unit_length: bool
) -> Tensor:
    """Return y of one position, (B, H, V) in the dtype of `mixed_BC`; `delta_step` is its definition.

    Args:
        mixed_BC: packed as in `gated_delta_rule`; K is a power of 2.
        memory_BHKV: the state, float32 and contiguous, updated in place.
    """
    batch, heads, key_width, value_width = memory_BHKV.shape
    assert memory_BHKV.is_contiguous()
    groups, rest = divmod(mixed_BC.shape[1] - heads * value_width, 2 * key_width)
    assert rest == 0
    assert heads % groups == 0
    output_BHV = mixed_BC.new_empty(batch, heads, value_width)
    _step[(batch * heads, value_width // VALUES)](
        mixed_BC.contiguous(), log_decay_BH.float().contiguous(), beta_BH.float().contiguous(), memory_BHKV,
        output_BHV, heads, groups, key_width**-0.5, K=key_width, V=value_width, VALUES=VALUES, UNIT=unit_length,
    )  # fmt: skip
    return output_BHV


gated_delta_rule_step.register_fake(lambda mixed, log_decay, beta, memory, _: mixed.new_empty(memory[:, :, 0].shape))


@triton.jit
def _step(mixed, log_decay, beta, memory, output, num_heads, num_groups, scale,
          K: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Grid: sequences × heads, blocks of values."""
    program, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * VALUES
    sequence, head = program // num_heads, program % num_heads
    channels, values = tl.arange(0, K), first + tl.arange(0, VALUES)
    inputs, group = mixed + sequence * (2 * num_groups * K + num_heads * V), head // (num_heads // num_groups)
    query, key = (
        tl.load(inputs + group * K + channels)[None, :],
        tl.load(inputs + (num_groups + group) * K + channels)[None, :],
    )
    value = tl.load(inputs + 2 * num_groups * K + head * V + values).to(tl.float32)
    query_K = tl.sum(query.to(tl.float32) * row_factors(query, scale, UNIT)[:, None], 0)
    key_K = tl.sum(key.to(tl.float32) * row_factors(key, 1.0, UNIT)[:, None], 0)

    address = memory + program * K * V + channels[:, None] * V + values[None, :]
    state = tl.load(address) * tl.exp(tl.load(log_decay + program))
    change = (value - tl.sum(state * key_K[:, None], 0)) * tl.load(beta + program)
    state += key_K[:, None] * change[None, :]
    tl.store(address, state)
    tl.store(output + program * V + values, tl.sum(state * query_K[:, None], 0).to(output.dtype.element_ty))
