"""Device, inputs and tolerances of the tests of kernels."""

from importlib.util import find_spec
from types import FunctionType

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


def patch_language_once() -> None:
    """Triton's interpreter puts its own functions in the place of triton.language's at each call of a function within
    a kernel, again and again, which is a third of its time: from here on only where they are not in place."""
    from triton.runtime import interpreter

    language, patch = interpreter.tl, interpreter._patch_lang

    def patch_where_needed(function: FunctionType) -> interpreter._LangPatchScope:
        seen = [x for x in (language, language.core) if any(x is value for value in function.__globals__.values())]
        is_in_place = not any(language.core.is_builtin(x.load) for x in seen)
        return interpreter._LangPatchScope() if is_in_place else patch(function)

    interpreter._patch_lang = patch_where_needed


# Where there is no triton there are tests without kernels that need this file.
if DEVICE == "cpu" and find_spec("triton"):
    patch_language_once()
