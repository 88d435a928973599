"""Sliding-window attention in blocks against the definition, and its cache that is as long as the window."""

from functools import partial
from typing import Any

import pytest
import torch
from mixer_building import assert_near, build, example_input
from torch import Tensor

from attnbench.mixers.base import state_bytes
from attnbench.mixers.definition import in_pieces
from attnbench.mixers.window import Window
from attnbench.ops.attention.softmax_attention import definition
from attnbench.ops.attention.window_attention import in_blocks
from attnbench.settings.errors import UserError

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, 2, 8), (2, length, 1, 8), (2, length, 1, 8))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double() for shape in shapes]


def output_and_gradients(function, tensors: list[Tensor], window: int, dtype: torch.dtype) -> list[Tensor]:
    given = [x.to(dtype).requires_grad_() for x in tensors]
    y = function(*given, window)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * weight).sum(), given)]


@pytest.mark.parametrize("window", [1, 5, 16, 64])
def test_blocks_equal_the_definition_in_output_and_gradients(window: int) -> None:
    for length in LENGTHS:
        tensors = inputs(length)
        expected = output_and_gradients(definition, tensors, window, torch.float64)
        for dtype, tolerance in TOLERANCE.items():
            actual = output_and_gradients(in_blocks, tensors, window, dtype)
            for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
                scale = max(float(other.abs().max()), 1e-2)
                assert (one.double() - other).abs().max() <= tolerance * scale, (index, length, dtype)


@pytest.mark.parametrize("num_queries", [1, 7, 8, 20])
def test_fewer_queries_than_keys_are_the_last_ones(num_queries: int) -> None:
    query, key, value = inputs(27)
    expected = definition(query, key, value, 8)[:, -num_queries:]
    assert_near(in_blocks(query[:, -num_queries:], key, value, 8), expected, 1e-12)


def doubled(x: Tensor) -> Tensor:
    """The input, and one of another size."""
    return torch.stack([x, 0.5 * x])


def test_compiled_and_stacked_it_is_the_same() -> None:
    tensors = inputs(33)
    expected = output_and_gradients(in_blocks, tensors, 8, torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(in_blocks, backend="aot_eager", fullgraph=True)
    for one, other in zip(output_and_gradients(compiled, tensors, 8, torch.float64), expected, strict=True):
        assert_near(one, other, 1e-12)
    stacked = torch.vmap(partial(in_blocks, window=8))(*map(doubled, tensors))
    assert_near(stacked[0], expected[0], 1e-12)
    query, key, value = (0.5 * x for x in tensors)
    assert_near(stacked[1], in_blocks(query, key, value, 8), 1e-12)


@pytest.mark.parametrize("window", [1, 5, 64])
def test_the_cache_goes_round(window: int) -> None:
    """Pieces shorter, as long as and longer than the window, and steps past its end more than once."""
    mixer: Any = build("window", dtype=torch.float64, window=window)
    x = example_input(2, 140, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = mixer(x)
        for sizes in ((1,) * 140, (140,), (3, 5, 1, 64, 1, 66), (130, *(1,) * 10)):
            assert_near(in_pieces(mixer, x, sizes), expected, 1e-12, str(sizes))
    sizes = [state_bytes(mixer.init_state(1, length, torch.float32)) for length in (8, 100_000)]
    assert sizes[0] == sizes[1] == 2 * 4 * 64 * window + 8


def test_matches_a_state_by_its_window() -> None:
    choices = Window.state_choices({}, dim=64, head_width=32)
    bytes_of = [state_bytes(build("window", **choice).init_state(1, 1, torch.float32)[:2]) for choice in choices]
    assert bytes_of == [512 * (index + 1) for index in range(64)]


@pytest.mark.parametrize(
    ("options", "device_type", "chosen"),
    [
        ({}, "cpu", "torch"),
        ({"head_width": 256}, "cuda", "torch"),
        ({"backend": "torch"}, "cuda", "torch"),
        ({"backend": "flash_attn"}, "cpu", r"flash_attn: runs on CUDA alone, not on device=cpu; use backend=torch"),
        ({"backend": "flash_attn"}, "cuda", r"train.precision=float32: attn.backend=flash_attn needs half"),
        ({"backend": "sdpa"}, "cpu", r"attn.backend=sdpa: Window has auto, torch, triton, flash_attn"),
    ],
)
def test_chooses_a_backend_that_has_a_window_or_refuses(options, device_type: str, chosen: str) -> None:
    def choose() -> str:
        return Window.choose_backend(options, device_type=device_type, precision="float32")

    if ":" not in chosen:
        assert choose() == chosen
        return
    with pytest.raises(UserError, match=chosen):
        choose()
