"""The mixers that are controls: torch's LSTM, the gated short convolution and Mamba's first layer."""

import pytest
import torch
import torch.nn.functional as F
from mixer_building import assert_near, build, example_input
from small import batch_of, compose_once, fresh_state, mixer_settings, watch_compiler
from torch import nn

from attnbench.model.building import build_model
from attnbench.model.matching import match_mixer
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from attnbench.training.step import batch_nats, compiled_nats


@torch.no_grad()
def test_an_lstm_is_torchs_with_the_same_weights():
    mixer, x = build("lstm", dtype=torch.float64), example_input(2, 33, dtype=torch.float64)
    theirs = nn.LSTM(x.shape[-1], x.shape[-1], batch_first=True, dtype=torch.float64)
    for parameter, own in zip(theirs.parameters(), mixer.parameters(), strict=True):
        parameter.copy_(own)
    expected, (hidden_1BC, cell_1BC) = theirs(x)
    state = mixer.init_state(2, 33, torch.float64)
    assert_near(mixer(x, state)[0], expected, 1e-12)
    assert_near(state.hidden_BC, hidden_1BC[0], 1e-12)
    assert_near(state.cell_BC, cell_1BC[0], 1e-12)


def test_an_lstm_keeps_its_state_in_float32_and_begins_as_torchs():
    mixer = build("lstm")
    assert {part.dtype for part in mixer.init_state(2, 9, torch.bfloat16)} == {torch.float32}
    bound = mixer.weight_input.shape[1] ** -0.5
    for parameter in mixer.parameters():
        assert 0.9 * bound < parameter.abs().max() <= bound


def test_an_lstm_trains_in_a_compiled_step():
    state = fresh_state("lstm")
    expected = batch_nats(state.model, batch_of(0))
    with pytest.MonkeyPatch.context() as patched:
        watch_compiler(patched, fullgraph=False)
        actual = compiled_nats(torch.device("cpu"))(state.model, batch_of(0))
    torch.testing.assert_close(actual, expected)
    weight = state.model.layers[0].mixer.weight_hidden
    by_step, compiled = (torch.autograd.grad(nats, weight)[0] for nats in (expected, actual))
    torch.testing.assert_close(compiled, by_step)


@torch.no_grad()
def test_a_base_conv_is_its_formula_by_hand():
    """Two channels at three positions, with taps of 1, 10 and 100, biases of 1 and 2, and W that exchanges channels."""
    mixer = build("base_conv", dtype=torch.float64, dim=2)
    mixer.convolution.weight.copy_(torch.tensor([[1.0, 10.0, 100.0]] * 2))
    mixer.convolution_bias.fill_(1)
    mixer.gate_bias.fill_(2)
    mixer.gate.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    x = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]]], dtype=torch.float64)
    first = [101 * 2 + 1, 211 * 3 + 2, 322 * 2 + 3]
    second = [1 * 3 + 0, 101 * 4 + 1, 11 * 5 + 0]
    assert mixer(x)[0][0].T.tolist() == [first, second]


def test_a_base_conv_of_one_tap_sees_no_past_and_is_refused():
    with pytest.raises(UserError, match=r"^attn\.taps=1: "):
        build("base_conv", taps=1)


@torch.no_grad()
def test_mamba_is_the_published_block_written_out():
    """The order of the source's code: convolution, SiLU, three signals, time step, scan, skip, gate, projection."""
    mixer, x = build("mamba", dtype=torch.float64), example_input(2, 37, dtype=torch.float64)
    mixer.skip.uniform_(-1, 1)
    inner = F.linear(x, mixer.projection.weight).mT
    taps, bias = mixer.convolution.weight[:, None], mixer.convolution_bias
    inner = F.silu(F.conv1d(inner, taps, bias, padding=3, groups=len(bias))[..., :37]).mT
    step, into, out = F.linear(inner, mixer.signals.weight).split([mixer.rank, 16, 16], dim=-1)
    step = F.softplus(step @ mixer.step_weight.T + mixer.step_bias)
    rate = -mixer.log_rate.exp().T
    memory, outputs = torch.zeros(2, *rate.shape, dtype=torch.float64), []
    for t in range(37):
        written = torch.einsum("bc,bn->bcn", step[:, t] * inner[:, t], into[:, t])
        memory = torch.exp(torch.einsum("bc,cn->bcn", step[:, t], rate)) * memory + written
        outputs.append(torch.einsum("bcn,bn->bc", memory, out[:, t]))
    gated = (torch.stack(outputs, dim=1) + mixer.skip * inner) * F.silu(F.linear(x, mixer.output.gate.weight))
    assert_near(mixer(x)[0], F.linear(gated, mixer.output.projection.weight), 1e-12)


