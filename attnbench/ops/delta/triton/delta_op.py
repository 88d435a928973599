"""The gated delta rule as one operator on what a projection gives, with its gradient. Its definition is
`delta_step` in ops/delta/delta_rule.py; chunk by chunk it is written out in chunk.py."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnbench.ops.common.triton.batching import join_the_batch
from attnbench.ops.common.triton.launching import register_fake
from attnbench.ops.delta.triton.delta_choice import WIDE, DeltaRule, positions_of_chunk
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
    """Per head, from the memory given or from zeros:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    Args:
        mixed_BTC: query, key and value side by side, (GK | GK | HV), in bfloat16 or float32; K is 16, 32, 64 or
            128, in bfloat16 also 256, V a multiple of 16.
        log_decay_BTH: log a_t, not positive; float32, as beta and memory are.
        unit_length: divide each query and key by its length first.
        num_key_heads: heads of query and key, G, each shared by H / G of the values'; None: as many as of these.
        keep_memory: whether the last memory is wanted.
        parallel: which of two forms runs; None for the rule in choice.py. Changes the speed alone.

    Returns:
        y (B, T, H, V) in the dtype of `mixed_BTC`, and the last memory or None.

    Raises:
        UserError: a dtype that these kernels do not have, or not at such a width.
    """
    if mixed_BTC.dtype not in (DTYPES if key_width <= WIDE else DTYPES[:1]):
        raise UserError(
            f"attn.backend=triton: its kernels take bfloat16 and, up to {WIDE} key channels a head, float32, not "
            f"{mixed_BTC.dtype} at {key_width}; choose attn.backend=torch"
        )
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    value_width = _value_width(mixed_BTC, num_heads, num_key_heads, key_width)
    assert num_heads % num_key_heads == 0, num_key_heads
    assert key_width in (16, 32, 64, 128, 256), key_width
    assert value_width % 16 == 0, value_width
    output_BTHV, last_BHKV, *_ = gated_delta_rule_forward(
        mixed_BTC, log_decay_BTH.float(), beta_BTH.float(), memory_BHKV, num_heads, num_key_heads, key_width,
        unit_length, keep_memory, torch.is_grad_enabled(), parallel,
    )  # fmt: skip
    return output_BTHV, last_BHKV if keep_memory else None


@torch.library.custom_op("attnbench::gated_delta_rule_forward", mutates_args=())
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
    """y, the last memory, and what the gradient needs of every chunk of every sequence and head: the state before it,
    transposed, its corrections, its pairs and its factors, the last in float32. What is not kept is empty."""
    outputs = _forward_outputs(mixed_BTC, num_heads, num_key_heads, key_width, keep_memory, keep_states)
    output, last, *_ = outputs
    kept = outputs[2:] if keep_states else None
    mixed, log_decay, beta = (x.contiguous() for x in (mixed_BTC, log_decay_BTH, beta_BTH))
    rule = DeltaRule(mixed, log_decay, beta, num_heads, num_key_heads, key_width, unit_length, parallel)
    forward(rule, _contiguous(memory_BHKV), output, last if keep_memory else None, kept)
    return outputs


@torch.library.custom_op("attnbench::gated_delta_rule_backward", mutates_args=())
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
    """Return gradients of mixed, of log decay, of beta and, if `of_memory`, of the first memory (else empty)."""
    mixed, log_decay, beta = (x.contiguous() for x in (mixed_BTC, log_decay_BTH, beta_BTH))
    rule = DeltaRule(mixed, log_decay, beta, num_heads, num_key_heads, key_width, unit_length, parallel)
    of_first = log_decay.new_empty(_memory_shape(mixed, num_heads, num_key_heads, key_width, of_memory))
    gradients = backward(
        rule, (states, corrections, pairs, factors), gradient_BTHV.contiguous(), _contiguous(last_gradient_BHKV),
        of_first if of_memory else None,
    )  # fmt: skip
    return *gradients, of_first


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _value_width(mixed: Tensor, num_heads: int, num_key_heads: int, key_width: int) -> int:
    return (mixed.shape[-1] - 2 * num_key_heads * key_width) // num_heads


def _memory_shape(mixed: Tensor, num_heads: int, num_key_heads: int, key_width: int, kept: bool) -> tuple[int, ...]:
    value_width = _value_width(mixed, num_heads, num_key_heads, key_width)
    return (mixed.shape[0], num_heads, key_width, value_width) if kept else (0,)


def _forward_outputs(
    mixed: Tensor, num_heads: int, num_key_heads: int, key_width: int, keep_memory: bool, keep_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, _ = mixed.shape
    value_width = _value_width(mixed, num_heads, num_key_heads, key_width)
    chunk = positions_of_chunk(key_width, value_width, mixed.dtype)
    chunks = (batch * num_heads, (length + chunk - 1) // chunk)

    def of_chunks(*shape: int, dtype: torch.dtype = mixed.dtype) -> Tensor:
        return mixed.new_empty((*chunks, *shape) if keep_states else (0,), dtype=dtype)

    memory = mixed.new_empty(
        _memory_shape(mixed, num_heads, num_key_heads, key_width, keep_memory), dtype=torch.float32
    )
    return (
        mixed.new_empty(batch, length, num_heads, value_width), memory,
        of_chunks(value_width, key_width), of_chunks(chunk, value_width),
        of_chunks(2, chunk, chunk), of_chunks(FACTORS.value, chunk, dtype=torch.float32),
    )  # fmt: skip


@register_fake(gated_delta_rule_forward)
def _(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor | None, num_heads: int, num_key_heads: int,
      key_width: int, unit_length: bool, keep_memory: bool, keep_states: bool,
      parallel: bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward_outputs(mixed, num_heads, num_key_heads, key_width, keep_memory, keep_states)


@register_fake(gated_delta_rule_backward)
def _(mixed: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, corrections: Tensor, pairs: Tensor,
      factors: Tensor, gradient: Tensor, last_gradient: Tensor | None, num_heads: int, num_key_heads: int,
      key_width: int, unit_length: bool, of_memory: bool,
      parallel: bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    of_first = log_decay.new_empty(_memory_shape(mixed, num_heads, num_key_heads, key_width, of_memory))
    return mixed.new_empty(mixed.shape), log_decay.new_empty(log_decay.shape), beta.new_empty(beta.shape), of_first


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mixed, log_decay, beta, memory, *ctx.shape, ctx.kept_memory, _, ctx.parallel = inputs
    ctx.of_memory = memory is not None
    # Zeros for the gradients of what nobody read would cost as much as much of the rest.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mixed, log_decay, beta, *output[2:])


def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    mixed, log_decay, beta, *kept = ctx.saved_tensors
    if gradient is None:
        num_heads, num_key_heads, key_width, _ = ctx.shape
        value_width = _value_width(mixed, num_heads, num_key_heads, key_width)
        gradient = mixed.new_zeros(*mixed.shape[:2], num_heads, value_width)
    of_mixed, of_log_decay, of_beta, of_memory = gated_delta_rule_backward(
        mixed, log_decay, beta, *kept, gradient, last_gradient if ctx.kept_memory else None,
        *ctx.shape, ctx.of_memory, ctx.parallel,
    )  # fmt: skip
    return of_mixed, of_log_decay, of_beta, of_memory if ctx.of_memory else None, *(None,) * 7


gated_delta_rule_forward.register_autograd(_gradient, setup_context=_save_for_gradient)


join_the_batch(gated_delta_rule_forward)
join_the_batch(gated_delta_rule_backward)


@register_flop_formula(torch.ops.attnbench.gated_delta_rule_forward)
def _(mixed_shape: Any, log_decay_shape: Any, beta_shape: Any, memory_shape: Any, num_heads: int,
      num_key_heads: int, key_width: int, *_: Any, **__: Any) -> int:  # fmt: skip
    """Count as the recurrence does it: 2KV a position and head for each of M^T k, the outer product and M^T q."""
    batch, length, channels = mixed_shape
    return 6 * batch * length * key_width * (channels - 2 * num_key_heads * key_width)


@register_flop_formula(torch.ops.attnbench.gated_delta_rule_backward)
def _(mixed_shape: Any, log_decay_shape: Any, beta_shape: Any, states_shape: Any, corrections_shape: Any,
      pairs_shape: Any, factors_shape: Any, gradient_shape: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    """Twice the forward's."""
    batch, length, num_heads, value_width = gradient_shape
    return 12 * batch * length * num_heads * states_shape[-1] * value_width
