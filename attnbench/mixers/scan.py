"""The scan that carries a matrix state from chunk to chunk, as one operator with fake, autograd and vmap rules.

As an operator it is a single node to torch.compile, which would otherwise unroll the loop over the chunks and compile
for minutes at long sequences. A new mixer whose state is affine in the one before can use it as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("attnbench::affine_scan", mutates_args=())
def affine_scan(
    decay_NX: Tensor, erase_NXKK: Tensor, addition_NXKV: Tensor, initial_XKV: Tensor, reverse: bool = False
) -> Tensor:
    """All states of an affine recurrence over N chunks, X independent ones side by side.

        S_{n+1} = a_n S_n - E_n S_n + B_n,    S_0 given             for n = 0 ... N-1
        S_n = a_n S_{n+1} - E_n^T S_{n+1} + B_n,    S_N given       for n = N-1 ... 0, where `reverse`

    The second is the first one's gradient and the other way round, so the operator is its own derivative. The decay
    stands apart from the matrix so that a state that is merely kept is kept exactly. All inputs have one dtype, which
    should be float32 or float64: it is the state's.

    Returns:
        S_0 ... S_N as (N + 1, X, K, V).
    """
    num_chunks = erase_NXKK.shape[0]
    states = initial_XKV.new_empty((num_chunks + 1, *initial_XKV.shape))
    states[num_chunks if reverse else 0] = initial_XKV
    order = reversed(range(num_chunks)) if reverse else range(num_chunks)
    # The state stays in its own precision where autocast would round it at every chunk.
    with torch.autocast(device_type=states.device.type, enabled=False):
        for n in order:
            source, target = (states[n + 1], states[n]) if reverse else (states[n], states[n + 1])
            erase = erase_NXKK[n].mT if reverse else erase_NXKK[n]
            torch.addcmul(addition_NXKV[n], decay_NX[n, :, None, None], source, out=target)
            target.baddbmm_(erase, source, alpha=-1)
    return states


@affine_scan.register_fake
def _(
    decay_NX: Tensor, erase_NXKK: Tensor, addition_NXKV: Tensor, initial_XKV: Tensor, reverse: bool = False
) -> Tensor:
    return initial_XKV.new_empty((erase_NXKK.shape[0] + 1, *initial_XKV.shape))


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    decay, erase, _, _, ctx.reverse = inputs
    ctx.save_for_backward(decay, erase, output)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
    """With G_n the gradient of the loss in S_n through later states too: dB = G, dE = -G S^T and da = sum(G S)."""
    decay, erase, states = ctx.saved_tensors
    if ctx.reverse:
        total = affine_scan(decay, erase, gradient[1:], gradient[0], reverse=False)
        source, result, initial = states[1:], total[:-1], total[-1]
        erase_gradient = -source @ result.mT
    else:
        total = affine_scan(decay, erase, gradient[:-1], gradient[-1], reverse=True)
        source, result, initial = states[:-1], total[1:], total[0]
        erase_gradient = -result @ source.mT
    return (source * result).sum((-2, -1)), erase_gradient, result, initial, None


affine_scan.register_autograd(_gradient, setup_context=_save_for_gradient)


@affine_scan.register_vmap
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    decay: Tensor,
    erase: Tensor,
    addition: Tensor,
    initial: Tensor,
    reverse: bool = False,
) -> tuple[Tensor, int]:
    """The mapped axis joins X: its sequences are as independent as those of a batch."""
    folded = []
    # Where a default is left out, in_dims has four entries, otherwise five.
    for tensor, mapped, axis in zip((decay, erase, addition, initial), in_dims[:4], (1, 1, 1, 0), strict=True):
        if mapped is None:
            tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], info.batch_size, *tensor.shape[axis:])
        else:
            tensor = tensor.movedim(mapped, axis)
        folded.append(tensor.flatten(axis, axis + 1))
    states = affine_scan(folded[0], folded[1], folded[2], folded[3], reverse)
    return states.unflatten(1, (info.batch_size, -1)), 1


@register_flop_formula(torch.ops.attnbench.affine_scan)
def _(decay_shape: Any, erase_shape: Any, addition_shape: Any, initial_shape: Any, *_: Any, **__: Any) -> int:
    """One (K, K) by (K, V) product a chunk, a multiply-add counting 2."""
    num_chunks, batch, width, _ = erase_shape
    return 2 * num_chunks * batch * width * width * initial_shape[-1]
