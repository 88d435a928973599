"""The peer that our training step is timed beside: of equal size, and timed in turns."""

import pytest
import torch

from attnbench.bench.plain_gpt import NanoGPT, PlainGPT, compare_training_steps
from attnbench.errors import UserError
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
        PlainGPT(model, 10, 8),
        batch_size=2,
        num_rounds=3,
        num_warmup=1,
    )
    assert comparison.ours_seconds.shape == comparison.peer_seconds.shape == (3,)
    twice = comparison._replace(peer_seconds=2 * comparison.ours_seconds)
    assert twice.speed_quantiles() == pytest.approx([2, 2, 2])


def test_nanogpt_is_taken_from_the_file_that_is_named(tmp_path) -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=1, head_width=8, feed_forward_width=16)
    path = tmp_path / "model.py"
    with pytest.raises(UserError, match=r"model\.py: no such file"):
        NanoGPT(str(path), model, 10, 8)
    path.write_text("GPT = None\n")
    with pytest.raises(UserError, match=r"must be nanoGPT's"):
        NanoGPT(str(path), model, 10, 8)
    path.write_text(
        "import torch\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass GPTConfig:\n"
        "    block_size: int\n    vocab_size: int\n    n_layer: int\n    n_head: int\n    n_embd: int\n"
        "    dropout: float\n    bias: bool\n"
        "class GPT(torch.nn.Module):\n"
        "    def __init__(self, config):\n        super().__init__()\n"
        "        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)\n"
        "    def forward(self, idx, targets):\n        logits = self.table(idx)\n"
        "        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
    )
    assert NanoGPT(str(path), model, 10, 8).loss(torch.zeros(2, 8).long(), torch.ones(2, 8).long()).isfinite()
