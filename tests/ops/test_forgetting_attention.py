"""Softmax attention with forget gates: the form with written-out weights against the definition, in every precision."""

from typing import Any

import pytest
import torch
from library_forms import naive_form
from mixer_building import assert_near, build, example_input
from torch import Tensor

from attnbench.mixers.definition import in_pieces
from attnbench.ops.attention.forgetting_attention import forgetting_bias
from attnbench.ops.attention.softmax_attention import definition, materialised

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
LOG_FORGET = {"never": 0.0, "slowly": -0.01, "at once": -5.0, "mixed": None}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def inputs(length: int, forgetting: str, num_groups: int = 2) -> list[Tensor]:
    """Query of 4 heads, key and value of `num_groups`, and log f, in float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double()

    value = LOG_FORGET[forgetting]
    if value is None:
        log_forget = -5 * torch.rand(2, length, 4, generator=generator, dtype=torch.float64) ** 4
    else:
        log_forget = torch.full((2, length, 4), value, dtype=torch.float64)
    return [normal(2, length, 4, 8), normal(2, length, num_groups, 8), normal(2, length, num_groups, 8), log_forget]


def form(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return materialised(query, key, value, None, forgetting_bias(log_forget))


def by_definition(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return definition(query, key, value, None, log_forget)


def output_and_gradients(function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, and the gradients of a weighted sum of it; log f is in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    given = [x.to(wide if index == 3 else dtype).requires_grad_() for index, x in enumerate(tensors)]
    y = function(*given)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * weight).sum(), given)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("forgetting", LOG_FORGET)
def test_equals_the_definition_in_output_and_gradients(forgetting: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        tensors = inputs(length, forgetting)
        expected = output_and_gradients(by_definition, tensors, torch.float64)
        actual = output_and_gradients(form, tensors, dtype)
        for name, one, other in zip(("output", "query", "key", "value", "log_forget"), actual, expected, strict=True):
            # At length 1 query, key and log f decide nothing, and their gradients are 0.
            scale = max(float(other.abs().max()), 1e-2)
            assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * scale, (name, length)


def test_compiled_and_stacked_it_is_the_same() -> None:
    tensors = inputs(33, "mixed")
    expected = output_and_gradients(form, tensors, torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
    for one, other in zip(output_and_gradients(compiled, tensors, torch.float64), expected, strict=True):
        assert_near(one, other, 1e-12)
    stacked = torch.vmap(form)(*(torch.stack([x, 0.5 * x]) for x in tensors))
    assert_near(stacked[0], expected[0], 1e-12)
    assert_near(stacked[1], form(*(0.5 * x for x in tensors)), 1e-12)


def test_a_gate_counts_for_what_came_before_it_alone() -> None:
    """Where f is nearly 0, a position sees itself; where it is at the first position, nothing changes."""
    query, key, value, log_forget = inputs(9, "never", num_groups=4)
    gated = log_forget.clone()
    gated[:, 5] = -1e4
    y = form(query, key, value, gated)
    torch.testing.assert_close(y[:, 5], value[:, 5])
    torch.testing.assert_close(y[:, :5], form(query, key, value, log_forget)[:, :5])
    gated = log_forget.clone()
    gated[:, 0] = -1e4
    torch.testing.assert_close(form(query, key, value, gated), form(query, key, value, log_forget))


@pytest.mark.parametrize("bias", [20.0, 4.6, -5.0])
def test_the_cache_forgets_as_the_whole_does(bias: float) -> None:
    """Log f near 0, -0.01 and -5 a position, read in pieces and in steps."""
    mixer: Any = build("fox", dtype=torch.float64)
    x = example_input(2, 133, dtype=torch.float64)
    with torch.no_grad():
        mixer.forget_bias.fill_(bias)
        expected, _ = mixer(x)
        for sizes in ((133,), (1,) * 133, (64, 1, 65, 3), (1, 131, 1)):
            assert_near(in_pieces(mixer, x, sizes), expected, 1e-12, str(sizes))
        # The same weights without gates are another function, where the gates do anything.
        ungated = mixer.finish(mixer.mix(*mixer.project(x, 0, None)), x)
    assert torch.allclose(ungated, expected, rtol=1e-3) is (bias == 20.0)


@pytest.mark.parametrize("forgetting", LOG_FORGET)
def test_is_what_the_library_defines(forgetting: str) -> None:
    library = naive_form("forgetting_attn")
    tensors = [x.float() for x in inputs(65, forgetting)]
    assert_near(form(*tensors), library.naive_forgetting_attn(*tensors), 1e-5)
