"""The layers against their plain formulas, in outputs and gradients, and under the transforms that training uses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import assert_stacked
from small import WeightReads
from torch import Tensor

from attnbench.mixers import layers
from attnbench.mixers.layers import FeedForward, RMSNorm, ShortConvolution
from attnbench.ops.layers.rotary import rotate, rotation


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def norm_with(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(weight.shape[-1], eps=0.1)
    norm.weight = torch.nn.Parameter(weight.detach().clone())
    return norm


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()


def plain_rotation(x_BTHK: Tensor, start: int, theta: float) -> Tensor:
    """Each pair of channels times its 2 × 2 matrix."""
    turned = torch.empty_like(x_BTHK)
    width = x_BTHK.shape[3]
    for t in range(x_BTHK.shape[1]):
        for i in range(width // 2):
            angle = torch.tensor((start + t) * theta ** (-2 * i / width), dtype=torch.float64)
            matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            turned[:, t, :, 2 * i : 2 * i + 2] = x_BTHK[:, t, :, 2 * i : 2 * i + 2] @ matrix.T
    return turned


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 3, 8), (8,)])
def test_norm_is_its_formula(shape: tuple[int, ...]) -> None:
    x, weight, upstream = inputs(*shape), inputs(8, seed=1), inputs(*shape, seed=2)
    norm = norm_with(weight)
    y, exact = norm(x), plain_norm(x, weight)
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), weight, 0.1))
    fast = torch.autograd.grad((y * upstream).sum(), [x, norm.weight])
    torch.testing.assert_close(fast, torch.autograd.grad((exact * upstream).sum(), [x, weight]))


@pytest.mark.parametrize("shared_input", [True, False])
def test_norm_under_vmap(shared_input: bool) -> None:
    """Stacked weights over one input, as in a first layer, and over stacked inputs."""
    weight, x = inputs(3, 8, seed=1), inputs(*(() if shared_input else (3,)), 2, 5, 8)
    norm = norm_with(weight[0])
    stacked = lambda weight, x: torch.func.functional_call(norm, {"weight": weight}, (x,))  # noqa: E731
    assert_stacked(stacked, [weight, x], [0, None if shared_input else 0])


def test_norm_keeps_bfloat16_and_computes_in_float32() -> None:
    """1,024 ones after a hundred: summed in bfloat16 their squares are lost beside 10,000."""
    x = torch.cat([torch.full((1,), 100.0), torch.ones(1024)])
    norm = RMSNorm(1025)
    torch.nn.init.ones_(norm.weight)
    y = norm(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, norm(x).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("start", [0, 7])
def test_rotation_is_its_matrices(start: int) -> None:
    x, upstream = inputs(2, 5, 3, 8), inputs(2, 5, 3, 8, seed=1)
    y = rotate(x, rotation(5, 8, torch.tensor(start), 100.0, x.device))
    exact = plain_rotation(x, start, 100.0)
    # The angles are in float32.
    torch.testing.assert_close(y, exact, rtol=0, atol=1e-5)
    (fast,), (slow,) = (torch.autograd.grad((z * upstream).sum(), x) for z in (y, exact))
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-5)


def test_rotation_in_half_precision_and_in_its_form_for_the_compiler() -> None:
    x, angles = inputs(2, 5, 3, 8), rotation(5, 8, 1000, 100.0, torch.device("cpu"))
    half = rotate(x.bfloat16(), angles)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), rotate(x, angles), rtol=0, atol=0.03)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)(x, angles)
    torch.testing.assert_close(compiled, rotate(x, angles), rtol=0, atol=1e-6)


def test_feed_forward_is_swiglu() -> None:
    x, layer = inputs(2, 5, 8), FeedForward(8, 12).double()
    gated = F.linear(x, layer.gate.weight)
    exact = F.linear(gated * gated.sigmoid() * F.linear(x, layer.up.weight), layer.down.weight)
    torch.testing.assert_close(layer(x), exact)


def test_feed_forward_casts_its_weights_once_in_many_steps(monkeypatch) -> None:
    """As decoding on a GPU calls it, step after step inside one autocast."""
    monkeypatch.setattr(layers, "on_kernels", lambda x: True)
    x, layer = inputs(5, 8).bfloat16(), FeedForward(8, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = layer(x)
        with WeightReads(layer) as reads:
            assert torch.equal(layer(x), first)
    assert not reads.operators


def test_convolution_is_its_sum_in_pieces_too() -> None:
    x, layer = inputs(2, 9, 6), ShortConvolution(6, 4).double()
    layer.init_weights(torch.Generator().manual_seed(0), 1)
    padded = F.pad(x, (0, 0, 3, 0))
    exact = torch.stack([(padded[:, t : t + 4] * layer.weight.T).sum(1) for t in range(9)], dim=1)
    torch.testing.assert_close(layer(x), exact)
    history = torch.zeros(2, 3, 6, dtype=torch.float64)
    with torch.no_grad():
        pieces = torch.cat([layer(piece, history) for piece in x.split((1, 2, 5, 1), dim=1)], dim=1)
    torch.testing.assert_close(pieces, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_convolution_on_a_gpu_is_that_of_a_cpu_in_pieces_too(dtype, size):
    """Sizes with a kernel and without."""
    layer = ShortConvolution(6, size)
    layer.init_weights(torch.Generator().manual_seed(0), 1)
    x = inputs(2, 9, 6).to(dtype)
    exact = copy.deepcopy(layer).double()(x.double(), activation=True)
    layer, x = layer.to("cuda"), x.to("cuda")
    history = torch.zeros(2, size - 1, 6, dtype=dtype, device="cuda")
    with torch.no_grad():
        pieces = torch.cat([layer(piece, history, activation=True) for piece in x.split((1, 2, 5, 1), dim=1)], dim=1)
    for actual in (layer(x, activation=True), pieces):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.cpu().double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
