"""Chunks of positions, and a scan that carries an affine matrix state from chunk to chunk, as one custom operator:
torch.compile would unroll the loop and compile long sequences for minutes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("attnbench::affine_scan", mutates_args=())
def affine_scan(
    decay_NX: Tensor,
    read_NXCK: Tensor,
    key_NXCK: Tensor,
    write_NXCV: Tensor,
    addition_NXKV: Tensor | None,
    initial_XKV: Tensor,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run X independent affine recurrences over N chunks of C positions.

        D_n = U_n + R_n S_n,    S_{n+1} = a_n S_n + K_n^T D_n + B_n        for n = 0 ... N-1, S_0 given

    a_n is a number for each of the X, or a diagonal matrix (N, X, K). B may be None for zeros. All tensors have the
    state's dtype, float32 or float64. Chunks may have no positions.

    With `reverse`, from S_N down: D_n = U_n + R_n S_{n+1}, S_n = a_n S_{n+1} + K_n^T D_n + B_n. With R and K exchanged
    that is the recurrence of the gradients, so the operator is its own derivative.

    Returns:
        S_0 ... S_N as (N + 1, X, K, V), and D as (N, X, C, V).
    """
    num_chunks = read_NXCK.shape[0]
    states = initial_XKV.new_empty((num_chunks + 1, *initial_XKV.shape))
    states[num_chunks if reverse else 0] = initial_XKV
    changes = write_NXCV.clone(memory_format=torch.contiguous_format)
    has_positions = read_NXCK.shape[2] > 0
    # Autocast would round the state at every chunk.
    with torch.autocast(device_type=states.device.type, enabled=False):
        for n in reversed(range(num_chunks)) if reverse else range(num_chunks):
            source, target = (states[n + 1], states[n]) if reverse else (states[n], states[n + 1])
            if has_positions:
                changes[n].baddbmm_(read_NXCK[n], source)
            decay = decay_NX[n].reshape(decay_NX.shape[1], -1, 1)
            if addition_NXKV is None:
                torch.mul(source, decay, out=target)
            else:
                torch.addcmul(addition_NXKV[n], source, decay, out=target)
            if has_positions:
                target.baddbmm_(key_NXCK[n].mT, changes[n])
    return states, changes


@affine_scan.register_fake
def _(decay: Any, read: Any, key: Any, write: Tensor, addition: Any, initial: Tensor, reverse: Any = False) -> Any:
    return initial.new_empty((write.shape[0] + 1, *initial.shape)), write.new_empty(write.shape)


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    decay, read, key, _, addition, _, ctx.reverse = inputs
    ctx.has_addition = addition is not None
    ctx.save_for_backward(decay, read, key, *output)


def _gradient(ctx: Any, states_gradient: Tensor, changes_gradient: Tensor) -> tuple[Tensor | bool | None, ...]:
    decay, read, key, states, changes = ctx.saved_tensors
    before, after = (slice(1, None), slice(None, -1)) if ctx.reverse else (slice(None, -1), slice(1, None))
    first, last = (-1, 0) if ctx.reverse else (0, -1)
    # Gradients of the loss with respect to every state, including the effect on later states.
    total, change_total = affine_scan(
        decay, key, read, changes_gradient, states_gradient[before], states_gradient[last], not ctx.reverse
    )
    source, result = states[before], total[after]
    return (
        (source * result).sum(-1 if decay.dim() == 3 else (-2, -1)),
        change_total @ source.mT,
        changes @ result.mT,
        change_total,
        result if ctx.has_addition else None,
        total[first],
        None,
    )


affine_scan.register_autograd(_gradient, setup_context=_save_for_gradient)


@affine_scan.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | bool | None
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Fold the mapped axis into X: its sequences are as independent as those of a batch."""

    def fold(tensor: Tensor, mapped: int | None, axis: int) -> Tensor:
        if mapped is None:
            tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], info.batch_size, *tensor.shape[axis:])
        else:
            tensor = tensor.movedim(mapped, axis)
        return tensor.flatten(axis, axis + 1)

    # X is the second axis of all tensors, but the first of the initial state.
    axes = (1, 1, 1, 1, 1, 0, 0)
    folded: list[Any] = [
        fold(x, mapped, axis) if isinstance(x, Tensor) else x
        for x, mapped, axis in zip(inputs, in_dims, axes, strict=False)
    ]
    states, changes = affine_scan(*folded)
    unfolded = (info.batch_size, -1)
    return (states.unflatten(1, unfolded), changes.unflatten(1, unfolded)), (1, 1)


@register_flop_formula(torch.ops.attnbench.affine_scan)
def _(decay_shape: Any, read_shape: Any, key_shape: Any, write_shape: Any, *_: Any, **__: Any) -> int:
    """Two products of C × K × V a chunk, a multiply-add counting 2."""
    num_chunks, batch, size, width = read_shape
    return 4 * num_chunks * batch * size * width * write_shape[-1]


def chunk_size(device_type: str) -> int:
    """Return the fastest size of a torch form's chunks: 64 for a GPU's matrix units; 32 on a CPU, to halve the memory
    traffic of the (chunk, chunk) matrices."""
    return 32 if device_type == "cpu" else 64


def chunks_of(x: Tensor, size: int) -> Tensor:
    """Cut (B, T, H, ...) to (N × B × H, size, ...); the last chunk is padded by zeros."""
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size))
    return padded.unflatten(1, (-1, size)).movedim(1, 0).movedim(3, 2).flatten(0, 2)


def positions_of(chunks: Tensor, batch: int, length: int, heads: int) -> Tensor:
    """Join chunks (N × B × H, size, V) to (B, T, H, V)."""
    return chunks.unflatten(0, (-1, batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]


def scan_chunks(
    decay: Tensor, read: Tensor, key: Tensor, write: Tensor, addition: Tensor | None, initial_XKV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `affine_scan` in the dtype of the decay, all (N × X, positions, ...). Return the state before every chunk and
    D in the key's dtype, and the last state."""
    inputs = (
        None if x is None else x.to(decay.dtype).unflatten(0, (-1, initial_XKV.shape[0]))
        for x in (decay, read, key, write, addition)
    )
    states, changes = affine_scan(*inputs, initial_XKV)
    return states[:-1].flatten(0, 1).to(key.dtype), changes.flatten(0, 1).to(key.dtype), states[-1]
