"""Softmax and flash: what is theirs beyond the contract that every mixer keeps."""

import itertools
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.mixers.flash import Flash
from attnbench.mixers.fox import Fox
from attnbench.mixers.softmax import Softmax
from attnbench.mixers.window import Window
from attnbench.ops.attention.softmax_attention import attend, definition, materialised, visible
from attnbench.settings.errors import UserError

DIM, HEAD_WIDTH = 32, 8


def made(cls: type[Softmax], **options) -> Softmax:
    mixer = cls(dim=DIM, head_width=HEAD_WIDTH, **options).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return mixer


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("conv_on", [["q"], ["k"], ["v"], ["k", "v"], ["v", "q"], ["q", "k", "v"]])
@pytest.mark.parametrize("cls", [Softmax, Flash, Window, Fox])
def test_the_convolution_acts_on_the_parts_that_are_named(cls, conv_on) -> None:
    options = {"conv_size": 3, "num_key_value_heads": 2, "rotary_theta": None}
    mixer, x = made(cls, conv_on=conv_on, **options), inputs(2, 9, DIM)
    own = mixer.query_key_value
    parts = dict(zip("qkv", own.projection(x).split([32, 16, 16], dim=-1), strict=True))
    assert own.convolution is not None
    widths = [parts[name].shape[-1] for name in "qkv" if name in conv_on]
    weights = dict(zip(sorted(conv_on, key="qkv".index), own.convolution.weight.split(widths), strict=True))
    for found, (name, expected) in zip(own(x), parts.items(), strict=True):
        if name in conv_on:
            padded = torch.nn.functional.pad(expected, (0, 0, 2, 0))
            taps = [padded[:, tap : tap + 9] * weights[name][:, tap] for tap in range(3)]
            expected = torch.stack(taps).sum(0)
        torch.testing.assert_close(found, expected)
    whole = mixer(x)[0]
    state = mixer.init_state(2, 9, torch.float64)
    first, state = mixer(x[:, :4], state)
    steps = [mixer.step(x[:, position], state)[0] for position in range(4, 9)]
    torch.testing.assert_close(torch.cat([first, torch.stack(steps, 1)], 1), whole)
    if len(conv_on) == 3:
        torch.testing.assert_close(whole, made(cls, **options)(x)[0], rtol=0, atol=0)


