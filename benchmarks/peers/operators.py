"""Operators by themselves, forward and backward: ours and flash-linear-attention's, on the same numbers.

On a GPU what is timed is a CUDA graph of both passes, so that no launch waits for the host. Each takes its inputs as a
model hands them over: our kernels query, key and value side by side, the others apart.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import dtype_of
from attnbench.ops.delta_rule import chunk_size, chunked_gated_delta_rule
from attnbench.ops.scalar_decay import packed_scalar_decay, scalar_decay
from benchmarks.peers.models import AbsentPeerError, Operator, naive_delta_rule

Shape = tuple[int, int, int, int]
"""Sequences, positions, heads and channels a head, of query, key and value alike."""

Step = Callable[[int], Tensor]
"""Both passes; a number of the output, whatever the number of the step."""


def example_inputs(shape_BTHK: Shape, device: torch.device) -> list[Tensor]:
    """Query and key of length 1, value normal, decays of 0.8 to 1, beta in 0..1; V = K."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape_BTHK, generator=generator) for _ in range(3))
    log_decay, beta = (torch.rand(shape_BTHK[:3], generator=generator) for _ in range(2))
    inputs = [normalize(query, dim=-1), normalize(key, dim=-1), value, -0.2 * log_decay, beta]
    return [x.to(device) for x in inputs]


def _both_passes(operator: Operator, inputs: Sequence[Tensor]) -> Step:
    """Forward and backward with a full gradient of the output, as in a model."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        gradient = torch.randn_like(operator(*leaves))

    def call() -> Tensor:
        output = operator(*leaves)
        torch.autograd.grad(output, leaves, gradient)
        return output.detach().flatten()[0]

    repeated = CapturedCall(call) if gradient.device.type == "cuda" else call
    return lambda number: repeated()


def _chunked_delta_rule(shape_BTHK: Shape, device: torch.device, precision: str) -> Step:
    """Our chunked form with the chunk size that the mixer uses, in float32."""

    def operator(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        scaled = query * query.shape[-1] ** -0.5
        return chunked_gated_delta_rule(scaled, key, value, log_decay, beta, None, chunk_size(device.type))[0]

    return _both_passes(operator, example_inputs(shape_BTHK, device))


def _naive_delta_rule(shape_BTHK: Shape, device: torch.device, precision: str) -> Step:
    return _both_passes(naive_delta_rule(), example_inputs(shape_BTHK, device))


def _scalar_decay_inputs(shape_BTHK: Shape, device: torch.device, precision: str) -> list[Tensor]:
    *heads, log_decay, _ = example_inputs(shape_BTHK, device)
    return [*(x.to(dtype_of(precision)) for x in heads), log_decay]


def _scalar_decay(shape_BTHK: Shape, device: torch.device, precision: str) -> Step:
    """Our kernels."""
    *heads, log_decay = _scalar_decay_inputs(shape_BTHK, device, precision)
    num_heads, width = shape_BTHK[2:]

    def operator(mixed: Tensor, log_decay: Tensor) -> Tensor:
        return packed_scalar_decay(mixed, log_decay, None, None, None, num_heads, width, width**-0.5)[0]

    return _both_passes(operator, [torch.cat([x.flatten(2) for x in heads], dim=-1), log_decay])


def _torch_scalar_decay(shape_BTHK: Shape, device: torch.device, precision: str) -> Step:
    """Our torch form; on a GPU compiled, as in training."""

    def operator(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
        return scalar_decay(query * query.shape[-1] ** -0.5, key, value, log_decay, None, "torch")[0]

    form = torch.compile(operator, fullgraph=True, dynamic=False) if device.type == "cuda" else operator
    return _both_passes(form, _scalar_decay_inputs(shape_BTHK, device, precision))


def _fla_simple_gla(shape_BTHK: Shape, device: torch.device, precision: str) -> Step:
    """`chunk_simple_gla` of flash-linear-attention, called as its layers do.

    Raises:
        AbsentPeerError: the library is not installed.
    """
    try:
        from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise AbsentPeerError(f"{error.name} is not installed (or give --fla-path DIR)") from error

    def operator(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
        return chunk_simple_gla(query, key, value, g=log_decay)[0]

    return _both_passes(operator, _scalar_decay_inputs(shape_BTHK, device, precision))


OPERATORS: dict[str, Callable[[Shape, torch.device, str], Step]] = {
    "chunked_delta_rule": _chunked_delta_rule,
    "naive_delta_rule": _naive_delta_rule,
    "scalar_decay": _scalar_decay,
    "torch_scalar_decay": _torch_scalar_decay,
    "fla_simple_gla": _fla_simple_gla,
}
"""Functions of shape, device and precision that build a step, by the kind of an order."""
