"""Operators of ours and of libraries: inputs, definition, and a function for each implementation.

A function takes an operator's inputs by name and returns its output, (B, T, H, V). Queries come scaled, except for
softmax and the gated delta rule, which scale them by 1 / sqrt(K). A missing implementation is refused by name.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.bench.base import Conditions
from attnbench.mixers.base import Mixer
from attnbench.mixers.flash import Flash
from attnbench.mixers.fox import Fox
from attnbench.mixers.gated_deltanet import GatedDeltaNet
from attnbench.mixers.gla import GatedLinearAttention
from attnbench.mixers.kda import KimiDeltaAttention
from attnbench.mixers.mamba2 import Mamba2
from attnbench.mixers.retnet import RetNet
from attnbench.mixers.simple_gla import SimpleGLA
from attnbench.ops.attention.forgetting_attention import forgetting_attention
from attnbench.ops.attention.softmax_attention import fused, materialised
from attnbench.ops.common.fla import require_gated_fla
from attnbench.ops.delta.delta_rule import gated_delta_rule, packed_gated_delta_rule
from attnbench.ops.diagonal.diagonal_decay import DiagonalInputs, diagonal_decay
from attnbench.ops.scalar.scalar_decay import scalar_decay
from attnbench.settings.errors import UserError

Inputs = dict[str, Tensor]
Function = Callable[..., Tensor]


class Packed(NamedTuple):
    """A function of `mixed`, (B, T, C): query, key and value side by side, as a projection leaves them."""

    function: Function


class Shape(NamedTuple):
    """Sequences, positions, heads of query and key and of value, and channels of each."""

    batch_size: int
    sequence_length: int
    num_key_heads: int
    num_heads: int
    head_width: int


class Operator(NamedTuple):
    inputs: Callable[[Shape, torch.Generator, torch.dtype], Inputs]
    """All get gradients; gates are float32."""
    definition: Function
    """The reference, computed in float64."""
    functions: Mapping[str, Callable[[Shape, Conditions], Function | Packed]]
    """By the name of the implementation; raise UserError if it cannot run here."""
    by_heads: bool = False
    """True for independent heads with a definition of T × T weights: only some heads are compared."""
    others: tuple[str, ...] = ()
    """Implementations of another function, for the ratio, which are not compared."""


def _heads(shape: Shape, generator: torch.Generator, dtype: torch.dtype, *, unit: bool = True) -> Inputs:
    """Make query and key of length 1 or, for softmax, normal, and a normal value."""
    batch_size, length, num_key_heads, num_heads, width = shape
    normal = partial(torch.randn, generator=generator, device=generator.device)
    query, key = (normal(batch_size, length, num_key_heads, width) for _ in range(2))
    if unit:
        query, key = normalize(query, dim=-1), normalize(key, dim=-1)
    value = normal(batch_size, length, num_heads, width)
    return {name: x.to(dtype) for name, x in (("query", query), ("key", key), ("value", value))}


def _uniform(shape: Shape, generator: torch.Generator, *channels: int) -> Tensor:
    size = (shape.batch_size, shape.sequence_length, shape.num_heads, *channels)
    return torch.rand(size, generator=generator, device=generator.device)


def _with_decay(shape: Shape, generator: torch.Generator, dtype: torch.dtype, *, unit: bool = True) -> Inputs:
    return _heads(shape, generator, dtype, unit=unit) | {"log_decay": -0.2 * _uniform(shape, generator)}


def _with_beta(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return _with_decay(shape, generator, dtype) | {"beta": _uniform(shape, generator)}


def _by_channel(shape: Shape, generator: torch.Generator, dtype: torch.dtype, *, beta: bool) -> Inputs:
    log_decay = -0.2 * _uniform(shape, generator, shape.head_width)
    strengths = {"beta": _uniform(shape, generator)} if beta else {}
    return _heads(shape, generator, dtype) | {"log_decay": log_decay} | strengths


def _mamba2_inputs(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    steps = {"step": 0.1 * _uniform(shape, generator)}
    return _heads(shape._replace(num_key_heads=1), generator, dtype) | steps


def _retention_decay(value: Tensor) -> Tensor:
    """Return RetNet's constant decays, (1, T, H), as in flash-linear-attention."""
    head = torch.arange(value.shape[2], device=value.device, dtype=torch.float64)
    log_decay = torch.log1p(-(2.0 ** (-5.0 - head))).to(torch.promote_types(value.dtype, torch.float32))
    return log_decay.expand(1, value.shape[1], -1)


