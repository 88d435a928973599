"""What only linear attention and Gated DeltaNet have: their options, the scan, their FLOPs, their library kernels."""

import pytest
import torch
from kernel_checks import assert_stacked
from mixer_building import HEAD_WIDTH, assert_near, build, check_against_definition, example_input
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.mixers.gated_deltanet import GatedDeltaNet
from attnbench.mixers.linear import LinearAttention
from attnbench.ops.common.fla import refuse_miscompiled_gates
from attnbench.ops.common.scan import affine_scan
from attnbench.ops.linear.linear_attention import feature
from attnbench.settings.errors import UserError


def test_the_papers_decays_are_drawn_as_in_mamba_2():
    mixer = build("gated_deltanet", num_heads=400, head_width=1, decay_init="paper")
    assert isinstance(mixer, GatedDeltaNet)
    rate, step = mixer.log_decay_rate.exp(), nn.functional.softplus(mixer.decay_bias)
    assert 1 <= rate.min() < 1.5 < 15.5 < rate.max() <= 16
    assert rate.mean().item() == pytest.approx(8.5, abs=1)
    assert 0.00099 <= step.min() < 0.0012 < 0.08 < step.max() <= 0.1001
    assert step.log10().mean().item() == pytest.approx(-2, abs=0.1)
    again = build("gated_deltanet", num_heads=400, head_width=1, decay_init="paper")
    assert isinstance(again, GatedDeltaNet)
    assert torch.equal(again.log_decay_rate, mixer.log_decay_rate)
    assert torch.equal(again.decay_bias, mixer.decay_bias)


def test_turned_features_meet_in_the_numerator_alone():
    """All weights of linear attention written out: of turned features above the line, of unturned below it."""
    mixer, x = build("linear", dtype=torch.float64, rotary_theta=100.0), example_input(2, 30, dtype=torch.float64)
    assert isinstance(mixer, LinearAttention)
    query, key, value = (part.transpose(1, 2) for part in mixer.inputs(x, None, None)[0][:3])
    angle_TK = torch.arange(30.0)[:, None] * 100.0 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    turn = torch.polar(torch.ones_like(angle_TK), angle_TK).to(torch.complex128)
    turned_query, turned_key = (torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turn for part in (query, key))
    above = (turned_query @ turned_key.mH).real.tril() @ value
    below = (query @ key.mT).tril().sum(-1, keepdim=True)
    expected = mixer.output((above / below).transpose(1, 2).flatten(2), x)
    assert_near(mixer(x)[0], expected, 1e-5)


def test_rotary_positions_stand_beside_values_of_an_odd_number_of_channels():
    mixer = build("gated_deltanet", rotary_theta=100.0, qk_norm=False, num_heads=1, value_expansion=33 / 32)
    check_against_definition(mixer, 70)


def test_inputs_of_gated_deltanet_have_unit_length_and_beta_reaches_two_only_if_asked():
    for negative, limit in ((False, 1), (True, 2)):
        mixer = build("gated_deltanet", negative_eigenvalues=negative)
        assert isinstance(mixer, GatedDeltaNet)
        beta = mixer.signals(1e4 * example_input(2, 20))[1]
        assert beta.min() >= 0
        assert beta.max() == limit
        query, key, _ = mixer.normed_heads(example_input(2, 20), None, None)
        torch.testing.assert_close(key.norm(dim=-1), torch.ones(2, 20, 2), atol=1e-3, rtol=0)
        torch.testing.assert_close(query.norm(dim=-1), torch.full((2, 20, 2), HEAD_WIDTH**-0.5), atol=1e-3, rtol=0)


def scan_inputs(num_chunks: int = 4, *, addition: bool = True) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"decay": (2,), "read": (2, 4, 3), "key": (2, 4, 3), "write": (2, 4, 5), "addition": (2, 3, 5)}
    tensors: list[Tensor | None] = [
        torch.randn(num_chunks, *shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    ]
    if not addition:
        tensors[-1] = None
    return [*tensors, torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()]


both_ways = pytest.mark.parametrize("reverse", [False, True])


@both_ways
@pytest.mark.parametrize("num_chunks", [0, 3])
def test_scan_is_a_proper_operator(num_chunks, reverse):
    torch.library.opcheck(affine_scan, (*scan_inputs(num_chunks, addition=num_chunks > 0), reverse))


@both_ways
@pytest.mark.parametrize("unmapped", [None, 0, 5])
def test_scan_under_vmap(reverse, unmapped):
    inputs = [torch.stack([x, 2 * x, x + 1], dim=-1).detach() for x in scan_inputs()]
    in_dims: list[int | None] = [-1] * 6
    if unmapped is not None:
        inputs[unmapped], in_dims[unmapped] = inputs[unmapped][..., 0], None

    def scan(*tensors: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in affine_scan(*tensors, reverse)])

    assert_stacked(scan, [x.requires_grad_() for x in inputs], in_dims, 1e-12)


