"""The language model around the mixers: initial weights, states, counts, matching."""

import pytest
import torch
from small import MIXERS, MODEL, VOCABULARY, mixer_settings, small_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.errors import UserError
from attnbench.matching import REFERENCE, match_model
from attnbench.mixers.base import state_bytes
from attnbench.model import build_meta, build_model, init_weights
from attnbench.settings import ModelSettings

TOKENS_BT = torch.arange(2 * 21).reshape(2, 21) % len(VOCABULARY)


def test_parts_of_equal_name_and_shape_start_equal_across_mixers_and_options():
    plain, gated, other_seed = small_model(), small_model(output_gate=True), small_model(seed=1)
    weights = dict(gated.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert not torch.equal(plain.embedding.weight, other_seed.embedding.weight)
    flash = dict(small_model("flash").named_parameters())
    assert all(torch.equal(parameter, flash[name]) for name, parameter in plain.named_parameters())


def test_initial_weights_do_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    first = small_model().embedding.weight
    torch.manual_seed(2)
    assert torch.equal(first, small_model().embedding.weight)


def test_a_module_of_torchs_own_is_initialised_by_name_and_one_without_means_is_refused():
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    init_weights(first, 0, 1)
    torch.manual_seed(77)
    init_weights(second, 0, 1)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(ValueError, match=r"Bare .* has no init_weights"):
        init_weights(Bare(), 0, 1)


@pytest.mark.parametrize("name", MIXERS)
def test_whole_equals_pieces_equals_single_steps(name):
    model = small_model(name)
    with torch.no_grad():
        whole_BTC, none = model(TOKENS_BT)
        assert none is None
        state = model.init_state(2, 32, torch.float32)
        first_BTC, state = model(TOKENS_BT[:, :9], state)
        rest = []
        for position in range(9, TOKENS_BT.shape[1]):
            logits_BC, state = model.step(TOKENS_BT[:, position], state)
            rest.append(logits_BC)
    pieces_BTC = torch.cat([first_BTC, torch.stack(rest, dim=1)], dim=1)
    torch.testing.assert_close(pieces_BTC, whole_BTC, atol=2e-5, rtol=1e-4)
    assert len(state) == 2
    assert state_bytes(state[0]) > 0


def test_logits_at_positions_are_those_of_the_whole():
    model = small_model()
    positions_BL = torch.tensor([[3, 0], [20, 7]])
    whole_BTC, _ = model(TOKENS_BT)
    some_BLC, _ = model(TOKENS_BT, positions_BL=positions_BL)
    for row in range(2):
        torch.testing.assert_close(some_BLC[row], whole_BTC[row, positions_BL[row]])


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("match", ["params", "flops"])
def test_every_mixer_is_matched_within_one_percent(name, match):
    model = ModelSettings(name="4m", dim=256, num_layers=4, head_width=64, feed_forward_width=880)
    mixers = [mixer_settings(name)] * 4
    matched = match_model(mixers, model, match=match, seq_len=256, vocabulary_size=284)
    built = build_meta(mixers, matched.model, vocabulary_size=284)
    assert built.num_parameters() == matched.parameters
    achieved = {
        "params": matched.parameters / matched.reference_parameters,
        "flops": matched.flops_per_token / matched.reference_flops_per_token,
    }[match]
    assert abs(achieved - 1) <= 0.01
    assert matched.model.feed_forward_width % 8 == 0
    assert f"match={match}: {name} has {matched.parameters:,} parameters" in matched.statement(name)
    if name in ("softmax", "flash"):
        assert matched.model == model


def test_matching_takes_steps_of_one_where_eight_are_too_coarse():
    model = ModelSettings(name="narrow", dim=32, num_layers=2, head_width=16, feed_forward_width=12)
    gated = [mixer_settings("softmax", conv_size=3)] * 2
    matched = match_model(gated, model, match="params", seq_len=64, vocabulary_size=30)
    assert matched.model.feed_forward_width == 9
    assert abs(matched.parameters / matched.reference_parameters - 1) <= 0.01


def test_an_impossible_match_says_how_near_one_can_come():
    model = ModelSettings(name="thin", dim=64, num_layers=2, head_width=32, feed_forward_width=8)
    gated = [mixer_settings("softmax", output_gate=True)] * 2
    with pytest.raises(UserError, match=r"match=params: the nearest .* \(\+\d+\.\d%, feed_forward_width 1\)"):
        match_model(gated, model, match="params", seq_len=64, vocabulary_size=30)
    unmatched = match_model(gated, model, match="none", seq_len=64, vocabulary_size=30)
    assert unmatched.model == model
    assert unmatched.parameters > unmatched.reference_parameters


def test_forward_flops_are_those_that_torch_counts():
    # Without mixing: torch counts the whole square of the scores, and no causal algorithm needs more than half.
    model = build_model([REFERENCE] * 2, MODEL, vocabulary_size=10, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(TOKENS_BT[:1] % 10)
    length, heads = TOKENS_BT.shape[1], 2
    square = 2 * heads * 4 * 16 * length**2
    half = 2 * heads * 4 * 16 * length * (length + 1) // 2
    assert counter.get_total_flops() - square == model.forward_flops(length) - half
