"""The models that our training step is timed beside: of equal size, and found where the user says."""

import importlib.util

import pytest
import torch

from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings
from benchmarks.peers.models import AbsentPeerError, FlaModel, NanoGPT, PlainGPT


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


def test_nanogpt_is_taken_from_the_file_that_is_named(tmp_path) -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=1, head_width=8, feed_forward_width=16)
    path = tmp_path / "model.py"
    with pytest.raises(UserError, match=r"model\.py: no such file"):
        NanoGPT(model, 10, 8, path=str(path))
    path.write_text("GPT = None\n")
    with pytest.raises(UserError, match=r"must be nanoGPT's"):
        NanoGPT(model, 10, 8, path=str(path))


def test_nanogpt_without_flash_gets_its_own_textbook_attention(tmp_path) -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=2, head_width=8, feed_forward_width=16)
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom types import SimpleNamespace\n"
        "GPTConfig = SimpleNamespace\n"
        "class Attention(torch.nn.Module):\n    flash = True\n"
        "class Block(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.attn = Attention()\n"
        "class GPT(torch.nn.Module):\n"
        "    def __init__(self, config):\n        super().__init__()\n"
        "        self.transformer = torch.nn.ModuleDict({'h': torch.nn.ModuleList([Block(), Block()])})\n"
    )
    blocks = NanoGPT(model, 10, 8, path=str(path), flash=False).gpt.transformer.h
    for block in blocks:
        assert block.attn.flash is False
        assert torch.equal(block.attn.bias[0, 0], torch.ones(8, 8).tril())


def test_what_is_not_here_is_absent() -> None:
    model = ModelSettings(name="tiny", dim=16, num_layers=1, head_width=8, feed_forward_width=16)
    with pytest.raises(AbsentPeerError, match="--nanogpt PATH"):
        NanoGPT(model, 10, 8, path=None)
    if importlib.util.find_spec("fla") is None:
        with pytest.raises(AbsentPeerError, match=r"fla is not installed \(or give --fla-path DIR\)"):
            FlaModel(model, 10, 8, name="GatedDeltaNet", options={})
