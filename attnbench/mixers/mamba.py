"""Mamba: a state space for every channel, whose step sizes and directions the input chooses."""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import GatedOutput
from attnbench.mixers.decay import inverse_softplus
from attnbench.mixers.layers import Projection, ShortConvolution
from attnbench.mixers.options import MixerOptions
from attnbench.ops.common.precision import accumulation_dtype, at_least_float32, without_autocast
from attnbench.ops.common.recurrence import by_position, outer, read
from attnbench.ops.common.scan import affine_scan
from attnbench.settings.options import option

TAPS = 4

CHUNK = 16
"""Positions of a chunk. All chunks take a position at once, so that a scan has CHUNK + T / CHUNK steps, not T."""


class MambaState(NamedTuple):
    memory_BKC: Tensor
    history_BWC: Tensor


class Mamba(MixerOptions):
    """Mamba (Gu and Dao, 2023; arXiv 2312.00752), for each of C = expansion model.dim channels, with S_0 = 0:

        S_t = exp(-exp(log_rate) d_t) S_{t-1} + d_t x_t k_t,   y_t = q_t . S_t + skip x_t

    S_t, k_t and q_t have state_width numbers; all channels share k and q, the paper's B and C. x comes through a
    convolution of TAPS taps with a bias, and SiLU. d_t = softplus(step(x_t) + step_bias), by a map of rank
    ceil(model.dim / 16). The output is y_t silu(gate), projected.

    Rates, time steps, their map, skip and convolution begin as published, projections as this bench does. The paper has
    no feed-forward in its block (here model.feed_forward_width=0 and more layers). It has none of the parts around
    other mixers. A training keeps about five tensors of (B, T, state_width, C) in float32; its speed says nothing about
    Mamba's kernel.
    """

    dim: int
    head_width: int
    state_width: int = option(16, "numbers that each channel keeps", minimum=1)
    expansion: int = option(2, "channels, as a multiple of model.dim", minimum=1)
    backend: str = option("auto", "")

    auto_rule = "there is no other"
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"convolution_bias", "step_bias", "log_rate", "skip"})
    has_order = True
    state_memory = ("memory_BKC",)

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        return [{"state_width": width} for width in range(1, dim + 1)]

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.check_options()
        self.backend = self.known_backend(self.backend)
        self.width, self.rank = self.expansion * self.dim, math.ceil(self.dim / 16)
        self.projection, self.convolution = Projection(self.dim, self.width), ShortConvolution(self.width, TAPS)
        self.signals = Projection(self.width, self.rank + 2 * self.state_width)
        self.step_weight = nn.Parameter(torch.empty(self.width, self.rank))
        self.log_rate = nn.Parameter(torch.empty(self.state_width, self.width))
        self.convolution_bias, self.step_bias, self.skip = (nn.Parameter(torch.empty(self.width)) for _ in range(3))
        self.output = GatedOutput(self.dim, self.width, gate="silu")

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Published: rates of 1 to state_width in each channel, log-uniform steps of 0.001 to 0.1."""
        for parameter, bound in ((self.step_weight, self.rank**-0.5), (self.convolution_bias, TAPS**-0.5)):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        self.step_bias.copy_(inverse_softplus(0.001 * 100 ** torch.rand(self.width, generator=generator)))
        self.log_rate.copy_(torch.arange(1, self.state_width + 1.0).log()[:, None].expand_as(self.log_rate))
        nn.init.ones_(self.skip)

    def inputs(self, x_BTD: Tensor, history_BWC: Tensor | None) -> tuple[Tensor, ...]:
        """Return time steps, x, k and q, (B, T, ...) each, and -exp(log_rate), all in float32 at least."""
        x_BTC = F.silu(self.convolution(self.projection(x_BTD), history_BWC) + self.convolution_bias)
        hidden = at_least_float32(self.signals(x_BTC))
        hidden_BTR, key_BTK, query_BTK = hidden.split([self.rank, self.state_width, self.state_width], dim=-1)
        weights = self.step_weight, self.step_bias, self.log_rate
        step_weight, step_bias, log_rate_KC = (at_least_float32(weight) for weight in weights)
        with without_autocast(x_BTD.device.type):
            step_BTC = F.softplus(F.linear(hidden_BTR, step_weight, step_bias))
        return step_BTC, at_least_float32(x_BTC), key_BTK, query_BTK, -log_rate_KC.exp()

    def forward(self, x_BTD: Tensor, state: MambaState | None = None) -> tuple[Tensor, MambaState | None]:
        *inputs, rate_KC = self.inputs(x_BTD, None if state is None else state.history_BWC)
        memory_BKC = self.new_memory(len(x_BTD), x_BTD.dtype) if state is None else state.memory_BKC
        with without_autocast(x_BTD.device.type):
            mixed_BTC, last_BKC = selective_scan(memory_BKC, rate_KC, *inputs)
        if state is not None:
            state.memory_BKC.copy_(last_BKC)
        return self.finish(mixed_BTC, inputs[1], x_BTD), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        *inputs, rate_KC = self.inputs(x_BTD, None)

        def step(memory_BKC: Tensor, step_BC: Tensor, x_BC: Tensor, key_BK: Tensor, query_BK: Tensor) -> tuple:
            kept_BKC = (step_BC[:, None] * rate_KC).exp() * memory_BKC
            memory_BKC = kept_BKC + outer(key_BK, step_BC * x_BC)
            return memory_BKC, read(memory_BKC, query_BK)

        mixed_BTC, _ = by_position(step, self.new_memory(len(x_BTD), x_BTD.dtype), *inputs)
        return self.finish(mixed_BTC, inputs[1], x_BTD)

    def finish(self, mixed_BTC: Tensor, x_BTC: Tensor, x_BTD: Tensor) -> Tensor:
        return self.output((mixed_BTC + x_BTC * self.skip).to(x_BTD.dtype), x_BTD)

    def new_memory(self, batch_size: int, dtype: torch.dtype) -> Tensor:
        like = {"dtype": accumulation_dtype(dtype), "device": self.skip.device}
        return torch.zeros(batch_size, self.state_width, self.width, **like)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> MambaState:
        history_BWC = torch.zeros(batch_size, TAPS - 1, self.width, dtype=dtype, device=self.skip.device)
        return MambaState(memory_BKC=self.new_memory(batch_size, dtype), history_BWC=history_BWC)

    def mixing_flops(self, length: int) -> int:
        """Count 6 for each number of the state, of which the model counts 2 with the matrix of rates, and 5 a channel:
        biases of the convolution and the step, the step times x, and the skip."""
        return length * self.width * (4 * self.state_width + 5)


def selective_scan(
    memory_BKC: Tensor, rate_KC: Tensor, step_BTC: Tensor, x_BTC: Tensor, key_BTK: Tensor, query_BTK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y of all positions, (B, T, C), and the last memory.

    All chunks run side by side from an empty memory. Then the last memories are carried from chunk to chunk, and each
    position gets its chunk's first memory, decayed up to there.
    """
    length = step_BTC.shape[1]
    size = min(CHUNK, length)
    # (size, N, B, channels). Padding has steps of 0, which keep the memory and add nothing.
    step, x, key, query = (
        F.pad(part, (0, 0, 0, -length % size)).unflatten(1, (-1, size)).transpose(0, 2).contiguous()
        for part in (step_BTC, x_BTC, key_BTK, query_BTK)
    )
    decays = (step[..., None, :] * rate_KC).exp().unbind()
    additions = (key[..., None] * (step * x)[..., None, :]).unbind()
    # A copy, as a part of `additions` would keep all of it for the gradient.
    within = [additions[0].clone()]
    for decay_NBKC, addition_NBKC in zip(decays[1:], additions[1:], strict=True):
        within.append(addition_NBKC + decay_NBKC * within[-1])
    kept = (step.cumsum(0)[..., None, :] * rate_KC).exp()
    states_NBKC = _carry(kept[-1], within[-1], memory_BKC)
    mixed = read(torch.stack(within) + kept * states_NBKC[:-1], query)
    return mixed.transpose(0, 2).flatten(1, 2)[:, :length], states_NBKC[-1]


def _carry(decay_NBKC: Tensor, addition_NBKC: Tensor, memory_BKC: Tensor) -> Tensor:
    """Return the memories before every chunk and after the last, (N + 1, B, K, C)."""
    decay_NBX, addition_NBX = decay_NBKC.flatten(2), addition_NBKC.flatten(2)
    # Additions depend on no memory, so the scan has chunks without positions.
    no_key, no_write = (
        addition_NBX.new_zeros(*addition_NBX.shape[:2], 0, width) for width in (addition_NBX.shape[2], 1)
    )
    initial_BX1 = memory_BKC.flatten(1)[..., None].to(decay_NBX.dtype)
    states, _ = affine_scan(decay_NBX, no_key, no_key, no_write, addition_NBX[..., None], initial_BX1)
    return states[..., 0].unflatten(2, memory_BKC.shape[1:])