@pytest.mark.parametrize("cls", [Softmax, Flash])
def test_rotary_scores_depend_on_distance_alone(cls) -> None:
    """All positions moved by 100 turn every query and key, and change nothing (the angles are in float32)."""
    mixer, x = made(cls), inputs(1, 6, DIM)
    query, key, value = mixer.project(x, 0, None)
    moved_query, moved_key, _ = mixer.project(x, 100, None)
    assert not torch.allclose(query, moved_query)
    torch.testing.assert_close(
        mixer.mix(query, key, value), mixer.mix(moved_query, moved_key, value), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("window", [1, 3, 100])
def test_flash_decodes_with_its_window(window: int) -> None:
    query, key, value = (inputs(2, 11, 4, 8, seed=seed) for seed in range(3))
    torch.testing.assert_close(materialised(query, key, value, window), definition(query, key, value, window))
    mixer, x = made(Flash, window=window, backend="flash_attn"), inputs(2, 11, DIM)
    state = mixer.init_state(2, 11, torch.float64)
    steps = []
    for position in range(11):
        y, state = mixer.step(x[:, position], state)
        steps.append(y)
    projected = mixer.project(inputs(1, 11, DIM), 0, None)
    with FlopCounterMode(display=False) as counter:
        definition(*projected, window)
    assert mixer.mixing_flops(11) == counter.get_total_flops()
    torch.testing.assert_close(torch.stack(steps, dim=1), mixer.reference(x))


@pytest.mark.parametrize("cls", [Softmax, Flash])
def test_bfloat16_scores_are_summed_in_float32(cls) -> None:
    """300 equal keys: in bfloat16 a running sum of ones stops at 256."""
    mixer = made(cls, rotary_theta=None)
    ones = torch.ones(1, 300, 4, HEAD_WIDTH, dtype=torch.bfloat16)
    torch.testing.assert_close(mixer.mix(ones, ones, ones)[:, -1], ones[:, -1])


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Softmax, {"conv_on": ["k"]}, r"attn.conv_on=\['k'\]: there is no convolution; attn.conv_size=4"),
        (Softmax, {"conv_on": [], "conv_size": 4}, r"attn.conv_on=\[\]: must name at least one"),
        (Softmax, {"conv_on": ["k", "k"], "conv_size": 4}, r"attn.conv_on=\['k', 'k'\]: names something twice"),
        (Softmax, {"conv_on": ["gate"], "conv_size": 4}, r"attn.conv_on=\['gate'\]: must be one of q, k, v"),
        (Softmax, {"num_heads": 3}, "num_heads=3 × head_width=8 is 24, model.dim is 32"),
        (Flash, {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide the 4"),
        (Softmax, {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        (Softmax, {"rotary_theta": -1.0}, "rotary_theta=-1.0"),
        (Softmax, {"backend": "sdpa"}, "backend=sdpa: Softmax has auto, torch"),
        (Flash, {"window": 0}, "window=0"),
        (Flash, {"window": 4, "backend": "sdpa"}, "window=4: attn.backend=sdpa has no sliding window"),
    ],
)
def test_refused_settings(cls, options, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        cls(dim=DIM, head_width=HEAD_WIDTH, **options)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="rotary_theta=null"):
        Softmax(dim=30, head_width=5)
    Softmax(dim=30, head_width=5, rotary_theta=None)


@pytest.mark.parametrize(
    ("options", "device_type", "precision", "message"),
    [
        ({"backend": "torch"}, "cpu", "float32", "backend=torch: Flash has auto, sdpa, cudnn, flash_attn, triton"),
        ({"backend": "sdpa", "window": 4}, "cuda", "bfloat16", "window=4: attn.backend=sdpa"),
        ({"backend": "flash_attn"}, "cpu", "float32", "attn.backend=flash_attn: .* CUDA alone"),
        ({"backend": "cudnn"}, "cpu", "bfloat16", "attn.backend=cudnn: .* CUDA alone"),
        ({"backend": "triton"}, "cpu", "float32", "attn.backend=triton: .* need CUDA, not device=cpu"),
        ({"window": 4}, "cpu", "float32", "attn.window=4: .* needs CUDA"),
        ({"backend": "sdpa"}, "cuda", "float32", "train.precision=float32: attn.backend=sdpa .* attn.backend=triton"),
        ({"backend": "cudnn"}, "cuda", "tf32", "train.precision=tf32: attn.backend=cudnn .* attn.backend=triton"),
        ({"backend": "flash_attn"}, "cuda", "float32", "attn.backend=flash_attn .* attn.backend=triton"),
        ({"backend": "cudnn", "window": 4}, "cuda", "bfloat16", "window=4: attn.backend=cudnn has no sliding window"),
        ({"backend": "cudnn", "head_width": 136}, "cuda", "bfloat16", "head_width=136: .* multiple of 8 up to 128"),
        ({"head_width": 256}, "cuda", "float32", "head_width=256: attn.backend=triton needs a width up to 128"),
        ({"head_width": 260}, "cuda", "bfloat16", "head_width=260: .* multiple of 8 up to 256"),
        ({"head_width": 512}, "cuda", "bfloat16", "head_width=512"),
    ],
)
def test_flash_refuses_what_its_kernel_cannot_do(options, device_type: str, precision: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        Flash.choose_backend(options, device_type=device_type, precision=precision)
    assert "\n" not in str(refusal.value)


def test_flash_attn_missing_names_the_install_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match="pip install flash-attn"):
        Flash.choose_backend({"backend": "flash_attn"}, device_type="cuda", precision="bfloat16")


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attn_is_called_as_its_signature_asks(window: int | None, monkeypatch) -> None:
    """Of a stand-in with that signature, which computes by the definition."""
    module = type(torch)("flash_attn")

    def flash_attn_func(query, key, value, *, causal, window_size):
        assert causal
        past_TS = torch.arange(key.shape[1])[-query.shape[1] :, None] - torch.arange(key.shape[1])
        return attend(query, key, value, visible(past_TS, None if window_size == (-1, -1) else window_size[0] + 1))

    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    options = {"backend": "flash_attn", "window": window, "head_width": 8}
    assert Flash.choose_backend(options, device_type="cuda", precision="bfloat16") == "flash_attn"
    mixer, x = made(Flash, backend="flash_attn", window=window), inputs(1, 9, DIM)
    torch.testing.assert_close(mixer(x)[0], mixer.reference(x))


@pytest.mark.parametrize(
    ("device_type", "precision", "window", "backend"),
    [
        ("cpu", "float32", None, "sdpa"),
        ("cpu", "bfloat16", None, "sdpa"),
        ("cuda", "bfloat16", None, "cudnn"),
        ("cuda", "float32", None, "triton"),
        ("cuda", "tf32", None, "triton"),
        ("cuda", "bfloat16", 4, "triton"),
    ],
)
def test_auto(device_type: str, precision: str, window: int | None, backend: str) -> None:
    options = {"head_width": 64, "window": window}
    assert Flash.choose_backend(options, device_type=device_type, precision=precision) == backend
    assert Softmax.choose_backend({}, device_type="cuda", precision="float32") == "torch"


def test_sdpa_runs_the_flash_kernel_alone() -> None:
    mixer, x = made(Flash), inputs(1, 9, DIM)
    with torch.profiler.profile() as profile:
        mixer(x)
        mixer(x[:, :4], mixer(x[:, :5], mixer.init_state(1, 9, torch.float64))[1])
    names = {event.key for event in profile.key_averages()}
    assert any("flash_attention" in name for name in names)
    assert not any("attention_math" in name for name in names)


def test_the_compiler_may_keep_what_trains() -> None:
    """A choice of kernel in the middle of a graph would have every start trace and compile anew."""
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe

    targets = []

    def backend(graph, example):
        for node in graph.graph.nodes:
            check_node_safe(node)
            targets.append(str(node.target))
        return graph

    mixer, x = made(Flash, num_key_value_heads=2).float(), inputs(1, 9, DIM).float().requires_grad_()
    torch.testing.assert_close(torch.compile(mixer, backend=backend, fullgraph=True)(x)[0], mixer(x)[0])
    # The kernel is part of the graph, and so of what it is kept by.
    assert any("flash_attention" in target for target in targets)


def test_autocast_casts_for_the_kernel_as_for_the_function_around_it() -> None:
    query, key, value = (inputs(2, 9, 4, 8, seed=seed).float() for seed in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = made(Flash).mix(query, key, value)
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, expected.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "cudnn", "triton"])
@pytest.mark.parametrize("heads", [4, 2])
def test_a_kernel_on_cuda_is_the_definition_for_pieces_too(backend: str, heads: int) -> None:
    shapes = ((2, 100, 4, 64), (2, 100, heads, 64), (2, 100, heads, 64))
    query, key, value = (
        inputs(*shape, seed=seed).to("cuda", torch.bfloat16).requires_grad_() for seed, shape in enumerate(shapes)
    )
    mixer = Flash(dim=256, head_width=64, num_key_value_heads=heads, backend=backend)
    exact = definition(query.double(), key.double(), value.double(), None)
    torch.testing.assert_close(mixer.mix(query, key, value).double(), exact, rtol=0, atol=0.03)
    for start, end in itertools.pairwise((0, 1, 7, 8, 100)):
        piece = mixer.mix(query[:, start:end], key[:, :end], value[:, :end])
        torch.testing.assert_close(piece.double(), exact[:, start:end], rtol=0, atol=0.03)
