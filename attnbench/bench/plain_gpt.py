"""How fast our training step is beside that of a plain GPT of the same size, written from torch's own parts.

The peer has what people usually start from: LayerNorm, learned positions, a GELU feed-forward, torch's attention as it
comes, torch's AdamW, and no setting. It is here to keep our layers honest, not to be compared in any other way.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.bench.peers import load_module
from attnbench.checkpoint import TrainState
from attnbench.errors import UserError
from attnbench.model import LanguageModel, build_model, resolve_mixer
from attnbench.runtime import keep_freed_memory
from attnbench.settings import MixerSettings, ModelSettings, TrainSettings
from attnbench.train import Batch, train_step


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
    """Tokens in, logits out; its feed-forward is 3/2 as wide as our SwiGLU, which gives it equal parameters."""

    def __init__(self, model: ModelSettings, vocabulary_size: int, seq_len: int) -> None:
        super().__init__()
        self.vocabulary_size, self.seq_len = vocabulary_size, seq_len
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

    Its GELU feed-forward is always 4 × dim wide; a SwiGLU of 8/3 × dim has as many parameters.

    Raises:
        UserError: no such file, or not nanoGPT's.
    """

    def __init__(self, path: str, model: ModelSettings, vocabulary_size: int, seq_len: int) -> None:
        super().__init__()
        self.vocabulary_size, self.seq_len = vocabulary_size, seq_len
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
        self.gpt = source.GPT(config)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats a token."""
        return self.gpt(inputs_BT, targets_BT)[1]


class Comparison(NamedTuple):
    """Seconds a training step, one entry a round, and the parameters that took them."""

    peer: str
    ours_seconds: Tensor
    peer_seconds: Tensor
    ours_parameters: int
    peer_parameters: int

    def __str__(self) -> str:
        low, median, high = self.speed_quantiles()
        counts = f"{self.ours_parameters:,} parameters beside {self.peer_parameters:,}"
        return f"{self.peer:<10}x{median:.3f} ({low:.3f} to {high:.3f}), {counts}"

    def speed_quantiles(self) -> list[float]:
        """Our tokens a second over the peer's, of neighbouring steps: 20th percentile, median, 80th percentile."""
        return (self.peer_seconds / self.ours_seconds).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()


Step = Callable[[Tensor, Tensor], None]


def compare_training_steps(
    mixer: MixerSettings,
    model: ModelSettings,
    peer: PlainGPT | NanoGPT,
    *,
    batch_size: int,
    num_rounds: int = 30,
    num_warmup: int = 3,
) -> Comparison:
    """Times whole training steps (forward, backward, clip, update) of ours and of the peer on a CPU, in float32.

    The two take turns in one process, the order turning too, so that whatever else the machine does hits both.
    """
    keep_freed_memory()
    resolved = resolve_mixer(mixer, model, device_type="cpu", precision="float32")
    ours = build_model([resolved] * model.num_layers, model, vocabulary_size=peer.vocabulary_size, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(peer.vocabulary_size, (batch_size, peer.seq_len + 1), generator=generator)
    inputs_BT, targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    steps = {"ours": _our_step(ours), "peer": _peer_step(peer)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_warmup + num_rounds):
        for name in sorted(steps, reverse=turn % 2 == 1):
            start = time.perf_counter()
            steps[name](inputs_BT, targets_BT)
            if turn >= num_warmup:
                seconds[name].append(time.perf_counter() - start)
    return Comparison(
        type(peer).__name__,
        torch.tensor(seconds["ours"]).double(),
        torch.tensor(seconds["peer"]).double(),
        ours.num_parameters(),
        sum(parameter.numel() for parameter in peer.parameters()),
    )


def _our_step(model: LanguageModel) -> Step:
    state, settings = TrainState.fresh(model), TrainSettings()
    rate = torch.tensor(settings.learning_rate)

    def step(inputs_BT: Tensor, targets_BT: Tensor) -> None:
        train_step(state, Batch(inputs_BT, targets_BT), rate, settings, "float32")

    return step


def _peer_step(peer: PlainGPT | NanoGPT) -> Step:
    settings = TrainSettings()
    optimizer = torch.optim.AdamW(
        peer.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def step(inputs_BT: Tensor, targets_BT: Tensor) -> None:
        peer.loss(inputs_BT, targets_BT).backward()
        nn.utils.clip_grad_norm_(peer.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
