"""The gated delta rule as one operator on what a projection gives, with its gradient. Its definition is
`recurrent_gated_delta_rule` in mixers/gated_deltanet.py; chunk by chunk it is written out in delta_rule_chunk.py."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnbench.errors import UserError
from attnbench.kernels.delta_rule_walk import walk_backward_kernel, walk_forward_kernel

CHUNK = 64
KEY_WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)

LAUNCH = {"walk_forward": (4, 1), "walk_backward": (8, 1)}
"""Warps of a program and stages of its loads."""


def gated_delta_rule(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None = None,
    *,
    num_heads: int,
    key_width: int,
    unit_length: bool,
    keep_memory: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Per head, from the memory given or from zeros:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    Args:
        mixed_BTC: query, key and value side by side, (HK | HK | HV), in bfloat16 or float32.
        log_decay_BTH: log a_t, not positive; float32, as beta and memory are.
        unit_length: divide each query and key by its length first.
        keep_memory: whether the last memory is wanted.

    Returns:
        y (B, T, H, V) in the dtype of `mixed_BTC`, and the last memory or None.

    Raises:
        UserError: a dtype or a width these kernels do not have.
    """
    value_width = mixed_BTC.shape[-1] // num_heads - 2 * key_width
    require_widths("gated_delta_rule", key_width, value_width)
    if mixed_BTC.dtype not in DTYPES:
        raise UserError(
            f"gated_delta_rule: the kernels take bfloat16 and float32, not {mixed_BTC.dtype}; choose attn.backend=torch"
        )
    output_BTHV, last_BHKV, _, _ = gated_delta_rule_forward(
        mixed_BTC, log_decay_BTH.float(), beta_BTH.float(), memory_BHKV, num_heads, key_width, unit_length,
        keep_memory, torch.is_grad_enabled(),
    )  # fmt: skip
    return output_BTHV, last_BHKV if keep_memory else None


def has_widths(key_width: int, value_width: int) -> bool:
    """Whether there are kernels for so many channels a head: K a power of 2 in 16..128, V a multiple of 16."""
    return key_width in KEY_WIDTHS and value_width > 0 and value_width % 16 == 0


def require_widths(setting: str, key_width: int, value_width: int) -> None:
    """Raises UserError, with the way out, unless `has_widths`."""
    if not has_widths(key_width, value_width):
        raise UserError(
            f"{setting}: the kernels take heads of {', '.join(map(str, KEY_WIDTHS))} key channels and a multiple of 16 "
            f"value channels, not {key_width} and {value_width}; choose attn.backend=torch"
        )


