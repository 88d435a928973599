"""Latent attention: the step that absorbs the up-projections, its operations and its cache."""

from typing import Any

import pytest
import torch
from mixer_building import DIM, HEAD_WIDTH, assert_near, build, example_input
from torch.utils.flop_counter import FlopCounterMode

from attnbench.mixers.base import state_bytes
from attnbench.mixers.definition import in_pieces
from attnbench.mixers.mla import MLA
from attnbench.ops.attention import attention_kernels
from attnbench.settings.errors import UserError


def test_a_step_computes_no_keys_and_values() -> None:
    """The absorbed form in float64 is the definition; it leads one query and one output through the up-projections, and
    reads latents at all 20 positions: a multiply-add counts 2."""
    mixer: Any = build("mla", dtype=torch.float64)
    x = example_input(3, 20, dtype=torch.float64)
    with torch.no_grad():
        expected = mixer.reference(x)
        assert_near(in_pieces(mixer, x, [1] * 20), expected, 1e-12)
        state = mixer.init_state(3, 20, torch.float64)
        _, state = mixer(x[:, :19], state)
        with FlopCounterMode(display=False) as counter:
            mixer.step(x[:, 19], state)
    outside = [mixer.query_key_value.projection, mixer.output.projection]
    projections = 2 * sum(module.weight.numel() for module in outside)
    absorbing = 2 * 2 * mixer.head_width * mixer.latent_channels
    reading = 2 * 20 * (2 * mixer.latent_channels + mixer.rotary_width)
    assert counter.get_total_flops() == 3 * (mixer.heads * (absorbing + reading) + projections)


def test_the_cache_holds_latent_and_rotary_key_alone() -> None:
    mixer: Any = build("mla")
    latent, rotary = DIM // 2, 16
    assert state_bytes(mixer.init_state(1, 100, torch.bfloat16)) == 2 * 100 * (latent + rotary) + 8
    softmax: Any = build("softmax")
    assert state_bytes(softmax.init_state(1, 100, torch.bfloat16)) == 2 * 100 * 2 * DIM + 8


def test_only_the_rotary_channels_are_turned() -> None:
    """All positions moved by 100 turn queries and the shared key, and change nothing (the angles are in float32)."""
    mixer: Any = build("mla", dtype=torch.float64)
    x = example_input(1, 6, dtype=torch.float64)
    query, key, latent = mixer._project(x, 0, None)
    moved_query, moved_key, moved_latent = mixer._project(x, 100, None)
    assert torch.equal(query[..., :HEAD_WIDTH], moved_query[..., :HEAD_WIDTH])
    assert not torch.allclose(query[..., HEAD_WIDTH:], moved_query[..., HEAD_WIDTH:], rtol=1e-2)
    assert torch.equal(latent, moved_latent)
    score, moved = (
        torch.einsum("bthk,bsk->bhts", q[..., HEAD_WIDTH:], k) for q, k in ((query, key), (moved_query, moved_key))
    )
    assert_near(moved, score, 1e-5)
    assert not torch.allclose(key, moved_key, rtol=1e-2)


@pytest.mark.parametrize(
    ("backend", "options", "device_type", "message"),
    [
        ("cudnn", {}, "cpu", "cuDNN's kernel: CUDA alone, and device=cpu"),
        ("cudnn", {"rotary_width": 12}, "cuda", "cuDNN's kernel: multiples of 8 .* and here are 76"),
        ("cudnn", {"head_width": 60, "rotary_width": 20}, "cuda", "multiples of 8 .* and here are 60"),
        ("triton", {"head_width": 128}, "cuda", "our Triton kernel .* up to 128 channels a head, and here are 144"),
    ],
)
def test_a_kernel_is_refused_by_the_widths_of_keys_and_values(backend, options, device_type, message, monkeypatch):
    monkeypatch.setattr(attention_kernels, "require_triton", lambda *named: None)
    problem = {"device_type": device_type, "precision": "bfloat16"}
    given = {"backend": backend, "head_width": 64, **options}
    with pytest.raises(UserError, match=rf"^attn\.backend={backend}: .*{message}; attn\.backend=torch takes all$"):
        MLA.choose_backend(given, **problem)
    assert MLA.choose_backend({**given, "backend": "auto"}, **problem) == "torch"
    assert MLA.choose_backend({"backend": backend, "head_width": 64}, **problem | {"device_type": "cuda"}) == backend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_width": 15}, r"^attn\.rotary_theta=10000\.0, head_width=15: rotary positions need .* even"),
        ({"rotary_width": 0}, r"^attn\.rotary_width=0: must be at least 1$"),
        ({"latent_width": 0}, r"^attn\.latent_width=0: must be at least 1$"),
        ({"backend": "sdpa"}, r"^attn\.backend=sdpa: MLA has auto, torch, cudnn, triton$"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("mla", **options)
