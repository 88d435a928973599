"""Device, inputs and tolerances of the tests of kernels."""

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU kernels are interpreted."""

interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="of mixers on the CPU, through Triton's interpreter")


LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
"""Around the ends of chunks of 16, 32 and 64, and over two of these."""
EACH_LENGTH = [pytest.param(length, marks=[pytest.mark.slow] * (length in (15, 17, 63, 133))) for length in LENGTHS]
DECAYS = ("0", "-0.01", "-5", "mixed")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw numbers that are equal on every device, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "", *, smallest: float = 0.0) -> None:
    """Hold that |actual - expected| <= tolerance × max(|expected|, smallest), by their norms."""
    assert actual.shape == expected.shape, what
    assert actual.isfinite().all(), what
    error = (actual.detach().double() - expected.double()).norm()
    scale = expected.detach().double().norm().clamp(min=smallest)
    assert error <= tolerance * scale, f"{what}: {float(error):.2e} of {float(scale):.2e}"


def assert_definition(
    operator: Callable[..., Any],
    definition: Callable[..., Any],
    tensors: Sequence[Any],
    tolerance: float,
    *,
    gradient_parts: int = 1,
) -> None:
    """Hold an operator's outputs, and its gradients under a random weighting of them, against a definition in float64.

    `gradient_parts`: number of equal parts of a gradient's last axis, each compared by itself.
    """
    wide: list[Any] = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    actual, expected = (y if isinstance(y, tuple) else (y,) for y in (operator(*tensors), definition(*wide)))
    for own, other in zip(actual, expected, strict=True):
        assert_near(own, other, tolerance)
    weighted = [index for index, y in enumerate(actual) if y.requires_grad]
    weights = [normal(*actual[index].shape, dtype=actual[index].dtype, seed=90 + index) for index in weighted]
    leaves = [index for index, x in enumerate(tensors) if x is not None and x.requires_grad]
    gradients = torch.autograd.grad([actual[i] for i in weighted], [tensors[i] for i in leaves], weights)
    upstream = [x.double() for x in weights]
    exact = torch.autograd.grad([expected[i] for i in weighted], [wide[i] for i in leaves], upstream)
    for leaf, gradient, other in zip(leaves, gradients, exact, strict=True):
        assert gradient.dtype == tensors[leaf].dtype
        # One key has no score to learn, one position no decay: their gradients are rounding.
        smallest = float(sum(x.double().norm() for x in weights)) if float(other.norm()) <= 1e-3 else 0.0
        if gradient_parts > 1:
            smallest = max(smallest, 0.1 * float(other.norm()))
        parts = zip(gradient.chunk(gradient_parts, dim=-1), other.chunk(gradient_parts, dim=-1), strict=True)
        for own, part in parts:
            assert_near(own, part, tolerance, f"gradient of input {leaf}", smallest=smallest)


def assert_stacked(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], in_dims: Sequence[int | None], tolerance: float = 1e-5
) -> None:
    """Hold `function` under vmap against a call for each element of the stack, in outputs and gradients."""
    with warnings.catch_warnings():
        # An operator without a batching rule runs in a loop and warns.
        warnings.simplefilter("error", UserWarning)
        stacked = torch.vmap(function, tuple(in_dims))(*tensors)
    pairs = list(zip(tensors, in_dims, strict=True))
    alone = [function(*(x if d is None else x.select(d, run) for x, d in pairs)) for run in range(len(stacked))]
    leaves = [x for x in tensors if x.requires_grad]
    results = [(y, *torch.autograd.grad(y.square().sum(), leaves)) for y in (stacked, torch.stack(alone))]
    for own, other in zip(*results, strict=True):
        assert_near(own, other, tolerance)


def in_parts(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Split every walk of our FlashAttention, into parts that hold no number until one is written."""
    # Triton, which it loads, need not be there for other tests.
    from attnbench.ops.attention.triton import flash_launch

    of_parts = flash_launch.of_parts
    monkeypatch.setattr(flash_launch, "splits_for", lambda *_: splits)
    monkeypatch.setattr(flash_launch, "of_parts", lambda *arguments: of_parts(*arguments).fill_(torch.nan))


def assert_same_bits(operator: Callable[[], Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
    """Hold that three calls on a GPU give finite outputs and gradients of the same bits."""
    results = []
    for _ in range(3):
        # What a kernel leaves unwritten is then not what the run before left there.
        torch.full((2**28,), torch.nan, device="cuda")
        y, last = operator()
        results.append([y, last, *torch.autograd.grad(y.float().square().sum() + last.sum(), tensors)])
    for again in results:
        for first, second in zip(results[0], again, strict=True):
            assert first.isfinite().all()
            assert torch.equal(first, second)


def patch_language_once() -> None:
    """Let Triton's interpreter replace the functions of triton.language only where they are not replaced yet.

    It does so at each call of a function within a kernel, which takes a third of its time.
    """
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
