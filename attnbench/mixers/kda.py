"""Kimi Delta Attention: a memory whose key channels decay each at its own pace, and in which each key overwrites."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from attnbench.mixers.around import Gate, by_heads
from attnbench.mixers.decay import DecayInit, init_decay, softplus_decay
from attnbench.mixers.diagonal import DiagonalMixer, DiagonalState
from attnbench.mixers.layers import LowRank, Projection
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.delta.delta_rule import unit_length
from attnbench.ops.diagonal.diagonal_decay import DiagonalInputs, diagonal_decay_flops
from attnbench.ops.layers.rotary import rotate_both
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError

WIDEST_FLA = 256
"""Key channels a head that the library's kernels take at most."""


class KimiDeltaAttention(DiagonalMixer):
    """Kimi Delta Attention (Kimi Team, 2025; arXiv 2510.26692), per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K),   e = k,  r = b k,  u = b v

    q, k and v come through a short convolution and SiLU; b_t = sigmoid(beta(x_t)), a number a head; log a_t =
    -exp(log_decay_rate) softplus(decay(x_t) + decay_bias), a rate a head and decay of low rank, not below
    -MAX_FORGETTING. With decays that are alike in a head's channels it is Gated DeltaNet.

    Its defaults: K = V = 128, convolution over 4, no positions, RMS norm, a sigmoid gate of low rank, both ranks V.
    Ours differs in maps of low rank without biases but the decay's, an eps of 1e-6 in the norm, theirs 1e-5, and
    `decay_init`, whose `paper` is as flash-linear-attention 0.6 has it.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla, which takes heads of up to 256 key channels; auto: triton on
            CUDA where its kernels fit, otherwise torch.
        rotary_theta: base of the wavelengths of rotary positions on query and key, see DiagonalMixer; null for none.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        gate_rank, decay_rank: ranks of the maps to the output gate and to the decay; null for V.
        negative_eigenvalues: b_t in 0..2 instead of 0..1, so that the state can also be reflected (arXiv 2411.12537).
        decay_init: initial values of exp(log_decay_rate), the rate, and softplus(decay_bias), the time step, whose
            product is the decay -log a_t. spread: rates of 1 and steps of 0.001 to 0.4, evenly by ratio over all
            channels, the slowest first: half-lives of 693 down to 1.7 positions. paper: rates drawn evenly from 1..16
            and steps, by their logarithms, from 0.001..0.1.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})
    needs_qk_norm: ClassVar[bool] = True

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 4,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: Gate = "sigmoid",
        gate_rank: int | None = None,
        decay_rank: int | None = None,
        negative_eigenvalues: bool = False,
        decay_init: DecayInit = "spread",
    ) -> None:
        value_width = max(1, round(head_width * value_expansion))
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            value_expansion=value_expansion,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            output_norm=output_norm,
            output_gate=output_gate,
            gate_rank=value_width if gate_rank is None else gate_rank,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.qk_norm, self.max_erasure = qk_norm, 2 if negative_eigenvalues else 1
        rank = value_width if decay_rank is None else decay_rank
        self.decay = LowRank(dim, rank, self.num_heads * head_width, setting="decay_rank")
        self.log_decay_rate = nn.Parameter(torch.empty(self.num_heads, 1))
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads, head_width))
        self._add_strengths(dim)

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        """Refuse, beyond what DiagonalMixer does, heads that the library's kernels are too narrow for."""
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        width = options.get("head_width")
        if backend == "fla" and width is not None and width > WIDEST_FLA:
            raise UserError(
                f"attn.backend=fla: kernels take heads of up to {WIDEST_FLA} key channels, not head_width={width}; "
                "choose attn.backend=torch"
            )
        return backend

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set rates and time steps as `decay_init` has it."""
        init_decay(self.log_decay_rate, self.decay_bias, self.decay_init, generator)

    def mixing_flops(self, length: int) -> int:
        return diagonal_decay_flops(length, self.num_heads, self.head_width, self.value_width, 3)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        (hidden_BTHK,) = by_heads((self.decay(x_BTD).to(accumulation_dtype(x_BTD.dtype)),), self.head_width)
        return self._in_pairs(softplus_decay(hidden_BTHK, self.log_decay_rate, self.decay_bias))

    def _add_strengths(self, dim: int) -> None:
        """Create the maps to what `_strengths` returns."""
        self.beta = Projection(dim, self.num_heads)

    def _strengths(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return how strongly each position erases and writes, in float32 at least: a number a head, the same tensor
        twice, or one for every channel."""
        beta_BTH = self.beta(x_BTD).to(accumulation_dtype(x_BTD.dtype)).sigmoid()
        beta_BTH1 = (self.max_erasure * beta_BTH)[..., None]
        return beta_BTH1, beta_BTH1

    def _inputs(
        self, x_BTD: Tensor, state: DiagonalState | None, angles: Tensor | None
    ) -> tuple[DiagonalInputs, Tensor]:
        query, key, value = self._heads(x_BTD, state)
        query, key = rotate_both(query, key, angles)
        scale = self.head_width**-0.5
        query = unit_length(query, scale) if self.qk_norm else query * scale
        key = unit_length(key) if self.qk_norm else key
        return DiagonalInputs(query, key, value, self.log_decay(x_BTD), *self._strengths(x_BTD)), x_BTD
