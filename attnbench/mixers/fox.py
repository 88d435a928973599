"""Forgetting Transformer: softmax attention whose scores lose what forget gates have let go between two positions."""

from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate
from attnbench.mixers.decay import DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.layers import Projection
from attnbench.mixers.softmax import Softmax
from attnbench.ops.attention.forgetting_attention import forgetting_attention, forgetting_prefill, forgetting_step
from attnbench.ops.attention.softmax_attention import attention_flops, definition
from attnbench.ops.attention.window_attention import AUTO_RULE, choose_beside_torch
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.check import check_value


class ForgettingState(NamedTuple):
    """Softmax's cache, and what each of its positions has been forgotten by."""

    key_BSHK: Tensor
    value_BSHK: Tensor
    position: Tensor
    history_BWC: Tensor
    bias_BSH: Tensor
    """Sum of log f over the positions after each that is filled, float32; H counts query heads."""


class Fox(Softmax):
    """Forgetting Transformer (Lin, Nikishin, He and Courville, 2025; arXiv 2503.02130), per head:

        y_t = sum_(s <= t) w_ts v_s,   w_ts proportional to exp(q_t . k_s / sqrt(K) + log f_(s+1) + ... + log f_t)

    with a gate f_t = sigmoid(forget(x_t) + forget_bias) a query head: the decay a_t of a linear recurrence, put into
    the scores. It tells positions apart, so there are no rotary positions, as in the paper.

    The yaml is the paper's FoX (Pro): norms of query, key and output, a sigmoid gate. Ours differs in that keys and
    values are mixed with those of the position before by no shift of their own (conv_size does what that did), in the
    output norm over each head instead of over all, and in `decay_init`.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        num_key_value_heads, rotary_theta, conv_size, qk_norm, output_norm, output_gate: as in Softmax.
        backend: changes the speed, not the result beyond rounding. `torch` writes the weights out. `triton` is Flash's
            kernel of that name, which adds the gates to the scores itself; it also decodes with a kernel.
        decay_init: forget_bias at the start. spread: -log f of 0.001 to 0.4, evenly by ratio over the heads, the
            slowest first: half-lives of 693 down to 1.7 positions, of 693 with one head. paper: 0, f = 0.5 in each.
    """

    backends: ClassVar[tuple[str, ...]] = ("torch", "triton")
    auto_rule: ClassVar[str] = AUTO_RULE
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"forget_bias"})
    has_order: ClassVar[bool] = True
    fills_width: ClassVar[bool] = False

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        num_key_value_heads: int | None = None,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: Gate = "sigmoid",
        decay_init: DecayInit = "spread",
    ) -> None:
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.forget = Projection(dim, self.num_heads)
        self.forget_bias = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what Mixer does, what the kernel of that name cannot do."""
        super().choose_backend(options, device_type=device_type, precision=precision)
        return choose_beside_torch(
            options.get("backend", "auto"),
            window=None,
            head_width=options.get("head_width"),
            device_type=device_type,
            precision=precision,
        )

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the bias as `decay_init` has it."""
        # -log sigmoid(b) is softplus(-b).
        spread_H = -inverse_softplus(spread_steps(self.num_heads))
        with torch.no_grad():
            self.forget_bias.copy_(spread_H if self.decay_init == "spread" else torch.zeros_like(spread_H))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log f_t of every query head, (B, T, H), in float32 at least."""
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
        shape = (batch_size, max_length, self.num_heads)
        bias_BSH = torch.zeros(shape, dtype=accumulation_dtype(dtype), device=cache.position.device)
        return ForgettingState(**cache._asdict(), bias_BSH=bias_BSH)

    def mixing_flops(self, length: int) -> int:
        return attention_flops(length, self.num_heads, self.head_width)
