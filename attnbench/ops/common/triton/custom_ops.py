"""Custom operators of torch that launch our kernels, each from one declaration of schema, fake, vmap rule, FLOPs and
gradient, so that torch.compile, CUDA graphs and vmap see through them."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.flop_counter import register_flop_formula

from attnbench.ops.common.triton.launching import register_fake


def custom_op(
    name: str,
    outputs: Callable[..., Any],
    *,
    flops: Callable[..., int] | None = None,
    shared: Collection[int] = (),
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function the operator `attnbench::NAME`, whose schema is the function's signature.

    The first axis of its tensors and of its results is a batch of independent sequences: vmap joins its axis to it.

    Args:
        outputs: takes the function's arguments and returns tensors as the function does, whatever is in them.
        flops: takes the function's arguments, shapes in place of tensors.
        shared: indices of tensors that have no batch axis and are the same for all models that vmap stacks.
    """

    def declare(function: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(f"attnbench::{name}", function, mutates_args=())
        register_fake(operator)(outputs)
        operator.register_vmap(_joining(operator, shared))
        if flops is not None:
            count = flops
            register_flop_formula(getattr(torch.ops.attnbench, name))(lambda *inputs, **_: count(*inputs))
        return operator

    return declare


def gradient_of(
    operator: CustomOpDef, *, unsaved: Collection[int] = (), keeps: slice = slice(0), constant: slice = slice(0)
) -> Callable[[Callable[..., Any]], None]:
    """Make a function `(ctx, *gradients of the outputs)` the gradient of an operator whose tensors come first.

    It returns gradients of the first inputs, or of all: those left out have none. Autograd casts each to its input's
    dtype. A gradient of several outputs that nothing asked for comes as None, because zeros would have to be written
    and read; where all are None the function is not called. Besides torch's attributes, ctx has `settings`, the inputs
    after the tensors, and `shapes` of the unsaved tensors, None for those that are None.

    Args:
        unsaved: indices of tensors that `ctx.saved_tensors` leaves out.
        keeps: outputs that `ctx.saved_tensors` has after the inputs.
        constant: outputs that have no gradient.
    """
    schema = operator._opoverload._schema
    num_tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    saved = [index for index in range(num_tensors) if index not in unsaved]
    num_inputs, is_single = len(schema.arguments), len(schema.returns) == 1

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.settings = inputs[num_tensors:]
        if unsaved:
            ctx.shapes = [None if inputs[index] is None else inputs[index].shape for index in unsaved]
        tensors = [inputs[index] for index in saved]
        if is_single:
            ctx.save_for_backward(*tensors)
            return
        ctx.save_for_backward(*tensors, *output[keeps])
        ctx.mark_non_differentiable(*output[constant])
        ctx.set_materialize_grads(False)

    def register(gradient: Callable[..., Any]) -> None:
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if not is_single and all(x is None for x in gradients):
                return (None,) * num_inputs
            results = gradient(ctx, *gradients)
            results = results if isinstance(results, tuple) else (results,)
            return *results, *(None,) * (num_inputs - len(results))

        operator.register_autograd(backward, setup_context=save)

    return register


def _joining(operator: CustomOpDef, shared: Collection[int]) -> Callable[..., tuple[Any, Any]]:
    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        joined = []
        for index, (x, axis) in enumerate(zip(inputs, in_dims, strict=True)):
            if isinstance(x, Tensor) and index not in shared:
                x = x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0)
                x = x.flatten(0, 1)
            elif axis is not None:
                raise ValueError(f"argument {index} of this operator is one for all stacked models")
            joined.append(x)
        results = operator(*joined)
        if isinstance(results, Tensor):
            return _apart(results, info.batch_size), 0
        return tuple(_apart(x, info.batch_size) for x in results), (0,) * len(results)

    return rule


def _apart(x: Tensor, size: int) -> Tensor:
    # Not -1, which is ambiguous where a result was not asked for and is empty.
    return x.unflatten(0, (size, x.shape[0] // size))


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return the tensor, or None, with its numbers side by side."""
    return None if x is None else x.contiguous()


def without_empty(*tensors: Tensor) -> list[Tensor | None]:
    """Return None in place of empty tensors, which stand in an operator's outputs for tensors that are not wanted."""
    return [x if x.numel() else None for x in tensors]