@torch.library.custom_op("attnbench::gated_delta_rule_forward", mutates_args=())
def gated_delta_rule_forward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    memory_BHKV: Tensor | None,
    num_heads: int,
    key_width: int,
    unit_length: bool,
    keep_memory: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the last memory, and for the gradient the states before the chunks (X, N, K, V) and the chunks' inverses
    (X, N, C, C), both in the dtype of `mixed_BTC`. What is not kept is empty."""
    outputs = _forward_outputs(mixed_BTC, num_heads, key_width, keep_memory, keep_states)
    output_BTHV, last, states, inverses = outputs
    batch, length, _ = mixed_BTC.shape
    value_width = output_BTHV.shape[-1]
    values = _value_block(value_width)
    num_warps, num_stages = LAUNCH["walk_forward"]
    walk_forward_kernel[(batch * num_heads, value_width // values)](
        mixed_BTC.contiguous(), log_decay_BTH.contiguous(), beta_BTH.contiguous(),
        None if memory_BHKV is None else memory_BHKV.contiguous(), output_BTHV, last if keep_memory else None,
        states if keep_states else None, inverses if keep_states else None, length, num_heads, key_width**-0.5,
        C=CHUNK, K=key_width, V=value_width, VALUES=values, UNIT=unit_length,
        PRECISION=_precision(mixed_BTC), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return outputs


@torch.library.custom_op("attnbench::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    states: Tensor,
    inverses: Tensor,
    gradient_BTHV: Tensor,
    last_gradient_BHKV: Tensor | None,
    num_heads: int,
    key_width: int,
    unit_length: bool,
    of_memory: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of mixed, of log decay, of beta and, if `of_memory`, of the first memory (else empty)."""
    mixed_BTC = mixed_BTC.contiguous()
    batch, length, channels = mixed_BTC.shape
    value_width = gradient_BTHV.shape[-1]
    values = _value_block(value_width)
    num_blocks, shared = value_width // values, 2 * num_heads * key_width
    of_mixed = torch.empty_like(mixed_BTC)
    of_shared = of_mixed if num_blocks == 1 else log_decay_BTH.new_empty(num_blocks, batch, length, shared)
    of_log_decay, of_beta = (log_decay_BTH.new_empty(num_blocks, batch, length, num_heads) for _ in range(2))
    of_first = log_decay_BTH.new_empty(_memory_shape(batch, num_heads, key_width, value_width, of_memory))
    num_warps, num_stages = LAUNCH["walk_backward"]
    walk_backward_kernel[(batch * num_heads, num_blocks)](
        mixed_BTC, log_decay_BTH.contiguous(), beta_BTH.contiguous(), states, inverses, gradient_BTHV.contiguous(),
        None if last_gradient_BHKV is None else last_gradient_BHKV.contiguous(), of_mixed, of_shared, of_log_decay,
        of_beta, of_first if of_memory else None, length, batch * length, num_heads, of_shared.shape[-1],
        key_width**-0.5, C=CHUNK, K=key_width, V=value_width, VALUES=values, UNIT=unit_length,
        PRECISION=_precision(mixed_BTC), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_blocks == 1:
        return of_mixed, of_log_decay[0], of_beta[0], of_first
    of_mixed[..., :shared] = of_shared.sum(0)
    return of_mixed, of_log_decay.sum(0), of_beta.sum(0), of_first


def _value_block(value_width: int) -> int:
    """Value channels of a program: the largest power of 2 up to 64 that divides them."""
    return min(64, value_width & -value_width)


def _precision(x: Tensor) -> str:
    """How float32 is multiplied: to its own digits, or where the inputs have fewer, to those of TF32."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _memory_shape(batch: int, num_heads: int, key_width: int, value_width: int, kept: bool) -> tuple[int, ...]:
    return (batch, num_heads, key_width, value_width) if kept else (0,)


def _forward_outputs(
    mixed: Tensor, num_heads: int, key_width: int, keep_memory: bool, keep_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, channels = mixed.shape
    value_width = channels // num_heads - 2 * key_width
    chunks = (batch * num_heads, -(-length // CHUNK))
    return (
        mixed.new_empty(batch, length, num_heads, value_width),
        mixed.new_empty(_memory_shape(batch, num_heads, key_width, value_width, keep_memory), dtype=torch.float32),
        mixed.new_empty((*chunks, key_width, value_width) if keep_states else (0,)),
        mixed.new_empty((*chunks, CHUNK, CHUNK) if keep_states else (0,)),
    )


@gated_delta_rule_forward.register_fake
def _(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor | None, num_heads: int, key_width: int,
      unit_length: bool, keep_memory: bool, keep_states: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward_outputs(mixed, num_heads, key_width, keep_memory, keep_states)


@gated_delta_rule_backward.register_fake
def _(mixed: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, inverses: Tensor, gradient: Tensor,
      last_gradient: Tensor | None, num_heads: int, key_width: int, unit_length: bool,
      of_memory: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape = _memory_shape(mixed.shape[0], num_heads, key_width, gradient.shape[-1], of_memory)
    return (
        mixed.new_empty(mixed.shape),
        log_decay.new_empty(log_decay.shape),
        beta.new_empty(beta.shape),
        log_decay.new_empty(shape),
    )


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mixed, log_decay, beta, memory, ctx.num_heads, ctx.key_width, ctx.unit_length, _, _ = inputs
    ctx.of_memory = memory is not None
    # Zeros for the gradients of what nobody read would cost more than reading and writing everything else.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mixed, log_decay, beta, *output[2:])


def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    mixed, log_decay, beta, states, inverses = ctx.saved_tensors
    if gradient is None:
        value_width = mixed.shape[-1] // ctx.num_heads - 2 * ctx.key_width
        gradient = mixed.new_zeros(*mixed.shape[:2], ctx.num_heads, value_width)
    of_mixed, of_log_decay, of_beta, of_memory = gated_delta_rule_backward(
        mixed, log_decay, beta, states, inverses, gradient, last_gradient,
        ctx.num_heads, ctx.key_width, ctx.unit_length, ctx.of_memory,
    )  # fmt: skip
    return of_mixed, of_log_decay, of_beta, of_memory if ctx.of_memory else None, None, None, None, None, None


gated_delta_rule_forward.register_autograd(_gradient, setup_context=_save_for_gradient)


def _fold(info: Any, tensors: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> list[Any]:
    """The mapped axis joins the first one, the batch: its sequences are as independent. What is no tensor stays."""
    folded = []
    for x, mapped in zip(tensors, in_dims, strict=True):
        if isinstance(x, Tensor):
            x = x.expand(info.batch_size, *x.shape) if mapped is None else x.movedim(mapped, 0)
            x = x.flatten(0, 1)
        folded.append(x)
    return folded


def _unfold(info: Any, outputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """An output that was not kept has nothing to divide, and stays empty."""
    return tuple(x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) for x in outputs), (0,) * len(outputs)


@gated_delta_rule_forward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return _unfold(info, gated_delta_rule_forward(*_fold(info, inputs, in_dims)))


@gated_delta_rule_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return _unfold(info, gated_delta_rule_backward(*_fold(info, inputs, in_dims)))


@register_flop_formula(torch.ops.attnbench.gated_delta_rule_forward)
def _(mixed_shape: Any, log_decay_shape: Any, beta_shape: Any, memory_shape: Any, num_heads: int, key_width: int,
      *_: Any, **__: Any) -> int:  # fmt: skip
    """As the recurrence does it: 2KV a position and head for each of M^T k, the outer product and M^T q."""
    batch, length, channels = mixed_shape
    return 6 * batch * length * key_width * (channels - 2 * num_heads * key_width)


@register_flop_formula(torch.ops.attnbench.gated_delta_rule_backward)
def _(mixed_shape: Any, log_decay_shape: Any, beta_shape: Any, states_shape: Any, inverses_shape: Any,
      gradient_shape: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    """Twice the forward's."""
    batch, length, num_heads, value_width = gradient_shape
    return 12 * batch * length * num_heads * states_shape[-2] * value_width
