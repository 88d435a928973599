"""Mamba-3's queries and keys by our kernel are those of single operations, and so are their gradients."""

import pytest
import torch
from kernel_checks import assert_definition, assert_near, assert_stacked, interpreted, normal
from mixer_building import build, example_input
from torch import Tensor

from attnbench.ops.layers.rotary import turn
from attnbench.ops.layers.triton.turned_heads import turned_heads

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPS = 0.1


def given(B: int, T: int, H: int, K: int, V: int, A: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and values packed, gain, bias, and angles of several turns."""
    tensors = [
        normal(B, T, 2 * K + V, dtype=dtype),
        normal(1, 2, K, seed=1),
        normal(1, 2, H, K, seed=2),
        20 * normal(B, T, H, A, seed=3),
    ]
    return [x.requires_grad_() for x in tensors]


def definition(packed_BTC: Tensor, gain_R2K: Tensor, bias_R2HK: Tensor, angle_BTHA: Tensor) -> Tensor:
    K, turned = gain_R2K.shape[-1], []
    for index, x in enumerate(packed_BTC.split([K, K, packed_BTC.shape[-1] - 2 * K], dim=-1)[:2]):
        normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain_R2K[0, index]
        turned.append(turn(normed[:, :, None] + bias_R2HK[0, index], angle_BTHA).flatten(2))
    return torch.cat([*turned, packed_BTC[..., 2 * K :]], dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "V", "A"), [(1, 1, 1, 16, 16, 4), (2, 37, 3, 24, 33, 6), (1, 70, 2, 128, 64, 64)]
)
def test_queries_and_keys_are_normed_shifted_and_turned(B, T, H, K, V, A, dtype):
    tensors = given(B, T, H, K, V, A, dtype)
    assert_definition(lambda *x: turned_heads(*x, EPS), definition, tensors, TOLERANCES[dtype])
    # No angle of a position or head is another's, and a pair without one stays.
    heads_BTC = turned_heads(*tensors, EPS).detach()
    kept_BTC = turned_heads(*tensors[:3], torch.zeros_like(tensors[3]), EPS).detach()
    by_head, kept = (x[..., : 2 * H * K].unflatten(-1, (2 * H, K)) for x in (heads_BTC, kept_BTC))
    assert torch.equal(by_head[..., 2 * A :], kept[..., 2 * A :])
    assert torch.equal(heads_BTC[..., 2 * H * K :], tensors[0].detach()[..., 2 * K :])


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_angles_of_any_size_turn_by_their_remainder(size):
    packed, gain, bias, angle = given(1, 40, 2, 16, 16, 8, torch.float32)
    angle = (size * angle).detach().requires_grad_()
    assert_definition(lambda *x: turned_heads(*x, EPS), definition, [packed, gain, bias, angle], 2e-6)


def test_gradients_have_the_same_bits_twice():
    tensors = given(2, 50, 3, 16, 16, 4, torch.float32)
    loss = turned_heads(*tensors, EPS).square().sum()
    for first, second in zip(*(torch.autograd.grad(loss, tensors, retain_graph=True) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


def test_stacked_models_are_each_alone():
    packed, gain, bias, angle = (
        torch.stack([x.detach(), 2 * x.detach(), -x.detach()]).requires_grad_()
        for x in given(2, 9, 2, 16, 16, 4, torch.float32)
    )
    assert_stacked(lambda *x: turned_heads(*x, EPS), [packed, gain, bias, angle], [0, 0, 0, 0])
    shared = gain.detach()[0].requires_grad_()
    assert_stacked(lambda *x: turned_heads(*x, EPS), [packed, shared, bias, angle], [0, None, 0, 0])


@interpreted
@pytest.mark.parametrize("change", [{}, {"conv_size": 3}, {"qk_norm": False}, {"rotary_theta": 100.0}])
def test_a_mixer_that_trains_by_it_is_the_one_by_torch(change, monkeypatch):
    calls = []
    counted = lambda *x: (calls.append(1), turned_heads(*x))[1]  # noqa: E731
    monkeypatch.setattr("attnbench.ops.layers.triton.turned_heads.turned_heads", counted)
    x = example_input(2, 40).requires_grad_()
    results = []
    for backend in ("triton", "torch"):
        mixer = build("mamba3", backend=backend, num_heads=2, state_width=16, **change)
        y = mixer(x)[0]
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
    for own, other in zip(*results, strict=True):
        assert_near(own, other, 1e-4, smallest=1e-3)
    # Without a norm, or with rotary positions, which turn what is shifted, single operations do it.
    assert len(calls) == (not {"qk_norm", "rotary_theta"} & set(change))
