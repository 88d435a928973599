"""Forgetting Transformer: softmax attention with forget gates added to its scores."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.layers import Projection
from attnbench.mixers.softmax import Softmax
from attnbench.ops.attention.forgetting_attention import forgetting_attention, forgetting_prefill, forgetting_step
from attnbench.ops.attention.softmax_attention import definition
from attnbench.ops.attention.window_attention import AUTO_RULE, choose_beside_torch
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.options import option


class ForgettingState(NamedTuple):
    key_BSHK: Tensor
    value_BSHK: Tensor
    position: Tensor
    history_BWC: Tensor
    bias_BSH: Tensor
    """Sum of log f over the positions after each that is filled, float32; H counts query heads."""


class Fox(Softmax):
    """Forgetting Transformer (Lin, Nikishin, He and Courville, 2025; arXiv 2503.02130), per head:

        y_t = sum_(s <= t) w_ts v_s,   w_ts proportional to exp(q_t . k_s / sqrt(K) + log f_(s+1) + ... + log f_t)

    with a gate f_t = sigmoid(forget(x_t) + forget_bias) a query head. It tells positions apart, so there are no rotary
    positions, as in the paper.

    The options are the paper's FoX (Pro). Ours differs in the paper's shift of keys and values, in place of which
    stands conv_size, and in an output norm of each head instead of all together.

    `backend` changes the speed, not the result beyond rounding. `torch` writes the weights out. `triton` is Flash's
    kernel, which adds the gates to the scores; it also decodes.
    """

    rotary_theta, qk_norm, output_norm, output_gate = None, True, True, "sigmoid"
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: 1 position in each")

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton")
    auto_rule, choose = AUTO_RULE, staticmethod(choose_beside_torch)
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"forget_bias"})
    has_order = True
    fills_width = False

    def add_parts(self) -> None:
        self.forget = Projection(self.dim, self.heads)
        self.forget_bias = nn.Parameter(torch.empty(self.heads))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        # -log sigmoid(b) is softplus(-b).
        spread_H = -inverse_softplus(spread_steps(self.heads))
        with torch.no_grad():
            self.forget_bias.copy_(spread_H if self.decay_init == "spread" else torch.zeros_like(spread_H))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        dtype = accumulation_dtype(x_BTD.dtype)
        return F.logsigmoid(self.forget(x_BTD).to(dtype) + self.forget_bias)

    def forward(self, x_BTD: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        log_forget_BTH = self.log_decay(x_BTD)
        if state is None:
            mixed_BTHK = forgetting_attention(*self.project(x_BTD, 0, None), log_forget_BTH, self.backend)
            return self.finish(mixed_BTHK, x_BTD), None
        query_BTHK, end = self.prefill(x_BTD, state)
        cache = (state.key_BSHK[:, :end], state.value_BSHK[:, :end])
        bias_BSH = state.bias_BSH[:, :end]
        mixed_BTHK = forgetting_prefill(query_BTHK, *cache, log_forget_BTH, bias_BSH, self.backend)
        return self.finish(mixed_BTHK.to(x_BTD.dtype), x_BTD), state

    def mix_newest(self, query_BTHK: Tensor, state: Any, x_BTD: Tensor) -> Tensor:
        cache = (state.key_BSHK, state.value_BSHK)
        gates = (self.log_decay(x_BTD), state.bias_BSH)
        return forgetting_step(query_BTHK, *cache, *gates, state.position, self.backend)

    def reference(self, x_BTD: Tensor) -> Tensor:
        inputs = self.project(x_BTD, 0, None)
        return self.finish(definition(*inputs, None, self.log_decay(x_BTD)), x_BTD)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> Any:
        cache = super().init_state(batch_size, max_length, dtype)
        shape = (batch_size, max_length, self.heads)
        bias_BSH = torch.zeros(shape, dtype=accumulation_dtype(dtype), device=cache.position.device)
        return ForgettingState(**cache._asdict(), bias_BSH=bias_BSH)
