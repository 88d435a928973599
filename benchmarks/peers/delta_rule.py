"""The gated delta rule alone: our chunked form, and the naive chunk form of flash-linear-attention."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.ops.delta_rule import chunk_size, chunked_gated_delta_rule
from benchmarks.peers.modules import AbsentPeerError, load_module

Operator = Callable[..., Tensor]
"""(query, key, value, log_decay, beta) -> what was read, (B, T, H, V); the query not yet scaled."""


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Our chunked form with the chunk size that the mixer uses."""
    scaled = query * query.shape[-1] ** -0.5
    return chunked_gated_delta_rule(scaled, key, value, log_decay, beta, None, chunk_size(query.device.type))[0]


def naive_delta_rule() -> Operator:
    """`naive_chunk_gated_delta_rule` of flash-linear-attention 0.6.

    Its file is loaded alone, because the package around it cannot be imported without Triton.

    Raises:
        AbsentPeerError: the library, or einops, which it needs, is not installed.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise AbsentPeerError("flash-linear-attention is not installed (or give --fla-path DIR)")
    if importlib.util.find_spec("einops") is None:
        raise AbsentPeerError("the naive form of flash-linear-attention needs einops; pip install einops")
    path = Path(package.submodule_search_locations[0]) / "ops" / "gated_delta_rule" / "naive.py"
    module = load_module(str(path), "fla_naive_gated_delta_rule")

    def operator(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return module.naive_chunk_gated_delta_rule(query, key, value, log_decay, beta)[0]

    return operator


def forward_and_backward(
    operator: Operator, shape_BTHK: tuple[int, int, int, int], device: torch.device
) -> Callable[[int], Tensor]:
    """A step that does both and returns the outputs' sum, with a full gradient of the output, as in a model."""
    inputs = example_inputs(shape_BTHK, device)

    def step(number: int) -> Tensor:
        output = operator(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        return output.detach().sum()

    return step


def example_inputs(shape_BTHK: tuple[int, int, int, int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Query and key of length 1, value normal, decays of 0.8 to 1, beta in 0..1; all asking for gradients; V = K."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape_BTHK, generator=generator) for _ in range(3))
    log_decay, beta = (torch.rand(shape_BTHK[:3], generator=generator) for _ in range(2))
    inputs = [normalize(query, dim=-1), normalize(key, dim=-1), value, -0.2 * log_decay, beta]
    return [x.to(device).requires_grad_() for x in inputs]
