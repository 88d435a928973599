"""Linear attention with one decay a head as one operator on what a projection gives, with its gradient. Its definition
is `scalar_step` in ops/scalar/scalar_decay.py; chunk by chunk it is written out in kernels.py.

Forward, a program walks a segment of a head chunk by chunk and keeps the state before each; backward, one does so from
the last chunk for the states' gradients, and another kernel takes all gradients of all chunks at once. Where there are
heads enough to fill a GPU, the segment is the whole sequence. Otherwise it is cut into several: each is walked alone
first, for its state, these are carried from segment to segment, and then all walk at once from what they begin with.

In units of what a query, a key or a value takes, with as many channels each and as many of them as positions a chunk,
forward reads 3 and writes 2, with segments reads 2 more; backward reads 2 and 6, writes 1 and 3, with segments reads 2
more. That is 17 units or 21 where 11 is the least, each input read and each output and gradient written once.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnbench.ops.common.triton.batching import join_the_batch
from attnbench.ops.common.triton.launching import register_fake
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
    """Per head, from the memory given or from zeros:

        S_t = a_t S_{t-1} + w_t k_t v_t^T,   y_t = scale × S_t^T q_t

    and where `own_BTH` is given, y_t = scale × (a_t S_{t-1}^T q_t + o_t (q_t . k_t) v_t).

    Args:
        mixed_BTC: query, key and value side by side, (GK | GK | HV), in bfloat16 or float32; K and V are multiples of
            16, K at most 128. G divides H; head g of query and key serves the value's heads g H/G to (g + 1) H/G - 1.
        log_decay_BTH: log a_t, not positive; float32, as the weights and the memory are.
        write_BTH: w_t; None for 1.
        own_BTH: o_t; None for w_t.
        keep_memory: whether the last memory is wanted.

    Returns:
        y (B, T, H, V) in the dtype of `mixed_BTC`, and the last memory or None.

    Raises:
        UserError: a dtype that these kernels do not have.
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


@torch.library.custom_op("attnbench::scalar_decay_forward", mutates_args=())
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
    """y, the last memory, transposed, and the states before every chunk of every sequence and head. What is not kept is
    empty."""
    rule = _rule(mixed_BTC, log_decay_BTH, write_BTH, own_BTH, num_groups, key_width, scale)
    outputs = y_BTHV, last, states = _forward_outputs(rule, keep_memory, keep_states)
    forward(rule, _contiguous(memory_BHVK), y_BTHV, last if keep_memory else None, states if keep_states else None)
    return outputs


@torch.library.custom_op("attnbench::scalar_decay_backward", mutates_args=())
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
    """Return gradients of mixed, of log decay, of both weights and of the first memory, transposed; empty are those of
    weights that are None, and without `of_decay` and `of_memory` those of the log decay and the memory."""
    rule = _rule(mixed_BTC, log_decay_BTH, write_BTH, own_BTH, num_groups, key_width, scale)
    outputs = _backward_outputs(rule, of_decay, of_memory)
    *of_inputs, of_first = _without_empty(outputs)
    backward(
        rule, states, gradient_BTHV.contiguous(), _contiguous(last_gradient_BHVK), of_first, tuple(of_inputs)
    )  # fmt: skip
    return outputs


def _without_empty(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """None in place of what is empty, as nobody wants it."""
    return [x if x.numel() else None for x in tensors]


def _rule(mixed: Tensor, log_decay: Tensor, write: Tensor | None, own: Tensor | None, *shape: Any) -> ScalarDecay:
    return ScalarDecay(mixed.contiguous(), log_decay.contiguous(), _contiguous(write), _contiguous(own), *shape)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


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


@register_fake(scalar_decay_forward)
def _(mixed: Tensor, log_decay: Tensor, write: Tensor | None, own: Tensor | None, memory: Tensor | None,
      num_groups: int, key_width: int, scale: float, keep_memory: bool,
      keep_states: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rule = ScalarDecay(mixed, log_decay, write, own, num_groups, key_width, scale)
    return _forward_outputs(rule, keep_memory, keep_states)


@register_fake(scalar_decay_backward)
def _(mixed: Tensor, log_decay: Tensor, write: Tensor | None, own: Tensor | None, states: Tensor, gradient: Tensor,
      last_gradient: Tensor | None, num_groups: int, key_width: int, scale: float, of_decay: bool,
      of_memory: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rule = ScalarDecay(mixed, log_decay, write, own, num_groups, key_width, scale)
    return _backward_outputs(rule, of_decay, of_memory)


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mixed, log_decay, write, own, memory, *ctx.shape, ctx.kept_memory, _ = inputs
    ctx.of_memory = memory is not None
    # Zeros for the gradients of what nobody read would cost as much as much of the rest.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mixed, log_decay, write, own, output[2])


def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    mixed, log_decay, write, own, states = ctx.saved_tensors
    if gradient is None:
        gradient = mixed.new_zeros(*log_decay.shape, states.shape[-2])
    # Of decays that nothing learns, as a retention's, nothing is summed up.
    of_decay = ctx.needs_input_grad[1]
    gradients = scalar_decay_backward(
        mixed, log_decay, write, own, states, gradient, last_gradient if ctx.kept_memory else None,
        *ctx.shape, of_decay, ctx.of_memory,
    )  # fmt: skip
    return *_without_empty(gradients), *(None,) * 5


scalar_decay_forward.register_autograd(_gradient, setup_context=_save_for_gradient)


join_the_batch(scalar_decay_forward)
join_the_batch(scalar_decay_backward)


@register_flop_formula(torch.ops.attnbench.scalar_decay_forward)
def _(mixed_shape: Any, log_decay_shape: Any, write_shape: Any, own_shape: Any, memory_shape: Any, num_groups: int,
      key_width: int, *_: Any, **__: Any) -> int:  # fmt: skip
    """Count as the recurrence does it: 2KV a position and head for each of the outer product and S^T q."""
    batch, length, channels = mixed_shape
    return 4 * batch * length * key_width * (channels - 2 * num_groups * key_width)


@register_flop_formula(torch.ops.attnbench.scalar_decay_backward)
def _(mixed_shape: Any, log_decay_shape: Any, write_shape: Any, own_shape: Any, states_shape: Any,
      gradient_shape: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    """Twice the forward's."""
    batch, length, num_heads, value_width = gradient_shape
    return 8 * batch * length * num_heads * states_shape[-1] * value_width