def _mamba2_rates(step: Tensor) -> Tensor:
    """Return -A of each head."""
    return torch.linspace(1, 16, step.shape[2], device=step.device, dtype=step.dtype)


def _retention(query: Tensor, key: Tensor, value: Tensor, *, backend: str) -> Tensor:
    return _simple_gla(query, key, value, _retention_decay(value), backend=backend)


def _simple_gla(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, *, backend: str) -> Tensor:
    return scalar_decay(query, key, value, log_decay, None, backend)[0]


def _mamba2(query: Tensor, key: Tensor, value: Tensor, step: Tensor, *, backend: str) -> Tensor:
    written = (value * step[..., None]).to(value.dtype)
    return _simple_gla(query, key, written, -_mamba2_rates(step) * step, backend=backend)


def _diagonal(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None = None, *, backend: str
) -> Tensor:
    strength = None if beta is None else beta[..., None]
    return diagonal_decay(DiagonalInputs(query, key, value, log_decay, strength, strength), None, backend)[0]


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, *, backend: str) -> Tensor:
    """The torch form repeats key heads, which the kernels share."""
    if backend == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

        return chunk_gated_delta_rule(query, key, value, g=log_decay, beta=beta)[0]
    if backend == "triton":
        mixed = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1)
        return packed_gated_delta_rule(mixed, log_decay, beta, None, key.shape[-1], False, key.shape[2])[0]
    repeats = value.shape[2] // query.shape[2]
    query, key = (x if repeats == 1 else x.repeat_interleave(repeats, 2) for x in (query, key))
    return gated_delta_rule(query * key.shape[-1] ** -0.5, key, value, log_decay, beta, None, backend)[0]


def _packed_delta_rule(shape: Shape) -> Function:
    heads = (shape.head_width, False, shape.num_key_heads)
    return lambda mixed, log_decay, beta: packed_gated_delta_rule(mixed, log_decay, beta, None, *heads)[0]


def _packed_retention(shape: Shape) -> Function:
    @cache
    def log_decay(device: torch.device, dtype: torch.dtype) -> Tensor:
        """A constant, made at the first call."""
        like = torch.empty(0, device=device, dtype=dtype).expand(1, shape.sequence_length, shape.num_heads, 0)
        return _retention_decay(like).expand(shape.batch_size, -1, -1).contiguous()

    return lambda mixed: _packed_scalar_decay(mixed, log_decay(mixed.device, mixed.dtype), None, shape)


def _packed_simple_gla(shape: Shape) -> Function:
    return lambda mixed, log_decay: _packed_scalar_decay(mixed, log_decay, None, shape)


def _packed_mamba2(shape: Shape) -> Function:
    shared = shape._replace(num_key_heads=1)
    return lambda mixed, step: _packed_scalar_decay(mixed, -_mamba2_rates(step) * step, step, shared)


def _packed_scalar_decay(mixed: Tensor, log_decay: Tensor, write: Tensor | None, shape: Shape) -> Tensor:
    # Exists with the kernels, as the backend does.
    from attnbench.ops.scalar.scalar_decay import packed_scalar_decay  # pyright: ignore[reportAttributeAccessIssue]

    heads = (shape.num_key_heads, shape.head_width)
    return packed_scalar_decay(mixed, log_decay, write, None, None, *heads)[0]


def _fox(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, *, backend: str) -> Tensor:
    return forgetting_attention(query, key, value, log_decay, backend)


def _softmax(query: Tensor, key: Tensor, value: Tensor, **ignored: Tensor) -> Tensor:
    return fused(query, key, value, None, "triton")


def _ours(
    mixer: type[Mixer],
    backend: str,
    function: Function,
    packed: Callable[[Shape], Function] | None,
    shape: Shape,
    conditions: Conditions,
) -> Function | Packed:
    """Return a mixer's backend, if it runs here; the torch form compiled on CUDA, as in training."""
    options = {"backend": backend, "head_width": shape.head_width}
    mixer.choose_backend(options, device_type=conditions.device.type, precision=conditions.precision)
    if backend == "triton" and packed is not None:
        return Packed(packed(shape))
    called = partial(function, backend=backend)
    if backend == "torch" and conditions.device.type == "cuda":
        return torch.compile(called, fullgraph=True, dynamic=False)
    return called


