"""What the tests of kernels share: the device they run on, their inputs, and when a result is near enough."""

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU kernels are interpreted."""

interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="of mixers on the CPU, through Triton's interpreter")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every device, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "", *, smallest: float = 0.0) -> None:
    """|actual - expected| <= tolerance × |expected|, by their norms, where |expected| counts as at least `smallest`."""
    assert actual.shape == expected.shape, what
    assert actual.isfinite().all(), what
    error = (actual.detach().double() - expected.double()).norm()
    scale = expected.detach().double().norm().clamp(min=smallest)
    assert error <= tolerance * scale, f"{what}: {float(error):.2e} of {float(scale):.2e}"
