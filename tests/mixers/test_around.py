"""The parts around a mixing against their plain formulas."""

import pytest
import torch
from mixer_building import HEAD_WIDTH, assert_near, build, example_input, mixer_names
from torch import nn

GATES = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


@pytest.mark.parametrize("name", mixer_names())
@pytest.mark.parametrize("gate", ["none", *GATES])
def test_an_output_is_normed_by_heads_then_gated_then_projected(name, gate):
    """Against the same mixer without norm and gate, whose projection is taken back."""
    plain = build(name, dtype=torch.float64, output_norm=False, output_gate="none")
    mixer = build(name, dtype=torch.float64, output_norm=True, output_gate=gate)
    with torch.no_grad():
        nn.init.uniform_(mixer.norm.weight, 0.5, 2.0)
        plain.output.projection.weight.copy_(torch.eye(len(plain.output.projection.weight)))
    x = example_input(2, 20, dtype=torch.float64)
    heads = plain(x)[0].unflatten(-1, (-1, HEAD_WIDTH))
    normed = mixer.norm.weight * heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gated = normed.flatten(2) * (GATES[gate](x @ mixer.output.gate.weight.mT) if gate != "none" else 1)
    assert_near(mixer(x)[0], gated @ mixer.output.projection.weight.mT, 1e-10)
    assert (mixer.output.gate is None) == (gate == "none")