def _our_backends(
    mixer: type[Mixer], function: Function, *names: str, packed: Callable[[Shape], Function] | None = None
) -> dict[str, Any]:
    return {name: partial(_ours, mixer, name, function, packed) for name in names}


def _flash(shape: Shape, conditions: Conditions) -> Function:
    options = {"backend": "triton", "head_width": shape.head_width}
    Flash.choose_backend(options, device_type=conditions.device.type, precision=conditions.precision)
    return _softmax


def _fla_attention(name: str, shape: Shape, conditions: Conditions) -> Function:
    require_gated_fla("bench.implementations=fla", conditions.device.type)
    if name == "fox":
        from fla.ops.forgetting_attn import parallel_forgetting_attn  # pyright: ignore[reportMissingImports]

        return lambda query, key, value, log_decay: parallel_forgetting_attn(query, key, value, log_decay)
    from fla.ops.attn import parallel_attn  # pyright: ignore[reportMissingImports]

    return lambda query, key, value: parallel_attn(query, key, value)


def _fla_retention(shape: Shape, conditions: Conditions) -> Function:
    require_gated_fla("bench.implementations=fla", conditions.device.type)
    from fla.ops.retention import chunk_retention  # pyright: ignore[reportMissingImports]

    return lambda query, key, value: chunk_retention(query, key, value, scale=1.0)[0]


def _imported(module: str, name: str) -> Function:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{module.partition('.')[0]} cannot be imported ({error})") from error


def _mamba_ssm(shape: Shape, conditions: Conditions) -> Function:
    scan = _imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")

    def function(query: Tensor, key: Tensor, value: Tensor, step: Tensor) -> Tensor:
        return scan(value, step, -_mamba2_rates(step), key, query, chunk_size=256)

    return function


def _flash_qla(shape: Shape, conditions: Conditions) -> Function:
    rule = _imported("flash_qla", "chunk_gated_delta_rule")

    def function(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return rule(q=query, k=key, v=value, g=log_decay, beta=beta, scale=key.shape[-1] ** -0.5)[0]

    return function


OURS = ("triton", "torch")
OPERATORS: dict[str, Operator] = {
    "retention": Operator(
        _heads,
        partial(_retention, backend="torch"),
        _our_backends(RetNet, _retention, *OURS, packed=_packed_retention) | {"fla": _fla_retention},
    ),
    "simple_gla": Operator(
        _with_decay,
        partial(_simple_gla, backend="torch"),
        _our_backends(SimpleGLA, _simple_gla, *OURS, "fla", packed=_packed_simple_gla),
    ),
    "mamba2": Operator(
        _mamba2_inputs,
        partial(_mamba2, backend="torch"),
        _our_backends(Mamba2, _mamba2, *OURS, "fla", packed=_packed_mamba2) | {"mamba_ssm": _mamba_ssm},
    ),
    "gla": Operator(
        partial(_by_channel, beta=False),
        partial(_diagonal, backend="torch"),
        _our_backends(GatedLinearAttention, _diagonal, *OURS, "fla"),
    ),
    "kda": Operator(
        partial(_by_channel, beta=True),
        partial(_diagonal, backend="torch"),
        _our_backends(KimiDeltaAttention, _diagonal, *OURS, "fla"),
    ),
    "gated_delta_rule": Operator(
        _with_beta,
        partial(_delta_rule, backend="torch"),
        _our_backends(GatedDeltaNet, _delta_rule, *OURS, "fla", packed=_packed_delta_rule) | {"flash_qla": _flash_qla},
    ),
    "softmax": Operator(
        partial(_heads, unit=False),
        lambda query, key, value: materialised(query, key, value, None),
        {"triton": _flash, "fla": partial(_fla_attention, "softmax")},
        by_heads=True,
    ),
    "fox": Operator(
        partial(_with_decay, unit=False),
        partial(_fox, backend="torch"),
        _our_backends(Fox, _fox, *OURS) | {"fla": partial(_fla_attention, "fox"), "without_gates": _flash},
        by_heads=True,
        others=("without_gates",),
    ),
}
IMPLEMENTATIONS = ("triton", "torch", "fla", "mamba_ssm", "flash_qla", "without_gates")