def test_scan_reports_its_flops():
    with FlopCounterMode(display=False) as counter:
        affine_scan(*scan_inputs())
    assert counter.get_total_flops() == 4 * 2 * (2 * 4 * 3 * 5) * 2


def test_linear_attention_by_our_kernel_is_refused_where_it_cannot_run(monkeypatch):
    with pytest.raises(UserError, match=r"attn\.backend=triton.*device=cpu"):
        LinearAttention.choose_backend({"backend": "triton"}, device_type="cpu", precision="float32")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = {"backend": "triton", "head_width": 256}
    with pytest.raises(UserError, match=r"backend=triton.*16 to 128 channels, not 256.*backend=torch"):
        LinearAttention.choose_backend(options, device_type="cpu", precision="float32")


@pytest.mark.parametrize(
    ("mixer_class", "device_type", "precision", "options", "backend"),
    [
        (LinearAttention, "cuda", "bfloat16", {"head_width": 64}, "triton"),
        (LinearAttention, "cuda", "bfloat16", {"head_width": 16}, "triton"),
        (LinearAttention, "cuda", "bfloat16", {"head_width": 8}, "torch"),
        (LinearAttention, "cuda", "bfloat16", {"head_width": 256}, "torch"),
        (LinearAttention, "cpu", "bfloat16", {"head_width": 64}, "torch"),
        (GatedDeltaNet, "cuda", "bfloat16", {}, "triton"),
        (GatedDeltaNet, "cuda", "bfloat16", {"head_width": 64, "value_expansion": 2}, "triton"),
        (GatedDeltaNet, "cuda", "bfloat16", {"head_width": 48}, "torch"),
        (GatedDeltaNet, "cuda", "bfloat16", {"head_width": 16, "value_expansion": 1.5}, "torch"),
        (GatedDeltaNet, "cuda", "float32", {"head_width": 128}, "triton"),
        (GatedDeltaNet, "cuda", "bfloat16", {"head_width": 256}, "triton"),
        (GatedDeltaNet, "cuda", "float32", {"head_width": 256}, "torch"),
        (GatedDeltaNet, "cuda", "tf32", {"head_width": 256}, "torch"),
        (GatedDeltaNet, "cpu", "bfloat16", {"head_width": 64}, "torch"),
    ],
)
def test_auto_is_our_kernel_where_there_is_one(mixer_class, device_type, precision, options, backend):
    given = {"backend": "auto", **options}
    assert mixer_class.choose_backend(given, device_type=device_type, precision=precision) == backend


def test_triton_is_refused_where_it_cannot_run():
    options = {"backend": "triton", "head_width": 48}
    with pytest.raises(UserError, match=r"backend=triton.*16, 32, 64, 128.*not 48 and 48.*backend=torch"):
        GatedDeltaNet.choose_backend(options, device_type="cuda", precision="bfloat16")
    with pytest.raises(UserError, match=r"bfloat16 also of 256.*not 256 and 256 in float32.*backend=torch"):
        GatedDeltaNet.choose_backend({**options, "head_width": 256}, device_type="cuda", precision="float32")
    with pytest.raises(UserError, match=r"backend=triton.*need CUDA"):
        GatedDeltaNet.choose_backend({**options, "head_width": 64}, device_type="cpu", precision="float32")


@pytest.mark.parametrize("wrong", ["3.4.0", "3.6.0", "3.7.0", "3.7.0+git1"])
@pytest.mark.parametrize("right", ["3.3.1", "3.7.1", "3.8.0", "4.0.0"])
def test_miscompiled_gates_are_refused_on_hopper_alone_and_of_these_tritons_alone(wrong, right):
    with pytest.raises(UserError, match=r"triton>=3\.7\.1 or use backend=torch"):
        refuse_miscompiled_gates("attn.backend=fla", (9, 0), wrong)
    refuse_miscompiled_gates("attn.backend=fla", (8, 0), wrong)
    refuse_miscompiled_gates("attn.backend=fla", (9, 0), right)


@pytest.mark.parametrize("name", ["elu", "relu", "softmax"])
def test_a_feature_keeps_its_dtype_under_autocast_and_its_digits_far_below_zero(name):
    x = torch.tensor([-9.0, -7.0, -0.5, 0.0, 3.0], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = feature(x, name)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), feature(x.double(), name), rtol=0.01, atol=0)
