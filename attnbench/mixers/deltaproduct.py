"""DeltaProduct: several steps of the delta rule a position."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbench.mixers.base import State
from attnbench.mixers.deltanet import DeltaNet
from attnbench.mixers.gated_deltanet import GatedDeltaNet
from attnbench.settings.options import option


class DeltaProduct(GatedDeltaNet):
    """DeltaProduct (Siems et al., 2025; arXiv 2502.10297), per head, with S_0 = 0 and n sub-steps a position:

        S_t,0 = a_t S_{t-1,n},   S_t,j = (I - b_t,j k_t,j k_t,j^T) S_t,{j-1} + b_t,j k_t,j v_t,j^T,
        y_t = S_t,n^T q_t / sqrt(K)

    Each sub-step has its own projections of x_t. q, k and v come through a short convolution and SiLU, b = 2
    sigmoid(beta(x_t)), a_t as in Gated DeltaNet.

    The options are the paper's gated form, but for its initial decays (decay_init=paper).
    """

    num_householders: int = option(
        2, "steps of the delta rule a position, each with its key and value", after="output_gate", minimum=1
    )
    negative_eigenvalues: bool = option(True, "beta in 0..2; false: 0..1", after="num_householders")
    decay: bool = option(
        True, "the state decays before the first of them; false: it does not", after="negative_eigenvalues"
    )

    paper_options: ClassVar[dict[str, Any]] = {}

    @property
    def num_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.options["num_householders"]

    @property
    def decays(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.options["decay"]

    def widths(self) -> tuple[int, int, int]:
        query, key, value = super().widths()
        return query, self.num_steps * key, self.num_steps * value

    def add_parts(self) -> None:
        if self.decays:
            super().add_parts()
        else:
            DeltaNet.add_parts(self)

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        if self.decays:
            super().init_weights(generator, num_branches)

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        log_decay_BTH, beta_BTC = super().signals(x_BTD) if self.decays else DeltaNet.signals(self, x_BTD)
        return log_decay_BTH, self._by_sub_steps(beta_BTC)

    def inputs(self, x_BTD: Tensor, state: State | None, angles: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        (query, key, value, *signals), gate_BTD = super().inputs(x_BTD, state, angles)
        return (query, self._by_sub_steps(key), self._by_sub_steps(value), *signals), gate_BTD

    def _by_sub_steps(self, x_BTC: Tensor) -> Tensor:
        """Lay out (B, T, nH, ...) as the operator takes it, (B, nT, H, ...)."""
        if self.num_steps == 1:
            return x_BTC
        return x_BTC.unflatten(2, (self.num_steps, self.heads)).flatten(1, 2)
