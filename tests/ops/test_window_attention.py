"""Sliding-window attention in blocks against the definition, and its cache that is as long as the window."""

from functools import partial
from itertools import product

import pytest
import torch
from kernel_checks import assert_definition, assert_stacked, normal
from mixer_building import assert_near, build
from torch import Tensor

from attnbench.mixers.base import state_bytes
from attnbench.mixers.window import Window
from attnbench.ops.attention.softmax_attention import definition
from attnbench.ops.attention.window_attention import in_blocks
from attnbench.settings.errors import UserError

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(2, length, heads, 8) for heads in (2, 1, 1)]
    tensors = [normal(*shape, dtype=torch.bfloat16, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    return [x.requires_grad_() for x in tensors]


@pytest.mark.parametrize("window", [1, 5, 16, 64])
def test_blocks_equal_the_definition_in_output_and_gradients(window: int) -> None:
    for length, (dtype, tolerance) in product(LENGTHS, TOLERANCE.items()):
        forms = (partial(form, window=window) for form in (in_blocks, definition))
        assert_definition(*forms, inputs(length, dtype), tolerance)


@pytest.mark.parametrize("num_queries", [1, 7, 8, 20])
def test_fewer_queries_than_keys_are_the_last_ones(num_queries: int) -> None:
    query, key, value = inputs(27)
    expected = definition(query, key, value, 8)[:, -num_queries:]
    assert_near(in_blocks(query[:, -num_queries:], key, value, 8), expected, 1e-12)


def test_compiled_and_stacked_it_is_the_same() -> None:
    torch.compiler.reset()
    compiled = torch.compile(partial(in_blocks, window=8), backend="aot_eager", fullgraph=True)
    assert_definition(compiled, partial(definition, window=8), inputs(33), 1e-12)
    stacked = [torch.stack([x, 0.5 * x]).detach().requires_grad_() for x in inputs(33)]
    assert_stacked(partial(in_blocks, window=8), stacked, [0] * 3, 1e-12)


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
