"""HGRN2: every key channel forgets at a pace of its own, and writes what it makes room for."""

import math
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate, head_norm
from attnbench.mixers.decay import DecayInit, spread_steps
from attnbench.mixers.diagonal import DiagonalMixer, DiagonalState
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import DiagonalInputs, diagonal_decay_flops
from attnbench.ops.layers.rotary import rotate_both
from attnbench.settings.check import check_value

SHARE_OF_BOUND = 0.9
"""Largest initial -log a_t, as a share of what the lower bound allows."""


class HGRN2(DiagonalMixer):
    """HGRN2 (Qin et al., 2024; arXiv 2404.07904), per head, with S_0 = 0:

        S_t = Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K),   e = 0,   k_t = 1 - a_t

    a_t = c + (1 - c) sigmoid(f(x_t) + decay_bias) with c = layer / num_layers, so that later layers remember longer;
    q = silu(projection), u = v straight from the projection.

    Its defaults: K = V = 128, no convolution, no positions, RMS norm, no gate. Ours differs in a bound that is a
    constant, where its bounds are the running sums of a softmax over learned numbers, which begin there; in a norm of
    each head instead of all of them together; in a query that is scaled, which that norm makes no matter; and in
    `decay_init`.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        layer, num_layers: for c; from the model.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla; auto: triton on CUDA where its kernels fit, otherwise torch.
        rotary_theta: base of the wavelengths of rotary positions on query and key, see DiagonalMixer; null for none.
        conv_size: taps of a short convolution over what query, decay and value are made of; 0 for none.
        qk_norm: RMS norm of query and key over the head width, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_init: initial decay_bias. spread: half-lives of 693 down to 1.7 positions, or to 1.1 times what the bound
            allows, evenly by ratio over all channels, the slowest first. paper: 0, half-lives of 1 position in the
            first layer.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})
    undone_by: ClassVar[dict[str, str]] = {"qk_norm": "a key that is normed is no longer 1 - a"}

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        layer: int,
        num_layers: int,
        num_heads: int | None = None,
        value_expansion: float = 1,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 0,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "none",
        decay_init: DecayInit = "spread",
    ) -> None:
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
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init, self.bound = decay_init, layer / num_layers
        self.query_norm, self.key_norm = head_norm(head_width, qk_norm), head_norm(head_width, qk_norm)
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads, head_width))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the biases as `decay_init` has it."""
        with torch.no_grad():
            self.decay_bias.zero_()
            if self.decay_init == "spread":
                largest = min(0.4, SHARE_OF_BOUND * -math.log(self.bound)) if self.bound else 0.4
                # k = (1 - c) sigmoid(-bias) = 1 - exp(-step).
                key_HK = -torch.expm1(-spread_steps(self.decay_bias.numel(), largest)).view_as(self.decay_bias)
                self.decay_bias.copy_(-(key_HK / (1 - self.bound)).logit())

    def mixing_flops(self, length: int) -> int:
        return diagonal_decay_flops(length, self.num_heads, self.head_width, self.value_width, 2)

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        return self._key_and_log_decay(self._heads(x_BTD, None)[1])[1]

    def _key_and_log_decay(self, forget_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - a and log a, in float32 at least."""
        hidden_BTHK = forget_BTHK.to(accumulation_dtype(forget_BTHK.dtype)) + self.decay_bias
        key_BTHK = (1 - self.bound) * torch.sigmoid(-hidden_BTHK)
        # Without a bound 1 - a may round to 1.
        log_decay_BTHK = torch.log1p(-key_BTHK) if self.bound else F.logsigmoid(hidden_BTHK)
        return key_BTHK, self._in_pairs(log_decay_BTHK)

    def _inputs(
        self, x_BTD: Tensor, state: DiagonalState | None, angles: Tensor | None
    ) -> tuple[DiagonalInputs, Tensor]:
        query, forget, value = self._heads(x_BTD, state)
        key, log_decay_BTHK = self._key_and_log_decay(forget)
        query, key = self.query_norm(F.silu(query)), self.key_norm(key.to(value.dtype))
        query, key = rotate_both(query, key, angles)
        return DiagonalInputs(query * self.head_width**-0.5, key, value, log_decay_BTHK), x_BTD
