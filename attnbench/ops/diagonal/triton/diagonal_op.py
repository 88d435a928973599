"""The delta rule, or the plain sum, with a decay a key channel, as one operator with its gradient. Its definition is
`diagonal_step` in ops/diagonal/diagonal_decay.py; chunk by chunk it is written out in chunk.py."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attnbench.ops.common.triton.batching import join_the_batch
from attnbench.ops.common.triton.launching import register_fake
from attnbench.ops.diagonal.triton.diagonal_launch import (
    DiagonalRule,
    Gradients,
    Kept,
    Prepared,
    backward,
    forward,
    in_rows,
)
from attnbench.settings.errors import UserError

DTYPES = (torch.bfloat16, torch.float32)


def diagonal_decay(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    reader_BTHK: Tensor | None = None,
    beta_BTH: Tensor | None = None,
    memory_BHKV: Tensor | None = None,
    *,
    keep_memory: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Per head, from the memory given or from zeros:

        S_t = (I - k_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t

    r = 0 and u = v; with a reader r is that, and u = v; with beta r = beta k and u = beta v. Never with both.

    Args:
        query_BTHK: scaled, in bfloat16 or float32, as key, value and reader are; K is 16, 32, 64 or 128, V a multiple
            of 16.
        log_decay_BTHK: log a_t, not positive; float32, as beta and memory are.
        keep_memory: whether the last memory is wanted.

    Returns:
        y (B, T, H, V) in the dtype of the value, and the last memory or None.

    Raises:
        UserError: a dtype that these kernels do not have.
    """
    if query_BTHK.dtype not in DTYPES:
        raise UserError(
            f"attn.backend=triton: its kernels take bfloat16 and float32, not {query_BTHK.dtype}; "
            "choose attn.backend=torch"
        )
    assert reader_BTHK is None or beta_BTH is None
    assert query_BTHK.shape[-1] in (16, 32, 64, 128), query_BTHK.shape
    assert value_BTHV.shape[-1] % 16 == 0, value_BTHV.shape
    output_BTHV, last_BHKV, *_ = diagonal_decay_forward(
        query_BTHK, key_BTHK, value_BTHV, log_decay_BTHK.float(), reader_BTHK,
        None if beta_BTH is None else beta_BTH.float(), memory_BHKV, keep_memory, torch.is_grad_enabled(),
    )  # fmt: skip
    return output_BTHV, last_BHKV if keep_memory else None


@torch.library.custom_op("attnbench::diagonal_decay_forward", mutates_args=())
def diagonal_decay_forward(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    reader_BTHK: Tensor | None,
    beta_BTH: Tensor | None,
    memory_BHKV: Tensor | None,
    keep_memory: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, the last memory, and what the gradient needs of every chunk of every sequence and head: the tensors of
    `Prepared` and `Kept`. What is not kept is empty."""
    rule = _rule(query_BTHK, key_BTHK, value_BTHV, log_decay_BTHK, reader_BTHK, beta_BTH)
    outputs = _forward_outputs(rule, keep_memory, keep_states)
    output, last = outputs[:2]
    prepared = Prepared(*outputs[2:8]) if keep_states else rule.empty_prepared()
    kept = Kept(*outputs[8:]) if keep_states else None
    memory = None if memory_BHKV is None else memory_BHKV.contiguous()
    forward(rule, memory, output, last if keep_memory else None, prepared, kept)
    return outputs


@torch.library.custom_op("attnbench::diagonal_decay_backward", mutates_args=())
def diagonal_decay_backward(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    reader_BTHK: Tensor | None,
    beta_BTH: Tensor | None,
    sums: Tensor,
    totals: Tensor,
    asking: Tensor,
    reading: Tensor,
    leaving: Tensor,
    pairs: Tensor,
    states: Tensor,
    corrections: Tensor,
    gradient_BTHV: Tensor,
    last_gradient_BHKV: Tensor | None,
    of_memory: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value, log decay, reader, beta and the first memory; of what is not there, and
    of the memory unless `of_memory`, empty ones."""
    rule = _rule(query_BTHK, key_BTHK, value_BTHV, log_decay_BTHK, reader_BTHK, beta_BTH)
    gradients = _empty_gradients(rule, of_memory)
    last = None if last_gradient_BHKV is None else last_gradient_BHKV.contiguous()
    prepared, kept = Prepared(sums, totals, asking, reading, leaving, pairs), Kept(states, corrections)
    backward(rule, prepared, kept, gradient_BTHV.contiguous(), last, _without_empty(gradients))
    return gradients


def _rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, reader: Tensor | None, beta: Tensor | None
) -> DiagonalRule:
    reader, beta = (None if x is None else x.contiguous() for x in (reader, beta))
    return DiagonalRule(in_rows(query), in_rows(key), in_rows(value), log_decay.contiguous(), reader, beta)


