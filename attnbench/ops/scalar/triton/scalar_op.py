"""The recurrence of scalar_kernels.py as one operator on packed inputs, with its gradient.

Forward, a program walks a segment of a head and stores the state before each chunk. Backward, a program walks back for
the states' gradients, and a kernel computes all other gradients. If a sequence has several segments, each is walked for
its sum first, and a kernel carries the states between them.
"""

from typing import Any

import torch
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import contiguous, custom_op, gradient_of, without_empty
from attnbench.ops.scalar.triton.scalar_launch import ScalarDecay, backward, forward
from attnbench.settings.errors import UserError

DTYPES = (torch.bfloat16, torch.float32)


def scalar_decay(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor | None,
    own_BTH: Tensor | None,
    memory_BHKV: Tensor | None,
    *,
    num_groups: int,
    key_width: int,
    scale: float,
    keep_memory: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute S_t = a_t S_{t-1} + w_t k_t v_t^T, y_t = scale × S_t^T q_t, and with `own_BTH` y_t = scale × (a_t
    S_{t-1}^T q_t + o_t (q_t . k_t) v_t); (B, T, H, V) in the dtype of `mixed_BTC`.

    Args:
        mixed_BTC: packed query, key and value, (GK | GK | HV), in bfloat16 or float32; K and V are multiples of 16, K
            at most 128. Head g of query and key serves the value's heads g H/G to (g + 1) H/G - 1.
        log_decay_BTH: log a_t <= 0; float32, as the weights and the memory.
        write_BTH, own_BTH: w_t, None for 1; o_t, None for w_t.
    """
    if mixed_BTC.dtype not in DTYPES:
        raise UserError(
            f"attn.backend=triton: its kernels take bfloat16 and float32, not {mixed_BTC.dtype}; choose "
            "attn.backend=torch"
        )
    assert key_width in range(16, 129, 16), key_width
    assert (mixed_BTC.shape[2] - 2 * num_groups * key_width) // log_decay_BTH.shape[2] % 16 == 0
    memory_BHVK = None if memory_BHKV is None else memory_BHKV.mT
    gates = (log_decay_BTH, write_BTH, own_BTH)
    y_BTHV, last_BHVK, _ = scalar_decay_forward(
        mixed_BTC, *gates, memory_BHVK, num_groups, key_width, scale, keep_memory, torch.is_grad_enabled()
    )
    return y_BTHV, last_BHVK.mT if keep_memory else None


def _rule(mixed: Tensor, log_decay: Tensor, write: Tensor | None, own: Tensor | None, *shape: Any) -> ScalarDecay:
    return ScalarDecay(mixed.contiguous(), log_decay.contiguous(), contiguous(write), contiguous(own), *shape)


def _forward_outputs(rule: ScalarDecay, keep_memory: bool, keep_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    mixed, nothing = rule.mixed, (0,)
    batch, heads = mixed.shape[0], rule.num_heads
    return (
        mixed.new_empty(batch, rule.length, heads, rule.value_width),
        rule.states().unflatten(0, (batch, heads)) if keep_memory else rule.log_decay.new_empty(nothing),
        rule.states(rule.num_chunks, dtype=mixed.dtype).unflatten(0, (batch, heads))
        if keep_states else mixed.new_empty(nothing),
    )  # fmt: skip


def _backward_outputs(
    rule: ScalarDecay, of_decay: bool, of_memory: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rates, wanted = rule.log_decay, (of_decay, rule.write is not None, rule.own is not None)
    of_decays, of_write, of_own = (rates.new_empty(rates.shape if is_wanted else (0,)) for is_wanted in wanted)
    of_first = rule.states().unflatten(0, (-1, rule.num_heads)) if of_memory else rates.new_empty((0,))
    return rule.mixed.new_empty(rule.mixed.shape), of_decays, of_write, of_own, of_first


@custom_op(
    "scalar_decay_forward",
    lambda mixed, log_decay, write, own, memory, groups, keys, scale, *kept: _forward_outputs(
        ScalarDecay(mixed, log_decay, write, own, groups, keys, scale), *kept
    ),
    # As the recurrence: 2KV per position and head for each of the outer product and S^T q.
    flops=lambda mixed, log_decay, write, own, memory, groups, keys, *_: (
        4 * mixed[0] * mixed[1] * keys * (mixed[2] - 2 * groups * keys)
    ),
)
def scalar_decay_forward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor | None,
    own_BTH: Tensor | None,
    memory_BHVK: Tensor | None,
    num_groups: int,
    key_width: int,
    scale: float,
    keep_memory: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last memory, transposed, and the states before every chunk. Unwanted tensors are empty."""
    rule = _rule(mixed_BTC, log_decay_BTH, write_BTH, own_BTH, num_groups, key_width, scale)
    outputs = y_BTHV, last, states = _forward_outputs(rule, keep_memory, keep_states)
    forward(rule, contiguous(memory_BHVK), y_BTHV, last if keep_memory else None, states if keep_states else None)
    return outputs


@custom_op(
    "scalar_decay_backward",
    lambda mixed, log_decay, write, own, states, of_y, of_last, groups, keys, scale, *wanted: _backward_outputs(
        ScalarDecay(mixed, log_decay, write, own, groups, keys, scale), *wanted
    ),
    flops=lambda mixed, log_decay, write, own, states, of_y, *_: 8 * of_y[0] * of_y[1] * of_y[2] * of_y[3] * states[-1],
)
def scalar_decay_backward(
    mixed_BTC: Tensor,
    log_decay_BTH: Tensor,
    write_BTH: Tensor | None,
    own_BTH: Tensor | None,
    states: Tensor,
    gradient_BTHV: Tensor,
    last_gradient_BHVK: Tensor | None,
    num_groups: int,
    key_width: int,
    scale: float,
    of_decay: bool,
    of_memory: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of mixed, log decay, both weights and the first memory, transposed; empty for weights that are
    None, and without `of_decay` and `of_memory`."""
    rule = _rule(mixed_BTC, log_decay_BTH, write_BTH, own_BTH, num_groups, key_width, scale)
    outputs = _backward_outputs(rule, of_decay, of_memory)
    *of_inputs, of_first = without_empty(*outputs)
    ends = contiguous(last_gradient_BHVK), of_first
    backward(rule, states, gradient_BTHV.contiguous(), *ends, tuple(of_inputs))
    return outputs


@gradient_of(scalar_decay_forward, unsaved=(4,), keeps=slice(2, 3))
def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    saved = mixed, log_decay, *_, states = ctx.saved_tensors
    *shape, keep_memory, _ = ctx.settings
    if gradient is None:
        gradient = mixed.new_zeros(*log_decay.shape, states.shape[-2])
    # Constant decays, as a retention's, need no sums.
    of_decay, of_memory = ctx.needs_input_grad[1], ctx.shapes[0] is not None
    last_gradient = last_gradient if keep_memory else None
    gradients = scalar_decay_backward(*saved, gradient, last_gradient, *shape, of_decay, of_memory)
    return tuple(without_empty(*gradients))
