"""The language model around the mixers: initial weights, states, counts, matching."""

import dataclasses

import pytest
import torch
from outside_mixers import settings_of
from small import MIXERS, MODEL, VOCABULARY, mixer_settings, small_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.cli.compose import compose
from attnbench.machine import memory as process_memory
from attnbench.mixers.base import Mixer
from attnbench.mixers.layers import Projection
from attnbench.mixers.linear import LinearAttention
from attnbench.mixers.softmax import Softmax
from attnbench.model.building import build_meta, build_model, init_weights, num_bytes
from attnbench.model.matching import REFERENCE, match_model
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve, trust
from attnbench.settings.schema import MixerSettings, ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.job import hashed_model
from attnbench.training.prepare import prepare

TOKENS_BT = torch.arange(2 * 21).reshape(2, 21) % len(VOCABULARY)


def test_a_mixer_with_tensors_that_a_checkpoint_does_not_have_is_refused():
    [kept] = settings_of("KeepsTensors").values()
    message = r"^attn=mine: outside_mixers\.KeepsTensors keeps a tensor that is no parameter \(decays, norm\.scale\)"
    with pytest.raises(UserError, match=message):
        build_meta([kept] * 2, MODEL, vocabulary_size=30)


def test_a_model_larger_than_memory_is_refused_before_it_takes_any(monkeypatch):
    free = num_bytes(small_model()) / 2**20
    monkeypatch.setattr(process_memory, "available_mib", lambda: 2 * free)
    # Its gradients and moments take three times as much again.
    model = small_model()
    with pytest.raises(UserError, match=r"gradients and moments of .* weights take .* give a smaller model"):
        TrainState.fresh(model)
    monkeypatch.setattr(process_memory, "available_mib", lambda: free / 2)
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(UserError, match=r"model=small: .* weights take .* give a smaller model"):
        small_model()


def test_a_layer_norm_and_logits_of_their_own_are_counted_and_used():
    changed = dataclasses.replace(MODEL, norm="layer", untied=True)
    plain, model = (
        build_model([mixer_settings("softmax")] * 2, it, vocabulary_size=9, seed=0) for it in (MODEL, changed)
    )
    matched = match_model(
        [mixer_settings("softmax")] * 2,
        changed,
        match="none",
        vocabulary_size=9,
        seq_len=21,
    )
    assert matched.parameters == matched.reference_parameters == model.num_parameters()
    assert model.num_parameters() - plain.num_parameters() == 9 * MODEL.dim + 5 * MODEL.dim
    hidden_BTD, _ = model.hidden(TOKENS_BT % 9)
    logits_BTC, _ = model(TOKENS_BT % 9)
    assert model.head is not None
    torch.testing.assert_close(logits_BTC, hidden_BTD @ model.head.weight.T)
    assert not torch.equal(model.head.weight, model.embedding.weight)
    assert model.undecayed() >= {"norm.weight", "norm.bias"}
    theirs = nn.LayerNorm(MODEL.dim)
    x_BTD = torch.randn(2, 3, MODEL.dim, generator=torch.Generator().manual_seed(0)) * 3 + 1
    torch.testing.assert_close(model.norm(x_BTD), theirs(x_BTD))
    assert hashed_model(changed, None) != hashed_model(MODEL, None)


def test_with_a_doubled_residual_a_block_ends_with_its_stream_and_its_norm():
    changed = dataclasses.replace(MODEL, feed_forward_width=0, doubled_residual=True, norm="layer")
    model = build_model([mixer_settings("softmax")] * 2, changed, vocabulary_size=9, seed=0)
    given = {"match": "none", "vocabulary_size": 9, "seq_len": 21}
    matched = match_model([mixer_settings("softmax")] * 2, changed, **given)
    assert matched.parameters == matched.reference_parameters == model.num_parameters()
    x_BTD = torch.randn(2, 3, MODEL.dim, generator=torch.Generator().manual_seed(0)) * 3 + 1
    block = model.layers[0]
    mixed_BTD = x_BTD + block.mixer(block.mixer_norm(x_BTD))[0]
    norm: nn.Module = block.feed_forward_norm  # pyright: ignore[reportAssignmentType]
    torch.testing.assert_close(block(x_BTD)[0], mixed_BTD + norm(mixed_BTD))
    state = block.mixer.init_state(2, 3, x_BTD.dtype)
    steps = [block.step(x_BD, state)[0] for x_BD in x_BTD.unbind(1)]
    torch.testing.assert_close(torch.stack(steps, 1), block(x_BTD)[0])
    fed = dataclasses.replace(changed, feed_forward_width=24)
    blocks = [
        build_meta([mixer_settings("softmax")] * 2, size, vocabulary_size=9)
        for size in (fed, dataclasses.replace(fed, doubled_residual=False))
    ]
    assert blocks[0].num_parameters() == blocks[1].num_parameters()