def _empty_memory(rule: DiagonalRule, is_wanted: bool) -> Tensor:
    shape = (rule.query.shape[0], rule.num_heads, rule.key_width, rule.value_width) if is_wanted else (0,)
    return rule.log_decay.new_empty(shape)


def _forward_outputs(
    rule: DiagonalRule, keep_memory: bool, keep_states: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ends = rule.value.new_empty(rule.value.shape), _empty_memory(rule, keep_memory)
    if keep_states:
        return *ends, *rule.empty_prepared(), *rule.empty_kept()  # pyright: ignore[reportReturnType]
    nothing = [rule.query.new_empty(0) for _ in range(len(Prepared._fields) + len(Kept._fields))]
    return *ends, *nothing  # pyright: ignore[reportReturnType]


def _empty_gradients(
    rule: DiagonalRule, of_memory: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    optional = (rule.query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (rule.reader, rule.beta))
    always = (x.new_empty(x.shape) for x in (rule.query, rule.key, rule.value, rule.log_decay))
    return *always, *optional, _empty_memory(rule, of_memory)  # pyright: ignore[reportReturnType]


def _without_empty(gradients: tuple[Tensor, ...]) -> Gradients:
    """Return them with None for those that are not wanted."""
    always, optional = gradients[:4], gradients[4:]
    return Gradients(*always, *(x if x.numel() else None for x in optional))


@register_fake(diagonal_decay_forward)
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, reader: Tensor | None, beta: Tensor | None,
      memory: Tensor | None, keep_memory: bool, keep_states: bool) -> Any:  # fmt: skip
    return _forward_outputs(_rule(query, key, value, log_decay, reader, beta), keep_memory, keep_states)


@register_fake(diagonal_decay_backward)
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, reader: Tensor | None, beta: Tensor | None,
      *kept_and_gradients: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(_rule(query, key, value, log_decay, reader, beta), kept_and_gradients[-1])


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, memory, ctx.kept_memory, _ = inputs
    ctx.of_memory = memory is not None
    # Zeros for the gradients of what nobody read would cost as much as much of the rest.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    value, reader, beta = saved[2], saved[4], saved[5]
    gradient = torch.zeros_like(value) if gradient is None else gradient
    last_gradient = last_gradient if ctx.kept_memory else None
    *always, of_reader, of_beta, of_memory = diagonal_decay_backward(*saved, gradient, last_gradient, ctx.of_memory)
    pairs = ((reader, of_reader), (beta, of_beta))
    optional = (None if x is None else of_x for x, of_x in pairs)
    return *always, *optional, of_memory if ctx.of_memory else None, None, None


diagonal_decay_forward.register_autograd(_gradient, setup_context=_save_for_gradient)


join_the_batch(diagonal_decay_forward)
join_the_batch(diagonal_decay_backward)


@register_flop_formula(torch.ops.attnbench.diagonal_decay_forward)
def _(query_shape: Any, key_shape: Any, value_shape: Any, log_decay_shape: Any, reader_shape: Any, beta_shape: Any,
      *_: Any, **__: Any) -> int:  # fmt: skip
    """Count as the recurrence does it: 2KV a position and head for each of S^T r, the outer product and S^T q."""
    batch, length, heads, key_width = query_shape
    num_products = 2 if reader_shape is None and beta_shape is None else 3
    return 2 * num_products * batch * length * heads * key_width * value_shape[-1]


@register_flop_formula(torch.ops.attnbench.diagonal_decay_backward)
def _(query_shape: Any, key_shape: Any, value_shape: Any, log_decay_shape: Any, reader_shape: Any, beta_shape: Any,
      *_: Any, **__: Any) -> int:  # fmt: skip
    """Twice the forward's."""
    batch, length, heads, key_width = query_shape
    num_products = 2 if reader_shape is None and beta_shape is None else 3
    return 4 * num_products * batch * length * heads * key_width * value_shape[-1]
