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

from attnbench.checkpoint import TrainState
from attnbench.model import build_model, resolve_mixer
from attnbench.runtime import computing, synchronize
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


class Comparison(NamedTuple):
    """Seconds a training step, one entry a round, and the parameters that took them."""

    ours_seconds: Tensor
    plain_seconds: Tensor
    ours_parameters: int
    plain_parameters: int

    def speed_quantiles(self) -> list[float]:
        """Our tokens a second over the peer's, of neighbouring steps: 20th percentile, median, 80th percentile."""
        return (self.plain_seconds / self.ours_seconds).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()


def compare_training_steps(
    mixer: MixerSettings,
    model: ModelSettings,
    *,
    vocabulary_size: int,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    precision: str,
    compile: bool = False,
    num_rounds: int = 30,
    num_warmup: int = 5,
) -> Comparison:
    """Times whole training steps (forward, backward, clip, update) of ours and of the plain GPT.

    The two take turns in one process, the order turning too, so that whatever else the machine does hits both.
    """
    ours, num_ours = _our_step(mixer, model, vocabulary_size, device, precision, compile)
    plain, num_plain = _plain_step(model, vocabulary_size, seq_len, device, precision, compile)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocabulary_size, (batch_size, seq_len + 1), generator=generator).to(device)
    inputs_BT, targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    steps = {"ours": ours, "plain": plain}
    for turn in range(num_warmup + num_rounds):
        for name in sorted(steps, reverse=turn % 2 == 1):
            synchronize(device)
            start = time.perf_counter()
            steps[name](inputs_BT, targets_BT)
            synchronize(device)
            if turn >= num_warmup:
                seconds[name].append(time.perf_counter() - start)
    return Comparison(
        torch.tensor(seconds["ours"]).double(), torch.tensor(seconds["plain"]).double(), num_ours, num_plain
    )


Step = Callable[[Tensor, Tensor], None]


def _our_step(
    mixer: MixerSettings,
    model: ModelSettings,
    vocabulary_size: int,
    device: torch.device,
    precision: str,
    compile: bool,
) -> tuple[Step, int]:
    mixer = resolve_mixer(mixer, model, device_type=device.type, precision=precision)
    built = build_model([mixer] * model.num_layers, model, vocabulary_size=vocabulary_size, seed=0, device=device)
    if compile:
        built.compile()
    state, settings = TrainState.fresh(built), TrainSettings()
    rate = torch.tensor(settings.learning_rate, device=device)

    def step(inputs_BT: Tensor, targets_BT: Tensor) -> None:
        train_step(state, Batch(inputs_BT, targets_BT), rate, settings, precision)

    return step, built.num_parameters()


def _plain_step(
    model: ModelSettings, vocabulary_size: int, seq_len: int, device: torch.device, precision: str, compile: bool
) -> tuple[Step, int]:
    built, settings = PlainGPT(model, vocabulary_size, seq_len).to(device), TrainSettings()
    if compile:
        built.compile()
    optimizer = torch.optim.AdamW(
        built.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def step(inputs_BT: Tensor, targets_BT: Tensor) -> None:
        with computing(precision, device):
            logits_BTC = built(inputs_BT)
            loss = F.cross_entropy(logits_BTC.flatten(0, 1).float(), targets_BT.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(built.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(parameter.numel() for parameter in built.parameters())