def test_parts_of_equal_name_and_shape_start_equal_across_mixers_and_options():
    plain, gated, other_seed = small_model(), small_model(output_gate="silu"), small_model(seed=1)
    weights = dict(gated.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert not torch.equal(plain.embedding.weight, other_seed.embedding.weight)
    flash = dict(small_model("flash").named_parameters())
    assert all(torch.equal(parameter, flash[name]) for name, parameter in plain.named_parameters())


def test_initial_weights_depend_neither_on_the_global_generator_nor_on_the_number_of_threads(monkeypatch):
    weights = []
    for count in (1, 8):
        torch.manual_seed(count)
        monkeypatch.setattr("os.cpu_count", lambda count=count: count)
        weights.append(small_model().state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_goes_wrong_while_weights_are_drawn_is_raised():
    class Broken(nn.Module):
        def init_weights(self, generator, num_branches):
            raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        init_weights(nn.Sequential(Broken(), nn.Linear(4, 4)), 0, 1)


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


def test_what_is_matched_does_not_depend_on_how_softmax_would_be_cut_into_heads():
    mixers = [mixer_settings("gated_deltanet", num_heads=1)] * 2
    wide, narrow = (
        ModelSettings(name="thin", dim=64, num_layers=2, head_width=head_width, feed_forward_width=400)
        for head_width in (48, 16)
    )
    for match in ("params", "flops", "none"):
        counts = [
            (found.reference_parameters, found.reference_flops_per_token)
            for found in (
                match_model(mixers, model, match=match, seq_len=64, vocabulary_size=30) for model in (wide, narrow)
            )
        ]
        plain = match_model([REFERENCE] * 2, narrow, match="none", seq_len=64, vocabulary_size=30)
        assert counts == [(plain.parameters, plain.flops_per_token)] * 2


def test_matching_takes_steps_of_one_where_eight_are_too_coarse():
    model = ModelSettings(name="narrow", dim=32, num_layers=2, head_width=16, feed_forward_width=12)
    gated = [mixer_settings("softmax", conv_size=3)] * 2
    matched = match_model(gated, model, match="params", seq_len=64, vocabulary_size=30)
    assert matched.model.feed_forward_width == 9
    assert abs(matched.parameters / matched.reference_parameters - 1) <= 0.01


def test_an_impossible_match_says_how_near_one_can_come():
    model = ModelSettings(name="thin", dim=64, num_layers=2, head_width=32, feed_forward_width=8)
    gated = [mixer_settings("softmax", output_gate="silu")] * 2
    with pytest.raises(UserError, match=r"match=params: the nearest .* \(\+\d+\.\d%, feed_forward_width 1\)"):
        match_model(gated, model, match="params", seq_len=64, vocabulary_size=30)
    unmatched = match_model(gated, model, match="none", seq_len=64, vocabulary_size=30)
    assert unmatched.model == model
    assert unmatched.parameters > unmatched.reference_parameters


def test_parts_around_a_mixer_count_in_its_parameters():
    model = ModelSettings(name="two", dim=64, num_layers=2, head_width=32, feed_forward_width=48)
    how = {"seq_len": 64, "vocabulary_size": 30, "match": "none"}
    plain, normed, gated = (
        match_model([mixer_settings("linear", **options)] * 2, model, **how)
        for options in ({}, {"output_norm": True}, {"output_gate": "sigmoid"})
    )
    assert normed.parameters - plain.parameters == 2 * 32
    assert gated.parameters - plain.parameters == 2 * 64 * 64
    assert normed.state_bytes == gated.state_bytes == plain.state_bytes
    turned = match_model([mixer_settings("linear", rotary_theta=100.0)] * 2, model, **how)
    assert turned.parameters == plain.parameters
    assert turned.flops_per_token == plain.flops_per_token


WIDE = ModelSettings(name="wide", dim=64, num_layers=2, head_width=32, feed_forward_width=48)


def match_state(settings, model=WIDE, **others):
    mixers = [settings] * model.num_layers
    return match_model(mixers, model, match="state", seq_len=100, vocabulary_size=30, **others)


def memory_elements(mixers, model=WIDE):
    """Elements of all layers' memories, as the model that is trained would allocate them."""
    built = build_meta(mixers, model, vocabulary_size=30)
    return sum(state.memory_BHKV.numel() for state in built.init_state(1, 1, torch.float32))


@pytest.mark.parametrize("name", ["linear", "gated_deltanet"])
def test_a_state_that_is_the_references_already_changes_nothing(name):
    given = mixer_settings(name, conv_size=3)
    matched = match_state(given)
    assert matched.mixers == [given] * 2
    assert (matched.model, matched.match, matched.state_mismatch) == (WIDE, "state", 0)


def test_a_model_without_feed_forward_has_a_state_to_match_but_no_width():
    bare = ModelSettings(name="bare", dim=64, num_layers=2, head_width=32, feed_forward_width=0)
    settings = mixer_settings("gated_deltanet", num_heads=1)
    assert match_state(settings, bare).match == "state"
    assert match_state(settings, bare).mixers[1].options["value_expansion"] == 2
    widths = match_model([settings] * 2, bare, match="params", seq_len=100, vocabulary_size=30)
    assert (widths.match, widths.mixers) == ("none", [settings] * 2)
    assert widths.statement("x").startswith("match=none (no feed-forward whose width could be solved): x has ")
    assert "could be solved" not in match_state(settings, bare).statement("x")


@pytest.mark.parametrize(
    ("name", "options", "changed"),
    [
        # 2 layers × 1 head × 32 × V = 2 × 64 × 32.
        ("gated_deltanet", {"num_heads": 1}, {"value_expansion": 2}),
        ("gated_deltanet", {"num_heads": 4}, {"value_expansion": 0.5}),
        # Without num_heads the width is a divisor of 64, and 64 × 32 asks for 32.
        ("linear", {"head_width": 8}, {"head_width": 32}),
        # 3 heads × 26 × 26 = 2,028 is the nearest to 2,048.
        ("linear", {"num_heads": 3}, {"head_width": 26}),
    ],
)
def test_match_state_takes_the_nearest_legal_value(name, options, changed):
    matched = match_state(mixer_settings(name, **options))
    assert all({**options, **changed}.items() <= settings.options.items() for settings in matched.mixers)
    reached = memory_elements(matched.mixers) / (2 * 64 * 32)
    assert matched.state_mismatch == pytest.approx(reached - 1, abs=1e-12)
    assert abs(matched.state_mismatch) <= 0.1
    (setting, value), *_ = changed.items()
    assert f"{matched.state_mismatch:+.2%} of gated_deltanet's by {setting} {value}" in matched.statement(name)


def test_the_convolution_and_the_normaliser_count_in_the_state_but_not_in_its_match():
    plain, convolved = match_state(mixer_settings("linear")), match_state(mixer_settings("linear", conv_size=4))
    assert plain.state_mismatch == convolved.state_mismatch == 0
    # A layer: 2 heads of a 32 × 32 memory and a normaliser of 32, float32; the 3 last inputs of 3 × 64 channels.
    assert plain.state_bytes == 2 * 4 * (2 * 32 * 32 + 2 * 32)
    assert convolved.state_bytes - plain.state_bytes == 2 * 4 * 3 * 3 * 64
    half = match_state(mixer_settings("linear", conv_size=4), precision="bfloat16")
    assert half.state_bytes - plain.state_bytes == 2 * 2 * 3 * 3 * 64
    assert "state bytes a sequence of 100 in bfloat16" in half.statement("linear")


def test_every_match_says_how_large_the_state_is():
    matched = match_model([REFERENCE] * 2, WIDE, match="params", seq_len=100, vocabulary_size=30)
    # Keys and values of 100 positions in two layers, and the layers' positions.
    assert matched.state_bytes == 2 * (2 * 100 * 64 * 4 + 8)
    assert matched.state_mismatch is None
    assert f"{matched.state_bytes:,} state bytes a sequence of 100 in float32" in matched.statement("softmax")


def test_a_state_that_cannot_come_near_says_how_near_it_can():
    small = mixer_settings("gated_deltanet", num_heads=1, head_width=8)
    message = (
        r"nearest gated_deltanet comes .* 8,192 bytes a layer is 2,048 \(-75\.0%, value_expansion 8\), over the 10 %"
    )
    with pytest.raises(UserError, match=message):
        match_state(small)
    with pytest.raises(UserError, match=r"\+56\.2%, value_expansion 0\.03125"):
        match_state(mixer_settings("gated_deltanet", num_heads=100))


def test_a_run_trains_keeps_and_names_what_match_state_has_chosen(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    words = ["attn=linear", "attn.num_heads=3", "experiment=demo", "device=cpu", "data=text", f"data.path={path}"]
    prepared, unmatched = (prepare(compose([*words, "seq_len=16", f"match={how}"])) for how in ("state", "none"))
    # 3 heads × 37 × 37 = 4,107 is the nearest to the 128 × 32 of experiment=demo's model.
    assert [settings.options["head_width"] for settings in prepared.mixers] == [37, 37]
    assert prepared.record().mixers == prepared.mixers
    assert prepared.builder()().layers[0].mixer.head_width == 37
    assert prepared.config_hash != unmatched.config_hash


class Unmatched(LinearAttention):
    """Names no setting that decides its state."""

    @classmethod
    def state_choices(cls, options, *, dim, head_width):
        return []


def test_a_state_that_grows_or_that_no_setting_decides_cannot_be_matched():
    for name in ("softmax", "flash"):
        with pytest.raises(UserError, match=f"match=state: the state of {name} grows with the length"):
            match_state(mixer_settings(name))
    target = f"{__name__}.Unmatched"
    trust([target])
    with pytest.raises(UserError, match="match=state: Unmatched names no setting that decides its state"):
        match_state(MixerSettings(name="mine", target=target, options={}))


@pytest.mark.parametrize("name", MIXERS)
def test_the_choices_of_a_state_are_legal_and_ordered_by_its_size(name):
    settings = mixer_settings(name)
    cls = resolve(settings.target, Mixer)
    if not cls.state_memory:
        pytest.skip(f"no setting of {name} decides the size of a state")
    assert not cls.state_grows
    # Softmax has as many heads as fit the width, and Mamba has none.
    has_heads = "num_heads" in settings.options and not issubclass(cls, Softmax)
    for options in ({}, {"num_heads": 3}) if has_heads else ({},):
        given = {**settings.options, **options}
        choices = cls.state_choices(given, dim=48, head_width=12)
        model = ModelSettings(name="odd", dim=48, num_layers=1, head_width=12, feed_forward_width=0)
        sizes = []
        for choice in choices:
            mixer = MixerSettings(name=name, target=settings.target, options={**given, **choice})
            (state,) = build_meta([mixer], model, vocabulary_size=9).init_state(1, 1, torch.float32)
            sizes.append(sum(getattr(state, field).numel() for field in cls.state_memory))
        assert len(choices) > 5
        assert sizes == sorted(sizes)


def test_forward_flops_are_those_that_torch_counts():
    # Without mixing: torch counts the whole square of the scores, and no causal algorithm needs more than half.
    model = build_model([REFERENCE] * 2, MODEL, vocabulary_size=10, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(TOKENS_BT[:1] % 10)
    length, heads = TOKENS_BT.shape[1], 2
    square = 2 * heads * 4 * 16 * length**2
    half = 2 * heads * 4 * 16 * length * (length + 1) // 2
    assert counter.get_total_flops() - square == model.forward_flops(length) - half
    # A probe reads logits at its labels alone.
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(TOKENS_BT[:1] % 10, positions_BL=torch.tensor([[1, 4, 4]]))
    assert counter.get_total_flops() - square == model.forward_flops(length, num_logits=3) - half


def test_another_initial_deviation_scales_the_projections_and_nothing_else():
    names = {"name": "small", "dim": 32, "num_layers": 2, "head_width": 16, "feed_forward_width": 24}
    usual, wide = (
        build_model(
            [mixer_settings("gated_deltanet")] * 2,
            ModelSettings(**names, initial_deviation=deviation),
            vocabulary_size=10,
            seed=0,
        ).state_dict()
        for deviation in (None, 0.06)
    )
    projections = [name for name in usual if name.endswith(("projection.weight", "gate.weight", "up.weight"))]
    assert projections
    for name, weight in usual.items():
        factor = 3 if name in projections or name.endswith(("down.weight", "decay.weight", "beta.weight")) else 1
        torch.testing.assert_close(wide[name], factor * weight, msg=name)


@pytest.mark.parametrize(("feed_forward_width", "num_branches"), [(24, 4), (0, 2)])
def test_what_is_added_to_the_residual_stream_starts_scaled_by_the_branches_there_are(feed_forward_width, num_branches):
    size = ModelSettings(name="s", dim=256, num_layers=2, head_width=64, feed_forward_width=feed_forward_width)
    mixers = [mixer_settings("gated_deltanet")] * 2
    model = build_model(mixers, size, vocabulary_size=10, seed=0)
    residual = [module.weight for module in model.modules() if isinstance(module, Projection) and module.residual]
    assert len(residual) == model.num_branches == num_branches
    for weight in residual:
        assert weight.std().item() == pytest.approx(0.02 / num_branches**0.5, rel=0.05)
    # In the identity only where it is not twice the depth, so that no hash of a model with feed-forwards has moved.
    matched = match_model(mixers, size, match="none", seq_len=16, vocabulary_size=10)
    assert hashed_model(size, matched)["num_branches"] == (None if feed_forward_width else num_branches)


def test_a_model_of_odd_width_needs_no_positions_for_what_it_is_matched_with():
    odd = ModelSettings(name="odd", dim=15, num_layers=2, head_width=5, feed_forward_width=24)
    without = [mixer_settings("linear", rotary_theta=None)] * 2
    assert match_model(without, odd, match="params", seq_len=16, vocabulary_size=30).model.dim == 15
