"""Mixers on our kernels, through Triton's interpreter, against their definitions; on a GPU correctness/test_gpu.py."""

import pytest
import torch
from kernel_checks import interpreted
from mixer_building import assert_near, build, check_against_definition, check_compiles_and_stacks, example_input

from attnbench.mixers.definition import in_pieces
from attnbench.ops.attention.triton import flash_decoding as decoding_kernels

pytestmark = interpreted
TURNED, GROUPED = {"rotary_theta": 100.0}, {"num_key_value_heads": 1, "conv_size": 4}
CASES = [
    *(("flash", change) for change in ({}, GROUPED, {"qk_norm": True}, {"rotary_theta": None, "window": 9})),
    *(("fox", {}), ("fox", GROUPED), ("window", {"window": 9})),
    *(("mla", {}), ("mla", {"qk_norm": True, "conv_size": 4, "rotary_width": 10})),
    *(("linear", change) for change in ({}, {"feature_map": "relu"}, {"feature_map": "softmax"}, {"qk_norm": True})),
    *(("linear", change) for change in ({"conv_size": 4}, TURNED, {"output_norm": True, "output_gate": "sigmoid"})),
    ("linear", {**TURNED, "qk_norm": True, "feature_map": "softmax"}),
    *(("gated_deltanet", {}), ("gated_deltanet", {"qk_norm": False})),
    ("gated_deltanet", {"value_expansion": 2, "negative_eigenvalues": True}),
    ("gated_deltanet", {**TURNED, "value_expansion": 0.5, "output_norm": False, "output_gate": "sigmoid"}),
    *(("deltanet", {}), ("efla", TURNED), ("efla", {"qk_norm": True}), ("deltaproduct", {})),
    ("deltaproduct", {**TURNED, "decay": False, "value_expansion": 0.5, "num_householders": 3}),
    *((name, {}) for name in ("gla", "hgrn2", "kda", "gdn2", "rwkv7")),
    *(("retnet", {}), ("simple_gla", {"qk_norm": True, "value_expansion": 2}), ("mlstm", {"value_expansion": 0.5})),
    *(("mamba2", {"state_width": 16, **TURNED}), ("mamba3", {"state_width": 16})),
]
COMPILED = [
    *(("flash", GROUPED), ("fox", {}), ("linear", {}), ("linear", TURNED), ("gated_deltanet", {}), ("kda", {})),
    *(("gated_deltanet", TURNED), ("deltaproduct", {}), ("mamba2", {"state_width": 16, **TURNED})),
    *(
        pytest.param(name, change, marks=pytest.mark.slow)
        for name, change in (
            *(("gla", {}), ("rwkv7", {}), ("retnet", {}), ("mamba3", {"state_width": 16})),
            *(("mlstm", {"value_expansion": 0.5}), ("window", {"window": 9}), ("mla", {})),
        )
    ),
]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_mixer_is_its_definition_and_reads_on_in_pieces_and_steps(name, change):
    mixer = build(name, backend="triton", **change)
    assert mixer.backend == "triton"
    check_against_definition(mixer, 70)
    x = example_input(2, 70)
    with torch.no_grad():
        assert_near(in_pieces(mixer, x, (34, 1, 30, 1, 4)), mixer(x)[0], 2e-5)


@pytest.mark.parametrize(("name", "change"), COMPILED)
def test_a_mixer_is_compiled_as_one_graph_and_stacked(name, change):
    check_compiles_and_stacks(build(name, backend="triton", **change))


@pytest.mark.parametrize("window", [None, 9])
def test_flash_decodes_by_our_kernel(window, monkeypatch):
    calls, kernel = [], decoding_kernels.flash_decoding
    counted = lambda *inputs, **options: (calls.append(options), kernel(*inputs, **options))[1]  # noqa: E731
    monkeypatch.setattr(decoding_kernels, "flash_decoding", counted)
    mixer, x = build("flash", backend="triton", window=window, conv_size=3), example_input(2, 40)
    with torch.no_grad():
        assert_near(in_pieces(mixer, x, (30, *(1,) * 10)), mixer(x)[0], 2e-5)
    assert calls == [{"window": window}] * 10
