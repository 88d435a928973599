"""HGRN2: every key channel forgets at its own pace, and the key is one minus its decay."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.base import State
from attnbench.mixers.decay import DECAY_INIT, DecayInit, spread_steps
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY
from attnbench.ops.layers.rotary import rotate_both
from attnbench.settings.options import option

SHARE_OF_BOUND = 0.9
"""Largest initial -log a_t, as a share of the lower bound's."""


class HGRN2(RecurrentMixer):
    """HGRN2 (Qin et al., 2024; arXiv 2404.07904), per head, with S_0 = 0:

        S_t = Diag(a_t) S_{t-1} + k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),   k_t = 1 - a_t

    a_t = c + (1 - c) sigmoid(f(x_t) + decay_bias) with c = layer / num_layers: later layers remember longer. q =
    silu(projection), v straight from the projection.

    The paper has K = V = 128, learns the bound from this start, and norms all heads together.
    """

    layer: int
    num_layers: int
    operator = DIAGONAL_DECAY
    conv_size: int = option(0, "taps of a short convolution over what query, decay and value are made of; 0: none")
    output_norm = True
    decay_init: DecayInit = option(
        "spread", f"{DECAY_INIT} channels, or to 1.1 times what the layer's bound allows | paper: 1 in the first layer"
    )

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})
    undone_by: ClassVar[dict[str, str]] = {"qk_norm": "a key that is normed is no longer 1 - a"}

    def add_parts(self) -> None:
        self.bound = self.layer / self.num_layers
        self.move_last("query_norm", "key_norm")
        self.decay_bias = nn.Parameter(torch.empty(self.heads, self.key_width))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        self.decay_bias.zero_()
        if self.decay_init == "spread":
            largest = min(0.4, SHARE_OF_BOUND * -math.log(self.bound)) if self.bound else 0.4
            # k = (1 - c) sigmoid(-bias) = 1 - exp(-step).
            key_HK = -torch.expm1(-spread_steps(self.decay_bias.numel(), largest)).view_as(self.decay_bias)
            self.decay_bias.copy_(-(key_HK / (1 - self.bound)).logit())

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return self._key_and_log_decay(self.split_heads(x_BTD, None)[1])[1]

    def _key_and_log_decay(self, forget_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - a and log a, in float32 at least."""
        hidden_BTHK = forget_BTHK.to(accumulation_dtype(forget_BTHK.dtype)) + self.decay_bias
        key_BTHK = (1 - self.bound) * torch.sigmoid(-hidden_BTHK)
        # Without a bound 1 - a may round to 1.
        log_decay_BTHK = torch.log1p(-key_BTHK) if self.bound else F.logsigmoid(hidden_BTHK)
        return key_BTHK, self.in_pairs(log_decay_BTHK)

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        query, forget, value = self.split_heads(x_BTD, None if state is None else state.history_BWC)
        key, log_decay_BTHK = self._key_and_log_decay(forget)
        query, key = self.query_norm(F.silu(query)), self.key_norm(key.to(value.dtype))
        query, key = rotate_both(query, key, angles)
        return (query * self.scale, key, value, log_decay_BTHK), x_BTD
