"""The recurrence of diagonal_chunk.py as one operator with its gradient."""

from typing import Any

import torch
from torch import Tensor

from attnbench.ops.common.triton.custom_ops import contiguous, custom_op, gradient_of, without_empty
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
    """Compute `diagonal_step` of ops/diagonal/diagonal_decay.py with e = k; (B, T, H, V) in the dtype of the value.

    r = 0 and u = v; with `reader_BTHK` r is that, and u = v; with `beta_BTH` r = beta k and u = beta v. Not both.

    Args:
        query_BTHK: scaled; bfloat16 or float32, like key, value and reader; K is 16, 32, 64 or 128, V a multiple of 16.
        log_decay_BTHK: log a_t <= 0; float32, as beta and memory.
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


def _rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, reader: Tensor | None, beta: Tensor | None
) -> DiagonalRule:
    gates = log_decay.contiguous(), contiguous(reader), contiguous(beta)
    return DiagonalRule(in_rows(query), in_rows(key), in_rows(value), *gates)


def _memory(rule: DiagonalRule, is_wanted: bool) -> Tensor:
    shape = (rule.query.shape[0], rule.num_heads, rule.key_width, rule.value_width) if is_wanted else (0,)
    return rule.log_decay.new_empty(shape)


def _forward_outputs(rule: DiagonalRule, keep_memory: bool, keep_states: bool) -> tuple[Tensor, ...]:
    ends = rule.value.new_empty(rule.value.shape), _memory(rule, keep_memory)
    if keep_states:
        return *ends, *rule.empty_prepared(), *rule.empty_kept()
    return *ends, *(rule.query.new_empty(0) for _ in (*Prepared._fields, *Kept._fields))


def _gradients(rule: DiagonalRule, of_memory: bool) -> tuple[Tensor, ...]:
    optional = (rule.query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (rule.reader, rule.beta))
    always = (x.new_empty(x.shape) for x in (rule.query, rule.key, rule.value, rule.log_decay))
    return *always, *optional, _memory(rule, of_memory)


def _flops(query: Any, key: Any, value: Any, log_decay: Any, reader: Any, beta: Any, *_: Any) -> int:
    """Count the recurrence: 2KV per position and head for each of S^T r, the outer product and S^T q."""
    batch, length, heads, key_width = query
    num_products = 2 if reader is None and beta is None else 3
    return 2 * num_products * batch * length * heads * key_width * value[-1]


@custom_op("diagonal_decay_forward", lambda *x: _forward_outputs(_rule(*x[:6]), *x[7:]), flops=_flops)
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
    """Return y, the last memory, and for the gradient the tensors of `Prepared` and `Kept`; unwanted ones are empty."""
    rule = _rule(query_BTHK, key_BTHK, value_BTHV, log_decay_BTHK, reader_BTHK, beta_BTH)
    output, last, *states = outputs = _forward_outputs(rule, keep_memory, keep_states)
    prepared = Prepared(*states[:6]) if keep_states else rule.empty_prepared()
    kept = Kept(*states[6:]) if keep_states else None
    forward(rule, contiguous(memory_BHKV), output, last if keep_memory else None, prepared, kept)
    return outputs  # pyright: ignore[reportReturnType]


@custom_op(
    "diagonal_decay_backward", lambda *x: _gradients(_rule(*x[:6]), x[-1]), flops=lambda *x: 2 * _flops(*x)
)  # fmt: skip
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
    """Gradients of inputs that are None are empty."""
    rule = _rule(query_BTHK, key_BTHK, value_BTHV, log_decay_BTHK, reader_BTHK, beta_BTH)
    outputs, last = _gradients(rule, of_memory), contiguous(last_gradient_BHKV)
    prepared, kept = Prepared(sums, totals, asking, reading, leaving, pairs), Kept(states, corrections)
    gradients = Gradients(*outputs[:4], *without_empty(*outputs[4:]))
    backward(rule, prepared, kept, gradient_BTHV.contiguous(), last, gradients)
    return outputs  # pyright: ignore[reportReturnType]


@gradient_of(diagonal_decay_forward, unsaved=(6,), keeps=slice(2, None))
def _gradient(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved, (keep_memory, _), (memory_shape,) = ctx.saved_tensors, ctx.settings, ctx.shapes
    gradient = torch.zeros_like(saved[2]) if gradient is None else gradient
    last_gradient = last_gradient if keep_memory else None
    gradients = diagonal_decay_backward(*saved, gradient, last_gradient, memory_shape is not None)
    given = zip((*saved[:6], memory_shape), gradients, strict=True)
    return tuple(None if x is None else of_x for x, of_x in given)
