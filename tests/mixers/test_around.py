"""The parts around a mixing against their plain formulas."""

import pytest
import torch
from mixer_building import assert_near, build, example_input, mixer_names, read
from torch import nn

GATES = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


@pytest.mark.parametrize("name", mixer_names())
@pytest.mark.parametrize("gate", ["none", *GATES])
def test_an_output_is_normed_by_heads_then_gated_then_projected(name, gate):
    """Against the same mixer without norm, gate and projection."""
    plain = build(name, dtype=torch.float64, output_norm=False, output_gate="none")
    mixer = build(name, dtype=torch.float64, output_norm=True, output_gate=gate)
    with torch.no_grad():
        nn.init.uniform_(mixer.norm.weight, 0.5, 2.0)
        for part in ("bonus", "shift"):
            # What comes to the norm's output, and what else than x the gate reads.
            for one in (plain, mixer):
                getattr(one, part, torch.empty(0)).zero_()
        plain.output.projection = nn.Identity()
    x = example_input(2, 20, dtype=torch.float64)
    heads = plain(x)[0].unflatten(-1, (-1, len(mixer.norm.weight)))
    normed = mixer.norm.weight * heads / (heads.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt()
    gated = normed.flatten(2) * (GATES[gate](mixer.output.gate(x)) if gate != "none" else 1)
    assert_near(mixer(x)[0], gated @ mixer.output.projection.weight.mT, 1e-10)
    assert (mixer.output.gate is None) == (gate == "none")


@pytest.mark.parametrize("name", mixer_names())
def test_activation_is_what_the_class_says(name):
    cls, options = read(name)
    for conv_size in {0, 4} if "conv_size" in options else ():
        layer = getattr(build(name, conv_size=conv_size), "query_key_value", None)
        assert cls.activates({**options, "conv_size": conv_size}) == (layer is not None and layer.activation)
