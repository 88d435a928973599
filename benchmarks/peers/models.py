"""Peers that are whole models: a plain GPT of torch's own parts, nanoGPT's, and flash-linear-attention's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.settings.errors import UserError
from attnbench.settings.schema import ModelSettings

Operator = Callable[..., Tensor]
"""(query, key, value, log_decay, beta) -> output (B, T, H, V); the query not yet scaled."""


class AbsentPeerError(UserError):
    """A peer that this machine does not have; it is left out by name."""


def load_module(path: str, name: str) -> Any:
    """A single Python file, without the package that it may belong to.

    Raises:
        UserError: no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered, because dataclasses look their own module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class PlainBlock(nn.Module):
    """Causal self-attention, then a GELU feed-forward, each on the LayerNorm of the residual stream."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x_BTD)).unflatten(-1, (3, self.num_heads, -1))
        query_BHTK, key_BHTK, value_BHTK = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTK = F.scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.feed_forward_norm(x_BTD))))


class PlainGPT(nn.Module):
    """The usual starting point: LayerNorm, learned positions, GELU, torch's attention as it comes, no setting.

    Its feed-forward is 3/2 as wide as our SwiGLU, which gives it equal parameters. It is here to keep our layers
    honest, not to be compared in any other way.
    """

    def __init__(self, model: ModelSettings, vocabulary_size: int, seq_len: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary_size, model.dim)
        self.positions = nn.Embedding(seq_len, model.dim)
        hidden = model.feed_forward_width * 3 // 2
        heads = model.dim // model.head_width
        self.blocks = nn.Sequential(*(PlainBlock(model.dim, heads, hidden) for _ in range(model.num_layers)))
        self.norm = nn.LayerNorm(model.dim, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        position_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.blocks(self.symbols(tokens_BT) + self.positions(position_T))
        return F.linear(self.norm(x_BTD), self.symbols.weight)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats a token."""
        return F.cross_entropy(self(inputs_BT).flatten(0, 1).float(), targets_BT.flatten())


class NanoGPT(nn.Module):
    """nanoGPT's own model (github.com/karpathy/nanoGPT), from the model.py that the user names.

    Args:
        path: of model.py.
        compiled: as its train.py does by default, the loss included.
        flash: False for its textbook attention, which it takes where torch has no fused one.

    Raises:
        AbsentPeerError: no path.
        UserError: no such file, or not nanoGPT's.
    """

    def __init__(
        self,
        model: ModelSettings,
        vocabulary_size: int,
        seq_len: int,
        *,
        path: str | None,
        compiled: bool = False,
        flash: bool = True,
    ) -> None:
        super().__init__()
        if path is None:
            raise AbsentPeerError("give --nanogpt PATH of its model.py")
        source = load_module(path, "nanogpt_model")
        if not hasattr(source, "GPT") or not hasattr(source, "GPTConfig"):
            raise UserError(f"{path}: has no GPT and GPTConfig; it must be nanoGPT's model.py")
        config = source.GPTConfig(
            block_size=seq_len,
            vocab_size=vocabulary_size,
            n_layer=model.num_layers,
            n_head=model.dim // model.head_width,
            n_embd=model.dim,
            dropout=0.0,
            bias=False,
        )
        self.gpt: Any = source.GPT(config)
        if not flash:
            mask_11TT = torch.ones(seq_len, seq_len).tril()[None, None]
            for block in self.gpt.transformer.h:
                block.attn.flash = False
                # What its constructor adds where torch has no fused attention.
                block.attn.register_buffer("bias", mask_11TT.clone())
        if compiled:
            self.gpt.compile()

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats a token."""
        return self.gpt(inputs_BT, targets_BT)[1]


class FlaModel(nn.Module):
    """A language model of flash-linear-attention, as its users build one: its own configuration, defaults and loss.

    The embedding is tied, as ours is. Its own loss shifts the labels itself, so that it scores one position less.

    Args:
        name: GatedDeltaNet or another, as in GatedDeltaNetConfig and GatedDeltaNetForCausalLM.
        options: of the configuration; they win over the model's shape.

    Raises:
        AbsentPeerError: the library or transformers is not installed.
    """

    def __init__(
        self, model: ModelSettings, vocabulary_size: int, seq_len: int, *, name: str, options: dict[str, Any]
    ) -> None:
        super().__init__()
        for package in ("fla", "transformers"):
            if importlib.util.find_spec(package) is None:
                raise AbsentPeerError(f"{package} is not installed (or give --fla-path DIR)")
        models: Any = importlib.import_module("fla.models")
        shape = {"hidden_size": model.dim, "num_hidden_layers": model.num_layers}
        shape |= {"num_heads": model.dim // model.head_width, "max_position_embeddings": seq_len}
        shape |= {"vocab_size": vocabulary_size, "tie_word_embeddings": True}
        config = getattr(models, f"{name}Config")(**shape | options)
        self.language_model: Any = getattr(models, f"{name}ForCausalLM")(config)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats a token, of all but the last."""
        return self.language_model(input_ids=inputs_BT, labels=inputs_BT).loss


def naive_delta_rule() -> Operator:
    """`naive_chunk_gated_delta_rule` of flash-linear-attention 0.6.

    Its file is loaded alone, because the package around it cannot be imported without Triton.

    Raises:
        AbsentPeerError: the library, or einops, which it needs, is not installed.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise AbsentPeerError("flash-linear-attention is not installed (or give --fla-path DIR)")
    if importlib.util.find_spec("einops") is None:
        raise AbsentPeerError("the naive form of flash-linear-attention needs einops; pip install einops")
    path = Path(package.submodule_search_locations[0]) / "ops" / "gated_delta_rule" / "naive.py"
    module = load_module(str(path), "fla_naive_gated_delta_rule")

    def operator(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return module.naive_chunk_gated_delta_rule(query, key, value, log_decay, beta)[0]

    return operator
