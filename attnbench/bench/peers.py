"""Our chunked Gated DeltaNet beside the naive chunk form of flash-linear-attention, on the CPU, in one run."""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.errors import UserError
from attnbench.mixers.gated_deltanet import chunk_size, chunked_gated_delta_rule

Operator = Callable[..., Tensor]
"""(query, key, value, log_decay, beta) -> what was read, (B, T, H, V); the query not yet scaled."""


@dataclass(slots=True, kw_only=True)
class PeerRow:
    """One implementation at one shape; forward and backward together, in milliseconds."""

    implementation: str
    shape_BTHK: tuple[int, int, int, int]
    median_milliseconds: float
    minimum_milliseconds: float
    maximum_milliseconds: float
    speedup: float
    """The peer's median over this one's; NaN where the peer is absent."""
    max_error: float
    """Largest difference from ours, over outputs and gradients, relative to the largest entry of each."""

    def __str__(self) -> str:
        spread = f"({self.minimum_milliseconds:.1f} to {self.maximum_milliseconds:.1f})"
        times = f"{self.median_milliseconds:.1f} ms {spread}"
        return f"{self.shape_BTHK!s:<18} {self.implementation:<10} {times:<25} " + (
            f"x{self.speedup:.2f}, error {self.max_error:.0e}"
        )


def find_peer(path: str | None) -> Operator | None:
    """`naive_chunk_gated_delta_rule` of flash-linear-attention 0.6, or None if the library is not installed.

    Args:
        path: its naive.py, from an unpacked wheel of fla-core; None: the installed package's. The file is loaded
            alone, because the package around it cannot be imported without Triton.

    Raises:
        UserError: a path without a file, or einops missing.
    """
    if path is None:
        package = importlib.util.find_spec("fla")
        if package is None or not package.submodule_search_locations:
            return None
        path = str(Path(package.submodule_search_locations[0]) / "ops" / "gated_delta_rule" / "naive.py")
    if importlib.util.find_spec("einops") is None:
        raise UserError("the naive form of flash-linear-attention needs einops; run: pip install einops")
    module = load_module(path, "fla_naive_gated_delta_rule")

    def peer(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return module.naive_chunk_gated_delta_rule(query, key, value, log_decay, beta)[0]

    return peer


def load_module(path: str, name: str) -> Any:
    """A single Python file that the user names, without the package that it may belong to.

    Raises:
        UserError: no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered, because dataclasses look their own module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def ours(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Our chunked form with the chunk size that the mixer uses."""
    scaled = query * query.shape[-1] ** -0.5
    return chunked_gated_delta_rule(scaled, key, value, log_decay, beta, None, chunk_size(query.device.type))[0]


def compare_peers(
    shapes_BTHK: list[tuple[int, int, int, int]], num_repeats: int, peer: Operator | None
) -> Iterator[PeerRow]:
    """Times forward + backward at every shape, the two implementations taking turns; V = K, float32, CPU."""
    for shape in shapes_BTHK:
        operators = {"attnbench": ours} if peer is None else {"attnbench": ours, "fla naive": peer}
        inputs = example_inputs(shape)
        # Also the warm-up.
        results = {name: _run(operator, inputs) for name, operator in operators.items()}
        milliseconds: dict[str, list[float]] = {name: [] for name in operators}
        for _ in range(num_repeats):
            for name, operator in operators.items():
                start = time.perf_counter()
                _run(operator, inputs)
                milliseconds[name].append(1e3 * (time.perf_counter() - start))
        baseline = statistics.median(milliseconds["fla naive"]) if peer is not None else float("nan")
        for name, times in milliseconds.items():
            yield PeerRow(
                implementation=name,
                shape_BTHK=shape,
                median_milliseconds=statistics.median(times),
                minimum_milliseconds=min(times),
                maximum_milliseconds=max(times),
                speedup=baseline / statistics.median(times),
                max_error=_relative_error(results[name], results["attnbench"]),
            )


def example_inputs(shape_BTHK: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    """Query and key of length 1, value normal, decays of 0.8 to 1, beta in 0..1; all asking for gradients."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(shape_BTHK, generator=generator) for _ in range(3))
    log_decay, beta = (torch.rand(shape_BTHK[:3], generator=generator) for _ in range(2))
    inputs = [normalize(query, dim=-1), normalize(key, dim=-1), value, -0.2 * log_decay, beta]
    return [x.requires_grad_() for x in inputs]


def _run(operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients, with a gradient of the output that is a full tensor, as in a model."""
    output = operator(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))]


def _relative_error(results: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, expected, strict=True))