def test_mamba_begins_as_published_and_keeps_its_state_in_float32():
    mixer = build("mamba")
    assert mixer.log_rate.exp()[:, 0].tolist() == pytest.approx(range(1, 17))
    steps = F.softplus(mixer.step_bias)
    assert 0.001 <= steps.min() < 0.003 < 0.03 < steps.max() <= 0.1
    memory, history = mixer.init_state(2, 9, torch.bfloat16)
    assert (memory.dtype, history.dtype) == (torch.float32, torch.bfloat16)


def test_mamba_is_its_definition_where_it_forgets_all():
    """Also in gradients, which an exponential that overflows would spoil."""
    mixer, x = build("mamba", dtype=torch.float64), 500 * example_input(2, 37, dtype=torch.float64)
    step, *_, rate = mixer.inputs(x, None)
    assert (step[:, :, None] * rate).min() < -800
    found = [
        (y, *torch.autograd.grad(y.square().sum(), [*mixer.parameters()])) for y in (mixer(x)[0], mixer.reference(x))
    ]
    for actual, expected in zip(*found, strict=True):
        assert_near(actual / expected.norm(), expected / expected.norm(), 1e-12)


def test_two_layers_of_mamba_have_the_published_blocks_parameters():
    """Of width 64: two projections in and one out, convolution, signals, time step, rates and skip."""
    model = ModelSettings(name="probe", dim=64, num_layers=2, head_width=32, feed_forward_width=0)
    built = build_model([mixer_settings("mamba")] * 2, model, vocabulary_size=16, seed=0)
    block = 2 * 64 * 128 + 128 * 64 + 128 * (4 + 1) + 128 * (4 + 16 + 16) + 128 * (4 + 1) + 128 * 16 + 128
    assert built.num_parameters() == 2 * (block + 64) + 64 + 16 * 64 == 66_496


@pytest.mark.parametrize("name", ["deltanet", "softmax"])
def test_a_base_conv_is_the_layer_before_another_mixer(name):
    model = ModelSettings(name="probe", dim=32, num_layers=2, head_width=16, feed_forward_width=0)
    built = build_model([mixer_settings("base_conv"), mixer_settings(name)], model, vocabulary_size=9, seed=0)
    tokens_BT = torch.arange(20).reshape(2, 10) % 9
    logits_BTC, _ = built(tokens_BT)
    states = built.init_state(2, 10, torch.float32)
    pieces = [built(piece_BT, states)[0] for piece_BT in tokens_BT.split([4, 6], dim=1)]
    assert_near(torch.cat(pieces, dim=1), logits_BTC, 1e-5)


def test_a_hybrid_with_a_base_conv_is_matched_by_parameters_and_not_by_its_state():
    words = ["attn=hybrid", "attn.layers=[base_conv,deltanet]", "model.num_layers=2"]
    settings = compose_once(words)
    how = {"device_type": "cpu", "precision": "float32", "seq_len": 64, "vocabulary_size": 99}
    matched = match_mixer(settings.mixer, settings.model, match="params", **how)
    assert abs(matched.parameters / matched.reference_parameters - 1) <= 0.01
    with pytest.raises(UserError, match="match=state"):
        match_mixer(settings.mixer, settings.model, match="state", **how)
