"""The peer that our training step is timed beside: of equal size, and timed in turns."""

import pytest
import torch

from attnbench.bench.plain_gpt import PlainGPT, compare_training_steps
from attnbench.settings import MixerSettings, ModelSettings


def test_peer_has_equal_parameters_but_for_its_positions() -> None:
    model = ModelSettings(name="4m", dim=256, num_layers=4, head_width=64, feed_forward_width=880)
    with torch.device("meta"):
        peer = PlainGPT(model, 284, 256)
    assert sum(p.numel() for p in peer.parameters()) - peer.positions.weight.numel() == 3826944


def test_peer_sees_nothing_from_the_future() -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=2, head_width=8, feed_forward_width=16)
    peer, tokens = PlainGPT(model, 10, 6), torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    same = (peer(tokens) == peer(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 2


def test_comparison_counts_rounds_and_reports_a_ratio() -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=1, head_width=8, feed_forward_width=16)
    mixer = MixerSettings(name="flash", target="attnbench.mixers.flash.Flash", options={"backend": "auto"})
    comparison = compare_training_steps(
        mixer,
        model,
        vocabulary_size=10,
        seq_len=8,
        batch_size=2,
        device=torch.device("cpu"),
        precision="float32",
        num_rounds=3,
        num_warmup=1,
    )
    assert comparison.ours_seconds.shape == comparison.plain_seconds.shape == (3,)
    twice = comparison._replace(plain_seconds=2 * comparison.ours_seconds)
    assert twice.speed_quantiles() == pytest.approx([2, 2, 2])
