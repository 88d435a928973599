"""What only the mixers with one decay a head have: their decays, their options, and references from elsewhere."""

import pytest
import torch
from library_definitions import library_definition
from mixer_building import DIM, HEAD_WIDTH, assert_near, build, example_input, read
from torch import nn

from attnbench.mixers.decay import half_lives
from attnbench.mixers.decayed import DecayedAttention
from attnbench.settings.errors import UserError

MIXERS = ("retnet", "simple_gla", "mamba2")


def built(name: str, **options: object) -> DecayedAttention:
    mixer = build(name, **options)
    assert isinstance(mixer, DecayedAttention)
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
    query, key, value = mixer.project(x, None)
    parts = ((query / mixer.scale).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    expected = library_definition("retention").naive_retention(*parts).transpose(1, 2)
    assert_near(mixer.mix(query, key, value, *mixer.gates(x), None), expected, 1e-5)


def test_simple_gla_is_a_root_of_a_gate():
    mixer, x = built("simple_gla", decay_init="paper"), example_input(2, 5)
    assert half_lives(mixer, DIM).tolist() == pytest.approx([16, 16])
    expected = torch.sigmoid(-mixer.decay(x) - mixer.decay_bias) ** (1 / 16)
    assert_near(mixer.log_decay(x).exp(), expected, 1e-6)


def test_mamba_2_is_its_papers_matrix():
    """Its dual form: the products of all decays between two positions, times C B^T, times the step."""
    mixer, x = built("mamba2", dtype=torch.float64), example_input(2, 70, dtype=torch.float64)
    query, key, value = mixer.project(x, None)
    step = nn.functional.softplus(mixer.step_size(x) + mixer.step_bias).transpose(1, 2)
    total = (-mixer.log_decay_rate.exp()[:, None] * step).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).exp().tril()
    scores = torch.einsum("btgk,bsgk->bts", query, key)
    mixed = torch.einsum("bhts,bts,bhs,bshv->bthv", decay, scores, step, value) + mixer.skip[:, None] * value
    assert_near(mixer(x)[0], mixer.output(mixer.norm(mixed).flatten(2), x), 1e-10)


def test_heads_of_mamba_2_fill_twice_the_models_width():
    mixer = built("mamba2")
    assert (mixer.num_heads, mixer.key_width, mixer.value_width) == (2 * DIM // HEAD_WIDTH, 128, HEAD_WIDTH)
    assert built("mamba2", num_heads=3).num_heads == 3
    with pytest.raises(UserError, match=r"attn\.state_width=0: must be at least 1"):
        build("mamba2", state_width=0)
    with pytest.raises(UserError, match=r"attn\.state_width=31, attn\.rotary_theta=100\.0: .*even"):
        build("mamba2", state_width=31, rotary_theta=100.0)


@pytest.mark.parametrize("name", MIXERS)
def test_the_librarys_kernel_needs_cuda(name):
    with pytest.raises(UserError, match=r"attn\.backend=fla.*needs CUDA.*backend=torch"):
        read(name)[0].choose_backend({"backend": "fla"}, device_type="cpu", precision="float32")
    assert read(name)[0].choose_backend({"backend": "auto"}, device_type="cuda", precision="float32") == "torch"


@pytest.mark.parametrize("name", MIXERS)
def test_state_choices_change_the_state_that_counts(name):
    mixer_class, options = read(name)
    choices = mixer_class.state_choices(options, dim=DIM, head_width=HEAD_WIDTH)
    sizes = [build(name, **choice).init_state(1, 8, torch.float32).memory_BHKV.numel() for choice in choices]
    assert len(sizes) > 8
    assert sizes == sorted(set(sizes))
    changed = {key for choice in choices for key in choice}
    assert len(changed) == 1
    assert changed <= options.keys()


def test_values_of_a_broken_number_of_channels_are_refused():
    with pytest.raises(UserError, match=r"attn\.value_expansion=1\.3: times head_width=32"):
        build("retnet", value_expansion=1.3)
