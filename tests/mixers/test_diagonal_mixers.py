"""Mixers whose memory decays by a number a key channel: RWKV-7's formula, relations, decays, ranks, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixer_building import (
    DIM,
    HEAD_WIDTH,
    assert_near,
    build,
    check_against_definition,
    example_input,
    half_lives,
)
from torch import Tensor

from attnbench.mixers import kda
from attnbench.mixers.gdn2 import GatedDeltaNet2
from attnbench.mixers.hgrn2 import HGRN2
from attnbench.mixers.kda import KimiDeltaAttention
from attnbench.mixers.rwkv7 import RWKV7
from attnbench.settings.errors import UserError

NAMES = ("gla", "hgrn2", "kda", "gdn2", "rwkv7")


def rwkv7_by_the_paper(mixer: RWKV7, x_TD: Tensor) -> Tensor:
    """Time mixing of one sequence as the paper has it, a state of values by keys and rows of numbers, but for the norm,
    with the scale before it, and the gate, which are ours."""
    weight = dict(mixer.named_parameters())
    of_query, of_key, of_value = weight["query_key_value.projection.weight"].chunk(3)

    def low_rank(name: str, x_D: Tensor, between=lambda hidden: hidden) -> Tensor:
        return weight[f"{name}.up.weight"] @ between(weight[f"{name}.down.weight"] @ x_D)

    outputs, previous_D, memories = [], torch.zeros_like(x_TD[0]), [torch.zeros(HEAD_WIDTH, HEAD_WIDTH).double()] * 2
    for x_D in x_TD:
        shifted = [x_D + shift_D * (previous_D - x_D) for shift_D in weight["shift"]]
        receptance, key, value = of_query @ shifted[0], of_key @ shifted[1], of_value @ shifted[2]
        kept = (weight["decay_bias"].flatten() + low_rank("decay", shifted[3], torch.tanh)).sigmoid()
        kept = (-math.exp(-0.5) * kept).exp()
        rate = (weight["rate_bias"].flatten() + low_rank("rate", shifted[4])).sigmoid()
        removed = key * weight["key_removal"].flatten()
        key = key * (1 + (rate - 1) * weight["key_blend"].flatten())
        heads = []
        for head in range(2):
            part = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
            kappa = F.normalize(removed[part], dim=0)
            transition = torch.diag(kept[part]) - torch.outer(kappa, rate[part] * kappa)
            memories[head] = memories[head] @ transition + torch.outer(value[part], key[part])
            read = mixer.norm(HEAD_WIDTH**-0.5 * memories[head] @ receptance[part])
            heads.append(read + (receptance[part] @ (weight["bonus"][head] * key[part])) * value[part])
        gate = low_rank("output.gate", shifted[5]).sigmoid()
        outputs.append(weight["output.projection.weight"] @ (gate * torch.cat(heads)))
        previous_D = x_D
    return torch.stack(outputs)


def test_rwkv7_is_the_papers_formula():
    mixer, x = build("rwkv7", dtype=torch.float64), example_input(2, 40, dtype=torch.float64)
    assert isinstance(mixer, RWKV7)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for vector in (mixer.rate_bias, mixer.key_removal, mixer.key_blend, mixer.bonus):
            vector.copy_(torch.randn(vector.shape, generator=generator))
    # A length of 1 is 1 - 5e-7 / |x|^2 in ours.
    assert_near(mixer(x)[0], torch.stack([rwkv7_by_the_paper(mixer, x_TD) for x_TD in x]), 1e-6)


def test_gated_deltanet_2_with_equal_strengths_is_kimi_delta_attention():
    one, other = build("kda", dtype=torch.float64), build("gdn2", dtype=torch.float64)
    assert isinstance(one, KimiDeltaAttention)
    assert isinstance(other, GatedDeltaNet2)
    values = {name: x for name, x in one.state_dict().items() if name != "beta.weight"}
    for name in ("erase.weight", "write.weight"):
        values[name] = one.beta.weight.repeat_interleave(HEAD_WIDTH, dim=0)
    other.load_state_dict(values)
    x = example_input(2, 40, dtype=torch.float64)
    assert_near(other(x)[0], one(x)[0], 1e-12)


def test_kimi_delta_attention_with_one_decay_a_head_is_gated_deltanet():
    one = build("kda", dtype=torch.float64, gate_rank=DIM)
    other = build("gated_deltanet", dtype=torch.float64, output_gate="sigmoid")
    assert isinstance(one, KimiDeltaAttention)
    values = {name: x for name, x in one.state_dict().items() if not name.startswith(("output.gate", "decay"))}
    of_head = other.decay.weight[:, None].expand(2, HEAD_WIDTH, DIM).flatten(0, 1)
    with torch.no_grad():
        one.decay = torch.nn.Linear(DIM, DIM, bias=False, dtype=torch.float64)
        one.decay.weight.copy_(of_head)
        one.decay_bias.copy_(other.decay_bias[:, None].expand_as(one.decay_bias))
        one.output.gate = other.output.gate
    values["log_decay_rate"] = values["log_decay_rate"].squeeze(-1)
    values |= {name: x for name, x in other.state_dict().items() if name.startswith(("output.gate", "decay"))}
    other.load_state_dict(values)
    x = example_input(2, 40, dtype=torch.float64)
    assert_near(one(x)[0], other(x)[0], 1e-12)


@pytest.mark.parametrize(("layer", "shortest"), [(0, 1.7), (1, 1.7), (5, math.log(2) / (0.9 * math.log(6 / 5)))])
def test_hgrn2_writes_what_it_makes_room_for_above_a_bound_that_grows_with_depth(layer, shortest):
    mixer = build("hgrn2", dtype=torch.float64, layer=layer, num_layers=6)
    assert isinstance(mixer, HGRN2)
    (_, key, _, log_decay), _ = mixer.inputs(100 * example_input(2, 20, dtype=torch.float64), None, None)
    decay = log_decay.detach().exp()
    assert_near(key.detach(), 1 - decay, 1e-12)
    assert decay.min() == pytest.approx(layer / 6, abs=1e-3)
    assert decay.max() == pytest.approx(1, abs=1e-3)
    assert half_lives(mixer, DIM).min() == pytest.approx(shortest, rel=0.05)
    check_against_definition(build("hgrn2", layer=layer, num_layers=6), 65)


@pytest.mark.parametrize(
    ("name", "shortest", "longest"), [("gla", 16, 16), ("hgrn2", 1, 1), ("kda", 0.4, 700), ("rwkv7", 6.27, 761)]
)
def test_decays_begin_as_in_the_paper_if_asked(name, shortest, longest):
    lives = half_lives(build(name, decay_init="paper", num_heads=8), DIM)
    assert lives.min() >= 0.99 * shortest
    assert lives.max() <= 1.01 * longest
    if name != "kda":
        assert lives.min() == pytest.approx(shortest, rel=0.01)
        assert lives.max() == pytest.approx(longest, rel=0.01)


def test_rwkv7_keeps_at_least_half_of_every_channel():
    mixer = build("rwkv7")
    assert isinstance(mixer, RWKV7)
    with torch.no_grad():
        mixer.decay_bias[0, 0] = 1e3
        decay = mixer.log_decay(example_input(2, 20)).exp()
    assert decay.min() == pytest.approx(math.exp(-math.exp(-0.5)))
    assert decay.max() <= 1


def test_rwkv7_without_token_shift_and_gate_has_neither():
    mixer = build("rwkv7", token_shift=False, output_gate="none")
    names = dict(mixer.named_parameters())
    assert "shift" not in names
    assert not [name for name in names if "gate" in name]
    assert mixer.init_state(2, 8, torch.float32).previous_B1D.numel() == 0
    check_against_definition(mixer, 65)


@pytest.mark.parametrize("name", NAMES)
def test_channels_that_are_turned_together_decay_alike(name):
    decay = build(name, rotary_theta=100.0).log_decay(example_input(2, 5)).unflatten(-1, (-1, 2))
    assert torch.equal(decay[..., 0], decay[..., 1])
    assert not torch.equal(*build(name).log_decay(example_input(2, 5)).unflatten(-1, (-1, 2)).unbind(-1))


def test_heads_that_are_too_wide_for_the_librarys_delta_rule_are_refused(monkeypatch):
    monkeypatch.setattr("attnbench.ops.common.backends.require_gated_fla", lambda setting, device_type: None)
    asked = {"backend": "fla", "head_width": 2 * kda.WIDEST_FLA}
    for mixer_class in (KimiDeltaAttention, GatedDeltaNet2):
        with pytest.raises(UserError, match=r"up to 256 key channels, not head_width=512; choose attn.backend=torch"):
            mixer_class.choose_backend(asked, device_type="cuda", precision="bfloat16")
    assert RWKV7.choose_backend(asked, device_type="cuda", precision="bfloat16") == "fla"
