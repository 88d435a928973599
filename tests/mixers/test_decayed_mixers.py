"""Properties of the mixers with one decay a head alone: their decays, their options, and references from elsewhere."""

import math

import pytest
import torch
from library_forms import naive_form
from mixer_building import DIM, HEAD_WIDTH, assert_near, build, example_input, half_lives
from torch import nn

from attnbench.mixers.mamba3 import Mamba3
from attnbench.mixers.shell import RecurrentMixer
from attnbench.settings.errors import UserError


def built(name: str, **options: object) -> RecurrentMixer:
    mixer = build(name, **options)
    assert isinstance(mixer, RecurrentMixer)
    return mixer


def test_retnets_decays_are_its_papers_constants():
    mixer = built("retnet", num_heads=8)
    expected = [1 - 2.0 ** (-5 - head) for head in range(8)]
    assert mixer.log_decay(example_input(2, 3)).exp()[0, 2].tolist() == pytest.approx(expected)
    assert half_lives(mixer, DIM)[0].item() == pytest.approx(21.8, abs=0.1)
    assert not [name for name, _ in mixer.named_parameters() if "decay" in name]


@pytest.mark.parametrize("length", [1, 65, 133])
def test_retnet_is_what_the_library_defines(length):
    mixer, x = built("retnet", num_heads=3), example_input(2, length)
    query, key, value = mixer.normed_heads(x, None, mixer.positions(x, 0))
    parts = ((query / mixer.scale).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    expected = naive_form("retention").naive_retention(*parts).transpose(1, 2)
    assert_near(mixer.mix((query, key, value, *mixer.signals(x)), None)[0], expected, 1e-5)


def test_simple_gla_is_a_root_of_a_gate():
    mixer, x = built("simple_gla", decay_init="paper"), example_input(2, 5)
    assert half_lives(mixer, DIM).tolist() == pytest.approx([16, 16])
    expected = torch.sigmoid(-mixer.decay(x) - mixer.decay_bias) ** (1 / 16)
    assert_near(mixer.log_decay(x).exp(), expected, 1e-6)


def test_mamba_2_is_its_papers_matrix():
    """Its dual form: the products of all decays between two positions, times C B^T, times the step."""
    mixer, x = built("mamba2", dtype=torch.float64), example_input(2, 70, dtype=torch.float64)
    query, key, value = mixer.normed_heads(x, None, mixer.positions(x, 0))
    step = nn.functional.softplus(mixer.step_size(x) + mixer.step_bias).transpose(1, 2)
    total = (-mixer.log_decay_rate.exp()[:, None] * step).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).exp().tril()
    scores = torch.einsum("btgk,bsgk->bts", query, key)
    mixed = torch.einsum("bhts,bts,bhs,bshv->bthv", decay, scores, step, value) + mixer.skip[:, None] * value
    assert_near(mixer(x)[0], mixer.output(mixer.norm(mixed).flatten(2), x), 1e-10)


def test_heads_of_mamba_2_fill_twice_the_models_width():
    mixer = built("mamba2")
    assert (mixer.heads, mixer.key_width, mixer.value_width) == (2 * DIM // HEAD_WIDTH, 128, HEAD_WIDTH)
    assert built("mamba2", num_heads=3).heads == 3
    with pytest.raises(UserError, match=r"attn\.state_width=0: must be at least 1"):
        build("mamba2", state_width=0)
    with pytest.raises(UserError, match=r"attn\.state_width=31, attn\.rotary_theta=100\.0: .*even"):
        build("mamba2", state_width=31, rotary_theta=100.0)


def test_widths_that_our_kernels_do_not_have_are_refused(monkeypatch):
    monkeypatch.setattr("attnbench.ops.common.backends.require_triton", lambda *_: None)
    with pytest.raises(UserError, match=r"attn\.backend=triton.*multiple of 16, not 40 and 32.*backend=torch"):
        build("mamba2", backend="triton", state_width=40, head_width=32)


def test_mamba_3_is_its_papers_trapezoid():
    """Its recurrence as the paper writes it, with two positions written at each, and rotations as complex numbers."""
    mixer, x = built("mamba3", dtype=torch.float64, num_heads=3), example_input(2, 70, dtype=torch.float64)
    assert isinstance(mixer, Mamba3)
    query, key, value = mixer.normed_heads(x, None, mixer.positions(x, 0))
    step = nn.functional.softplus(mixer.step_size(x) + mixer.step_bias)
    decay = (-nn.functional.softplus(mixer.decay(x) + mixer.decay_bias) * step).exp()
    share = torch.sigmoid(mixer.mixture(x))
    angle = (step[..., None] * math.pi * torch.tanh(mixer.angle(x))[:, :, None]).cumsum(1)
    pairs = 2 * angle.shape[-1]
    assert pairs == 64
    for part in (query, key):
        turned = torch.view_as_complex(part[..., :pairs].unflatten(-1, (-1, 2)).contiguous())
        part[..., :pairs] = torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    written = key[..., None] * value[..., None, :]
    memory, mixed = torch.zeros_like(written[:, 0]), []
    for t in range(70):
        a, d, lam = (gate[:, t, :, None, None] for gate in (decay, step, share))
        memory = a * memory + lam * d * written[:, t] + (a * (1 - lam) * d * written[:, t - 1] if t else 0)
        mixed.append((query[:, t, :, :, None] * memory).sum(-2))
    y = torch.stack(mixed, dim=1) + mixer.skip[:, None] * value
    assert_near(mixer(x)[0], mixer.output(y.flatten(2), x), 1e-10)


def test_queries_and_keys_of_mamba_3_are_shifted_by_a_bias_of_ones_after_their_norm():
    mixer, x = built("mamba3"), example_input(2, 5)
    query, key, _ = mixer.normed_heads(x, None, None)
    for part in (query, key):
        assert part.shape == (2, 5, 4, 128)
        torch.testing.assert_close((part - 1).square().mean(-1), torch.ones(2, 5, 4), rtol=1e-3, atol=0)
