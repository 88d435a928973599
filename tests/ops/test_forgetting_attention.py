"""Softmax attention with forget gates: the form with written-out weights against the definition, in every precision."""

from typing import Any

import pytest
import torch
from kernel_checks import LENGTHS, assert_definition, assert_stacked, normal
from library_forms import naive_form
from mixer_building import assert_near, build, example_input
from torch import Tensor

from attnbench.mixers.definition import in_pieces
from attnbench.ops.attention.forgetting_attention import forgetting_bias
from attnbench.ops.attention.softmax_attention import definition, materialised

LOG_FORGET = {"never": 0.0, "slowly": -0.01, "at once": -5.0, "mixed": None}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def inputs(length: int, forgetting: str, num_groups: int = 2, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query of 4 heads, key and value of `num_groups`, and log f, in float32 at least, each to take a gradient of."""
    shapes = [(2, length, heads, 8) for heads in (4, num_groups, num_groups)]
    heads = [normal(*shape, dtype=torch.bfloat16, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    drawn = -5 * torch.rand(2, length, 4, generator=torch.Generator().manual_seed(length), dtype=torch.float64) ** 4
    value = LOG_FORGET[forgetting]
    log_forget = drawn if value is None else torch.full_like(drawn, value)
    wide = torch.promote_types(dtype, torch.float32)
    return [x.requires_grad_() for x in (*heads, log_forget.to(heads[0].device, wide))]


def form(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return materialised(query, key, value, None, forgetting_bias(log_forget))


def by_definition(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return definition(query, key, value, None, log_forget)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("forgetting", LOG_FORGET)
def test_equals_the_definition_in_output_and_gradients(forgetting: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        assert_definition(form, by_definition, inputs(length, forgetting, dtype=dtype), TOLERANCE[dtype])


def test_compiled_and_stacked_it_is_the_same() -> None:
    torch.compiler.reset()
    compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
    assert_definition(compiled, by_definition, inputs(33, "mixed"), 1e-12)
    stacked = [torch.stack([x, 0.5 * x]).detach().requires_grad_() for x in inputs(33, "mixed")]
    assert_stacked(form, stacked, [0] * 4, 1e-12)


def test_a_gate_counts_for_what_came_before_it_alone() -> None:
    """Where f is nearly 0, a position sees itself; where it is at the first position, nothing changes."""
    query, key, value, log_forget = (x.detach() for x in inputs(9, "never", num_groups=4))
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
    tensors = [x.detach().float() for x in inputs(65, forgetting)]
    assert_near(form(*tensors), library.naive_forgetting_attn(*tensors), 1e-5)
