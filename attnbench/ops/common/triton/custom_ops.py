"""Custom operators that launch our kernels, each declared with schema, fake, vmap rule, FLOPs and gradient, for
torch.compile, CUDA graphs and vmap."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.flop_counter import register_flop_formula

from attnbench.ops.common.triton.launching import register_fake


def custom_op(
    name: str, outputs: Callable[..., Any], *, flops: Callable[..., int] | None = None, shared: Collection[int] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function the operator `attnbench::NAME`, whose schema is the function's signature.

    The first axis of its tensors and results is a batch of independent sequences, into which vmap folds its own axis.

    Args:
        outputs: from the function's arguments to uninitialised tensors like its results.
        flops: from the function's arguments, with shapes in place of tensors.
        shared: indices of tensors without batch axis that all stacked models share.
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
    """Register a function `(ctx, *gradients of the outputs)` as the gradient of an operator whose tensors come first.

    The function returns the gradients of the leading inputs; the others have none. With several outputs, unused
    gradients are None, because materialising zeros is expensive; if all are None the function is not called. ctx also
    has `settings`, the inputs after the tensors, and `shapes` of the unsaved tensors (None for None).

    Args:
        unsaved: indices of tensors that are left out of `ctx.saved_tensors`.
        keeps: outputs that `ctx.saved_tensors` has after the inputs.
        constant: outputs without gradient.
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
    # Not -1, which is ambiguous for an empty result.
    return x.unflatten(0, (size, x.shape[0] // size))


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def without_empty(*tensors: Tensor) -> list[Tensor | None]:
    """Replace empty tensors, which stand for unwanted outputs of an operator, by None."""
    return [x if x.numel() else None for x in tensors]
