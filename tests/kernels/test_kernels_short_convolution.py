"""The short convolution's kernels against its sum in float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, assert_definition, assert_stacked, normal
from torch import Tensor

from attnbench.mixers import layers
from attnbench.mixers.layers import ShortConvolution
from attnbench.ops.layers.triton.short_convolution import (
    BLOCKS,
    convolve,
    launch_backward,
    launch_forward,
    short_convolution,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def definition(x_BTC: Tensor, weight_CW: Tensor, history_BWC: Tensor | None, silu: bool) -> Tensor:
    size = weight_CW.shape[1]
    if history_BWC is None:
        history_BWC = x_BTC.new_zeros(x_BTC.shape[0], size - 1, x_BTC.shape[2])
    windows_BTCW = torch.cat([history_BWC, x_BTC], dim=1).unfold(1, size, 1)
    y = (windows_BTCW * weight_CW).sum(-1)
    return F.silu(y) if silu else y


def check(batch: int, length: int, channels: int, size: int, dtype: torch.dtype, silu: bool, history: bool) -> None:
    """Weights stay in float32, as a model's do under autocast."""
    inputs = [normal(batch, length, channels, dtype=dtype), normal(channels, size, seed=1)]
    past = normal(batch, size - 1, channels, dtype=dtype, seed=2) if history else None
    assert_definition(
        lambda *tensors: short_convolution(*tensors, silu),
        lambda *tensors: definition(*tensors, silu),
        [*(x.requires_grad_() for x in inputs), past],
        TOLERANCE[dtype],
    )


# Around the border of a segment of 64 positions, and over several with a ragged end.
@pytest.mark.parametrize(
    ("length", "silu"), [(1, True), (2, False), (63, True), (64, False), (65, False), (65, True), (133, True)]
)
def test_kernels_are_the_definition(length, silu):
    check(2, length, 20, 4, torch.float32, silu, history=False)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_kernels_are_the_definition_at_any_size_with_history(size):
    for length in (1, size - 1, 66):
        check(2, length, 20, size, torch.float32, True, history=True)


def test_kernels_are_the_definition_in_bfloat16_over_many_channels():
    check(1, 70, 300, 4, torch.bfloat16, True, history=True)


def test_nothing_is_left_unwritten(monkeypatch):
    """What a kernel does not write shows as NaN."""
    empty = torch.empty_like

    def filled(*args, **kwargs):
        return empty(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty_like", filled)
    x, weight = normal(2, 70, 20), normal(1, 20, 4, seed=1)
    assert launch_forward(x, weight, None, True, BLOCKS).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in launch_backward(x, x, weight, None, True, BLOCKS))


@pytest.mark.parametrize("history", [False, True])
def test_it_is_a_proper_operator(history):
    x = normal(4, 5, 6).requires_grad_()
    weight = normal(2, 6, 3, seed=1).requires_grad_()
    past = normal(4, 2, 6, seed=2) if history else None
    torch.library.opcheck(convolve, (x, weight, past, True))


@pytest.mark.parametrize("unmapped", [None, 0, 1, 2])
def test_stacked_weights_and_inputs_under_vmap(unmapped):
    tensors = [normal(2, *shape, seed=3) for shape in ((2, 5, 6), (6, 4), (2, 3, 6))]
    in_dims: list[int | None] = [0, 0, 0]
    if unmapped is not None:
        tensors[unmapped], in_dims[unmapped] = tensors[unmapped][0], None
    x, weight, history = (tensor.requires_grad_(i < 2) for i, tensor in enumerate(tensors))
    assert_stacked(lambda *given: short_convolution(*given, True), (x, weight, history), in_dims)


def test_a_gradient_for_the_history_is_refused():
    x, weight = normal(1, 5, 6), normal(6, 3, seed=1)
    past = normal(1, 2, 6, seed=2).requires_grad_()
    with pytest.raises(NotImplementedError, match="history"):
        short_convolution(x, weight, past).sum().backward()


@pytest.mark.parametrize(("size", "dtype"), [(9, torch.float32), (4, torch.float64)])
def test_what_has_no_kernel_is_refused(size, dtype):
    with pytest.raises(ValueError, match="no kernel"):
        short_convolution(normal(1, 5, 6, dtype=dtype), normal(6, size, dtype=dtype, seed=1))


@pytest.mark.skipif(DEVICE == "cuda", reason="test_layers.py has the layer there")
def test_the_layer_by_kernel_is_its_torch_form_compiled_and_in_pieces_too(monkeypatch):
    layer, x = ShortConvolution(6, 4), normal(2, 9, 6)
    layer.init_weights(torch.Generator().manual_seed(0), 1)
    expected = layer(x, activation=True)
    monkeypatch.setattr(layers, "on_kernels", lambda x_BTC: True)
    torch.testing.assert_close(layer(x, activation=True), expected)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, activation=True), expected)
    history = torch.zeros(2, 3, 6)
    with torch.no_grad():
        pieces = torch.cat([layer(piece, history, activation=True) for piece in x.split((1, 2, 5, 1), dim=1)], dim=1)
    torch.testing.assert_close(pieces, expected)
