"""EFLA: DeltaNet with the exact solution of the differential equation whose Euler step the delta rule is."""

from typing import ClassVar

import torch
from torch import Tensor

from attnbench.mixers.around import Gate
from attnbench.mixers.delta_rule import DeltaRuleMixer
from attnbench.ops.delta.delta_rule import delta_rule_flops, unit_length


class EFLA(DeltaRuleMixer):
    """Error-free linear attention (Lei, Zhang and Poria, 2025; arXiv 2512.12602), per head, with S_0 = 0:

        S_t = (I - b'_t k_t k_t^T) S_{t-1} + b'_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),
        b'_t = (1 - exp(-b_t k_t.k_t)) / k_t.k_t

    that is a = 1, e = b' k, r = k, u = b' v. It is dS/dt = -k k^T S + k v^T followed for a time of b_t. Of what S holds
    along k, exp(-b_t k.k) is left, never less than 0, so that no key need be normed. q, k and v come through a short
    convolution and SiLU, b_t = sigmoid(beta(x_t)).

    Defaults: as the paper has it, DeltaNet's, with keys of any length. Here the query has any length too, over sqrt(K).

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla, as in Gated DeltaNet, whose kernels these are.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned after convolution
            and SiLU; null for no positions.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length; b' is then 1 - exp(-b).
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
    """

    needs_qk_norm: ClassVar[bool] = False
    undone_by: ClassVar[dict[str, str]] = {
        "qk_norm": "with keys of unit length its exact step is a delta rule's, of strength 1 - exp(-b)"
    }

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
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "none",
    ) -> None:
        super().__init__(
            dim=dim,
            head_width=head_width,
            num_heads=num_heads,
            value_expansion=value_expansion,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )

    def mixing_flops(self, length: int) -> int:
        return delta_rule_flops(length, self.num_heads, self.head_width, self.value_width)

    def _inputs(
        self, x_BTD: Tensor, history_BWC: Tensor | None, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        query, key, value, log_decay, beta = super()._inputs(x_BTD, history_BWC, angles)
        return query, key, value, log_decay, exact_strength(beta, key)

    def _packed(
        self, x_BTD: Tensor, history_BWC: Tensor | None, angles: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed_BTC, log_decay, beta = super()._packed(x_BTD, history_BWC, angles)
        width = self.num_heads * self.head_width
        key = packed_BTC[..., width : 2 * width].unflatten(-1, (self.num_heads, self.head_width))
        return packed_BTC, log_decay, exact_strength(beta, unit_length(key) if self.qk_norm else key)


def exact_strength(beta_BTH: Tensor, key_BTHK: Tensor) -> Tensor:
    """Return b' = (1 - exp(-b k.k)) / k.k, in the dtype of b; b itself for a key of 0."""
    square_BTH = key_BTHK.to(beta_BTH.dtype).square().sum(-1)
    time_BTH = beta_BTH * square_BTH
    # Near 0 by the series, whose next term is time²/6, as the quotient's gradient there loses its digits. The other
    # branch is kept finite, because a NaN that is not taken still reaches the gradient.
    is_small = time_BTH < 1e-4
    share_BTH = -torch.expm1(-time_BTH) / time_BTH.where(~is_small, 1.0)
    return beta_BTH * torch.where(is_small, 1 - time_BTH / 2, share_BTH)
