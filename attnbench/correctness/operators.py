"""Operators that no setting chooses, and operators of decoding, with inputs and definitions in float64."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.machine.precision import dtype_of, multiplying
from attnbench.mixers.definition import exact
from attnbench.mixers.relative_errors import relative_error, worst
from attnbench.ops.attention.forgetting_attention import forgetting_bias
from attnbench.ops.attention.softmax_attention import attend, materialised, visible
from attnbench.ops.delta.delta_rule import DELTA_RULE, unit_length
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY, DiagonalInputs
from attnbench.ops.layers.rotary import rotate, rotation
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY


class OperatorCase(NamedTuple):
    """Operator and its definition in float64, which return tuples of tensors, and their inputs."""

    inputs: tuple[Tensor, ...]
    """Gradients are compared for inputs that require them."""
    operator: Callable[..., tuple[Tensor, ...]]
    definition: Callable[..., tuple[Tensor, ...]]


class _Numbers:
    """Random inputs from the CPU: generators of other devices give other numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, learns: bool = True) -> Tensor:
        x = exact(torch.randn(*shape, generator=self.generator)).to(self.device, dtype)
        return x.requires_grad_(learns)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)


def _swiglu(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    from attnbench.ops.layers.triton.swiglu import swiglu

    def definition(packed: Tensor) -> tuple[Tensor, ...]:
        gate, up = packed.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    return OperatorCase((numbers.normal(33, 300, dtype=dtype),), lambda packed: (swiglu(packed),), definition)


def _rms_norm(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Several programs share the sum of the weight's gradient."""
    from attnbench.ops.layers.triton.rms_norm import rms_norm

    def definition(x: Tensor, weight_1D: Tensor) -> tuple[Tensor, ...]:
        return (weight_1D * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),)

    inputs = numbers.normal(133, 72, dtype=dtype), numbers.normal(1, 72, dtype=dtype)
    return OperatorCase(inputs, lambda *given: (rms_norm(*given, 1e-6),), definition)


def _embed(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Several programs share the sum of the gradient."""
    from attnbench.ops.layers.triton.embedding import embed

    tokens_N = numbers.below(117, 1100)
    return OperatorCase(
        (numbers.normal(130, 72),), lambda weight: (embed(tokens_N, weight, dtype),), lambda weight: (weight[tokens_N],)
    )


def _loss(numbers: _Numbers, dtype: torch.dtype, num_symbols: int = 61, is_weighted: bool = True) -> OperatorCase:
    from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy

    targets_N = numbers.below(num_symbols, 37)
    weight_N = numbers.below(3, 37).float() if is_weighted else None

    def definition(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        nats_N = F.cross_entropy(x @ weight.T, targets_N, reduction="none")
        return ((nats_N if weight_N is None else nats_N * weight_N).sum(),)

    return OperatorCase(
        (numbers.normal(37, 72, dtype=dtype), numbers.normal(num_symbols, 72)),
        lambda x, weight: linear_cross_entropy(x, weight, targets_N, weight_N, True)[:1],
        definition,
    )


def _rotary(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    from attnbench.ops.layers.triton.rotary_kernels import split_rotated

    angles = rotation(37, 24, 3, 10000.0, numbers.device)

    def definition(packed: Tensor) -> tuple[Tensor, ...]:
        query, key, value = packed.unflatten(-1, (-1, 24)).split([4, 2, 2], dim=2)
        return rotate(query, angles), rotate(key, angles), value

    return OperatorCase(
        (numbers.normal(2, 37, 8 * 24, dtype=dtype),), lambda packed: split_rotated(packed, angles, 4, 2), definition
    )


def _turned(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Query and key rotated in place, before values of another width."""
    from attnbench.ops.layers.triton.rotary_kernels import turn_packed

    angles = rotation(37, 24, 3, 10000.0, numbers.device)

    def definition(packed: Tensor) -> tuple[Tensor, ...]:
        turned, value = packed.split([4 * 24, 50], dim=-1)
        return (torch.cat([rotate(turned.unflatten(-1, (4, 24)), angles).flatten(2), value], dim=-1),)

    return OperatorCase(
        (numbers.normal(2, 37, 4 * 24 + 50, dtype=dtype),),
        lambda packed: (turn_packed(packed, angles, 4, False),),
        definition,
    )


def _convolution(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Convolution without SiLU, after a history."""
    from attnbench.ops.layers.triton.short_convolution import short_convolution

    def definition(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, ...]:
        padded = torch.cat([history, x], dim=1)
        return (sum(padded[:, tap : tap + x.shape[1]] * weight[:, tap] for tap in range(weight.shape[1])),)  # pyright: ignore[reportReturnType]

    history = numbers.normal(2, 3, 90, dtype=dtype, learns=False)
    return OperatorCase(
        (numbers.normal(2, 70, 90, dtype=dtype), numbers.normal(90, 4), history),
        lambda x, weight, history: (short_convolution(x, weight, history),),
        definition,
    )


def _attention(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Separate query, key and value, two heads a key, a padded width."""
    from attnbench.ops.attention.triton.flash_op import flash_attention

    def definition(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        position_T = torch.arange(70, device=query.device)
        return (attend(query, key, value, visible(position_T[:, None] - position_T, None)),)

    return OperatorCase(
        tuple(numbers.normal(2, 70, heads, 48, dtype=dtype) for heads in (4, 2, 2)),
        lambda query, key, value: (flash_attention(query, key, value, causal=True),),
        definition,
    )


def _forgetting(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Gates that forget half a position on average, some nearly everything."""
    from attnbench.ops.attention.triton.cumulative_gates import cumulative_log_forget
    from attnbench.ops.attention.triton.flash_op import flash_attention

    def operator(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        sums = cumulative_log_forget(F.logsigmoid(gate))
        return (flash_attention(query, key, value, sums, causal=True),)

    def definition(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (materialised(query, key, value, None, forgetting_bias(F.logsigmoid(gate))),)

    heads = (numbers.normal(2, 133, heads, 48, dtype=dtype) for heads in (4, 2, 2))
    return OperatorCase((*heads, numbers.normal(2, 133, 4)), operator, definition)


def _forgetting_decoding(numbers: _Numbers, dtype: torch.dtype, heads: int = 2) -> OperatorCase:
    from attnbench.ops.attention.triton.flash_decoding import forgetting_decoding

    position = torch.tensor(140, device=numbers.device)

    def operator(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        updated = bias.clone()
        # So many splits also where there is one multiprocessor.
        return forgetting_decoding(query, key, value, gate, updated, position, splits=3), updated[:, :141]

    def definition(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        updated = torch.cat([bias[:, :140] + gate[:, None], torch.zeros_like(gate)[:, None]], dim=1)
        filled = (query[:, None], key[:, :141], value[:, :141])
        return materialised(*filled, None, updated.mT[:, :, None])[:, 0], updated

    cache = (numbers.normal(2, 150, 2, 64, dtype=dtype, learns=False) for _ in range(2))
    gates = (-numbers.normal(*shape, learns=False).abs() for shape in ((2, heads), (2, 150, heads)))
    return OperatorCase((numbers.normal(2, heads, 64, dtype=dtype, learns=False), *cache, *gates), operator, definition)


def _decoding(numbers: _Numbers, dtype: torch.dtype, heads: int = 2, window: int | None = None) -> OperatorCase:
    from attnbench.ops.attention.triton.flash_decoding import flash_decoding

    position = torch.tensor(140, device=numbers.device)

    def definition(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        past_S = position - torch.arange(key.shape[1], device=query.device)
        return (attend(query[:, None], key, value, visible(past_S, window)[None])[:, 0],)

    cache = (numbers.normal(2, 150, 2, 64, dtype=dtype, learns=False) for _ in range(2))
    return OperatorCase(
        (numbers.normal(2, heads, 64, dtype=dtype, learns=False), *cache),
        # So many splits also where there is one multiprocessor.
        lambda query, key, value: (flash_decoding(query, key, value, position, window=window, splits=3),),
        definition,
    )


def _delta_rule_step(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    from attnbench.ops.delta.triton.delta_step import gated_delta_rule_step

    H, K, V = 3, 32, 48

    def operator(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        updated = memory.clone()
        return gated_delta_rule_step(mixed, log_decay, beta, updated, True), updated

    def definition(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        query, key, value = mixed[:, None].split([H * K, H * K, H * V], dim=-1)
        query, key = unit_length(query.unflatten(-1, (H, K)), K**-0.5), unit_length(key.unflatten(-1, (H, K)))
        value = value.unflatten(-1, (H, V))
        y, last = DELTA_RULE.define(query, key, value, log_decay[:, None], beta[:, None], memory)
        return y[:, 0], last

    gates = numbers.normal(2, 5, H, learns=False).sigmoid()
    mixed = numbers.normal(5, H * (2 * K + V), dtype=dtype, learns=False)
    return OperatorCase((mixed, -gates[0], gates[1], numbers.normal(5, H, K, V, learns=False)), operator, definition)


def _scalar_decay_step(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Two heads of values a key, a padded width."""
    from attnbench.ops.scalar.triton.scalar_step import scalar_decay_step

    G, H, K, V = 2, 4, 48, 80

    def operator(mixed: Tensor, log_decay: Tensor, write: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        updated = memory.clone()
        return scalar_decay_step(mixed, log_decay, write, updated, G, 0.5), updated

    def definition(mixed: Tensor, log_decay: Tensor, write: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        query, key, value = mixed[:, None].split([G * K, G * K, H * V], dim=-1)
        query, key = (x.unflatten(-1, (G, K)) for x in (0.5 * query, key))
        written = value.unflatten(-1, (H, V)) * write[:, None, :, None]
        y, last = SCALAR_DECAY.define(query, key, written, log_decay[:, None], memory)
        return y[:, 0], last

    gates = numbers.normal(2, 5, H, learns=False).sigmoid()
    mixed = numbers.normal(5, 2 * G * K + H * V, dtype=dtype, learns=False)
    return OperatorCase((mixed, -gates[0], gates[1], numbers.normal(5, H, K, V, learns=False)), operator, definition)


def _diagonal_decay_step(numbers: _Numbers, dtype: torch.dtype) -> OperatorCase:
    """Separate vectors for erasing and for reading what is erased, as in RWKV-7."""
    from attnbench.ops.diagonal.triton.diagonal_step import diagonal_decay_step

    def operator(*inputs: Tensor) -> tuple[Tensor, ...]:
        query, key, value, log_decay, reader, eraser, memory = inputs
        updated = memory.clone()
        return diagonal_decay_step(query, key, value, log_decay, reader, None, eraser, updated), updated

    def definition(*inputs: Tensor) -> tuple[Tensor, ...]:
        query, key, value, log_decay, reader, eraser = (x[:, None] for x in inputs[:-1])
        free = DiagonalInputs(query, key, value, log_decay, erase_BTHK=eraser, read_BTHK=reader)
        y, last = DIAGONAL_DECAY.define(*free, inputs[-1])
        return y[:, 0], last

    query, key, reader, eraser = (0.2 * numbers.normal(5, 3, 32, dtype=dtype, learns=False) for _ in range(4))
    log_decay = -numbers.normal(5, 3, 32, learns=False).sigmoid()
    value, memory = numbers.normal(5, 3, 48, dtype=dtype, learns=False), numbers.normal(5, 3, 32, 48, learns=False)
    return OperatorCase((query, key, value, log_decay, reader, eraser, memory), operator, definition)


OPERATORS: dict[str, Callable[[_Numbers, torch.dtype], OperatorCase]] = {
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "embed": _embed,
    "linear_cross_entropy": _loss,
    # More symbols than a program holds at once.
    "the same of 5,003 symbols": partial(_loss, num_symbols=5003, is_weighted=False),
    "split_rotated": _rotary,
    "turn_packed": _turned,
    "short_convolution without SiLU": _convolution,
    "flash_attention": _attention,
    "flash_decoding": _decoding,
    "the same of grouped heads": partial(_decoding, heads=6, window=90),
    "flash_attention with forget gates": _forgetting,
    "flash_decoding with forget gates": _forgetting_decoding,
    "the same of grouped heads with gates": partial(_forgetting_decoding, heads=6),
    "gated_delta_rule_step": _delta_rule_step,
    "scalar_decay_step": _scalar_decay_step,
    "diagonal_decay_step": _diagonal_decay_step,
}
"""Operators by their names on the page."""

IN_TF32 = (
    *("linear_cross_entropy", "flash_attention", "flash_decoding", "the same of grouped heads"),
    *("flash_attention with forget gates", "flash_decoding with forget gates", "the same of grouped heads with gates"),
)
"""Operators whose products differ in TF32."""


def operator_errors(name: str, precision: str, device: torch.device) -> dict[str, float]:
    with multiplying(precision):
        problem = OPERATORS[name](_Numbers(device), dtype_of(precision))
        actual = problem.operator(*problem.inputs)
        wide = [x.detach().double().requires_grad_(x.requires_grad) for x in problem.inputs]
        expected = problem.definition(*wide)
        pairs = zip(actual, expected, strict=True)
        errors = {"output": worst(relative_error(a.detach(), b.detach()) for a, b in pairs)}
        learning = [index for index, x in enumerate(wide) if x.requires_grad]
        if learning:
            generator = torch.Generator().manual_seed(1)
            weights = [exact(torch.randn(x.shape, generator=generator)).to(x.device) for x in expected]
            narrow = [weight.to(x.dtype) for weight, x in zip(weights, actual, strict=True)]
            gradients = torch.autograd.grad(actual, [problem.inputs[index] for index in learning], narrow)
            others = torch.autograd.grad(expected, [wide[index] for index in learning], [w.double() for w in weights])
            errors["gradient"] = worst(relative_error(a, b) for a, b in zip(gradients, others, strict=True))
    return errors
