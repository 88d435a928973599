"""The rule of delta_chunk.py as one operator on packed inputs, with its gradient."""

from typing import Any

import torch
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import contiguous, custom_op, gradient_of
from attnbench.ops.delta.triton.delta_choice import WIDE, DeltaRule
from attnbench.ops.delta.triton.delta_launch import backward, forward
from attnbench.ops.delta.triton.delta_tiles import FACTORS
from attnbench.settings.errors import UserError

DTYPES = (torch.bfloat16, torch.float32)


def gated_delta_rule(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None = None,
    *,
    num_heads: int,
    key_width: int,
    unit_length: bool,
    num_key_heads: int | None = None,
    keep_memory: bool = False,
    parallel: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `delta_step` of ops/delta/delta_rule.py with y_t = M_t^T q_t / sqrt(K); (B, T, H, V) in the dtype of
    `mixed_BTC`.

    Args:
        mixed_BTC: packed query, key and value, (GK | GK | HV), in bfloat16 or float32; K is 16, 32, 64 or 128, in
            bfloat16 also 256, V a multiple of 16.
        log_decay_BTH: log a_t <= 0; float32, as beta and memory.
        unit_length: divide each query and key by its length first.
        num_key_heads: G, each shared by H / G heads of the value; None: H.
        parallel: which form runs; None for `choose_parallel`. Changes only the speed.
    """
    if mixed_BTC.dtype not in (DTYPES if key_width <= WIDE else DTYPES[:1]):
        raise UserError(
            f"attn.backend=triton: its kernels take bfloat16 and, up to {WIDE} key channels a head, float32, not "
            f"{mixed_BTC.dtype} at {key_width}; choose attn.backend=torch"
        )
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    value_width = (mixed_BTC.shape[-1] - 2 * num_key_heads * key_width) // num_heads
    assert num_heads % num_key_heads == 0, num_key_heads
    assert key_width in (16, 32, 64, 128, 256), key_width
    assert value_width % 16 == 0, value_width
    output_BTHV, last_BHKV, *_ = gated_delta_rule_forward(
        mixed_BTC, log_decay_BTH.float(), beta_BTH.float(), memory_BHKV, num_heads, num_key_heads, key_width,
        unit_length, keep_memory, torch.is_grad_enabled(), parallel,
    )  # fmt: skip
    return output_BTHV, last_BHKV if keep_memory else None


def _rule(mixed: Tensor, log_decay: Tensor, beta: Tensor, *shape: Any) -> DeltaRule:
    return DeltaRule(mixed.contiguous(), log_decay.contiguous(), beta.contiguous(), *shape)


def _memory(rule: DeltaRule, wanted: bool) -> Tensor:
    shape = (rule.mixed.shape[0], rule.num_heads, rule.key_width, rule.value_width) if wanted else (0,)
    return rule.log_decay.new_empty(shape, dtype=torch.float32)


def _forward_outputs(rule: DeltaRule, keep_memory: bool, keep_states: bool) -> tuple[Tensor, ...]:
    chunk, key_width, value_width = rule.chunk, rule.key_width, rule.value_width
    shapes = (value_width, key_width), (chunk, value_width), (2, chunk, chunk), (FACTORS.value, chunk)
    chunks = rule.sequences, rule.num_chunks
    *kept, factors = ((*chunks, *shape) if keep_states else (0,) for shape in shapes)
    return (
        rule.mixed.new_empty(*rule.mixed.shape[:2], rule.num_heads, value_width),
        _memory(rule, keep_memory),
        *(rule.mixed.new_empty(shape) for shape in kept),
        rule.mixed.new_empty(factors, dtype=torch.float32),
    )


@custom_op(
    "gated_delta_rule_forward",
    lambda mixed, log_decay, beta, memory, heads, groups, keys, unit, keep_memory, keep_states, parallel: (
        _forward_outputs(DeltaRule(mixed, log_decay, beta, heads, groups, keys, unit), keep_memory, keep_states)
    ),
    # As the recurrence: 2KV per position and head for each of M^T k, the outer product and M^T q.
    flops=lambda mixed, log_decay, beta, memory, heads, groups, keys, *_: (
        6 * mixed[0] * mixed[1] * keys * (mixed[2] - 2 * groups * keys)
    ),
)
def gated_delta_rule_forward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_heads: int,
    num_key_heads: int,
    key_width: int,
    unit_length: bool,
    keep_memory: bool,
    keep_states: bool,
    parallel: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last memory, and per chunk for the gradient: the state before it, transposed, corrections, pairs,
    and factors. Unwanted tensors are empty."""
    rule = _rule(mixed_BTC, log_decay_BTH, beta_BTH, num_heads, num_key_heads, key_width, unit_length, parallel)
    output, last, *kept = outputs = _forward_outputs(rule, keep_memory, keep_states)
    states = tuple(kept) if keep_states else None
    forward(rule, contiguous(memory_BHKV), output, last if keep_memory else None, states)  # pyright: ignore[reportArgumentType]
    return outputs  # pyright: ignore[reportReturnType]


@custom_op(
    "gated_delta_rule_backward",
    lambda mixed, log_decay, beta, states, corrections, pairs, factors, of_y, of_last, heads, groups, keys, unit,
    of_memory, parallel: (
        *(x.new_empty(x.shape) for x in (mixed, log_decay, beta)),
        _memory(DeltaRule(mixed, log_decay, beta, heads, groups, keys, unit), of_memory),
    ),
    flops=lambda mixed, log_decay, beta, states, corrections, pairs, factors, of_y, *_: (
        12 * of_y[0] * of_y[1] * of_y[2] * of_y[3] * states[-1]
    ),
)  # fmt: skip
def gated_delta_rule_backward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    states: Tensor,
    corrections: Tensor,
    pairs: Tensor,
    factors: Tensor,
    gradient_BTHV: Tensor,
    last_gradient_BHKV: Tensor | None,
    num_heads: int,
    num_key_heads: int,
    key_width: int,
    unit_length: bool,
    of_memory: bool,
    parallel: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without `of_memory` the gradient of the first memory is empty."""
    rule = _rule(mixed_BTC, log_decay_BTH, beta_BTH, num_heads, num_key_heads, key_width, unit_length, parallel)
    kept, of_first = (states, corrections, pairs, factors), _memory(rule, of_memory)
    ends = contiguous(last_gradient_BHKV), of_first if of_memory else None
    return *backward(rule, kept, gradient_BTHV.contiguous(), *ends), of_first


@gradient_of(gated_delta_rule_forward, unsaved=(3,), keeps=slice(2, None))
def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *shape, keep_memory, _keep_states, parallel = ctx.settings
    saved = mixed, log_decay, _beta, states, *_kept = ctx.saved_tensors
    if gradient is None:
        gradient = mixed.new_zeros(*log_decay.shape, states.shape[2])
    last_gradient, of_memory = last_gradient if keep_memory else None, ctx.shapes[0] is not None
    gradients = gated_delta_rule_backward(*saved, gradient, last_gradient, *shape, of_memory, parallel)
    return *gradients[:3], gradients[3] if of_memory else None
