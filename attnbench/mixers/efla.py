"""EFLA: DeltaNet with the exact solution of the differential equation behind the delta rule."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.mixers.base import State
from attnbench.mixers.deltanet import DeltaNet
from attnbench.ops.delta.delta_rule import unit_length
from attnbench.settings.options import option


class EFLA(DeltaNet):
    """Error-free linear attention (Lei, Zhang and Poria, 2025; arXiv 2512.12602), per head, with S_0 = 0:

        S_t = (I - b'_t k_t k_t^T) S_{t-1} + b'_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(K),
        b'_t = (1 - exp(-b_t k_t.k_t)) / k_t.k_t

    This solves dS/dt = -k k^T S + k v^T over a time of b_t, where the delta rule takes an Euler step; keys need no
    norm. q, k and v come through a short convolution and SiLU, b_t = sigmoid(beta(x_t)).

    The options are the paper's.
    """

    qk_norm: bool = option(False, "query and key of length 1; beta' is then 1 - exp(-beta)")
    negative_eigenvalues: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    needs_qk_norm = False
    undone_by: ClassVar[dict[str, str]] = {
        "qk_norm": "with keys of unit length its exact step is a delta rule's, of strength 1 - exp(-b)"
    }

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        (query, key, value, log_decay, beta), gate_BTD = super().inputs(x_BTD, state, angles)
        return (query, key, value, log_decay, exact_strength(beta, key)), gate_BTD

    def packed_inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[Any, ...]:
        packed_BTC, log_decay, beta = super().packed_inputs(x_BTD, state, angles)
        (key,) = packed_BTC.split(self.widths(), dim=-1)[1:2]
        key = key.unflatten(-1, (self.heads, self.key_width))
        return packed_BTC, log_decay, exact_strength(beta, unit_length(key) if self.qk_norm else key)


def exact_strength(beta_BTH: Tensor, key_BTHK: Tensor) -> Tensor:
    """Return b', in the dtype of b; b itself for a key of 0."""
    square_BTH = key_BTHK.to(beta_BTH.dtype).square().sum(-1)
    time_BTH = beta_BTH * square_BTH
    # Near 0 a series, as the quotient's gradient loses digits. The branch not taken must be finite: its NaN would reach
    # the gradient.
    is_small = time_BTH < 1e-4
    share_BTH = -torch.expm1(-time_BTH) / time_BTH.where(~is_small, 1.0)
    return beta_BTH * torch.where(is_small, 1 - time_BTH / 2, share_BTH)
