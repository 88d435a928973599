"""Kimi Delta Attention: key channels decay each at its own pace, and each key overwrites its former value."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnbench.mixers.around import by_heads
from attnbench.mixers.decay import DECAY_INIT, DecayInit, init_decay, softplus_decay
from attnbench.mixers.layers import LowRank, Projection
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

WIDEST_FLA = 256
"""Largest number of key channels a head in the library's kernels."""


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Delta Attention (Kimi Team, 2025; arXiv 2510.26692), per head, with S_0 = 0:

        S_t = (I - e_t r_t^T) Diag(a_t) S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t / sqrt(K),   e = k,  r = b k,  u = b v

    q, k and v come through a short convolution and SiLU; b_t = sigmoid(beta(x_t)), a number a head; log a_t =
    -exp(log_decay_rate) softplus(decay(x_t) + decay_bias), a rate a head and decay of low rank, at least
    -MAX_FORGETTING.

    The paper has K = V = 128, biases in its maps of low rank, and an eps of 1e-5 in the norm; `decay_init=paper` is as
    in flash-linear-attention 0.6.
    """

    operator, decays = DIAGONAL_DECAY, True
    activation, unit_keys, needs_qk_norm = True, True, True
    conv_size, output_norm, output_gate = 4, True, "sigmoid"
    qk_norm: bool = option(True, "query and key of length 1; without it the recurrence can grow")
    gate_rank: int | None = option(None, "rank of the map to the gate; null: value channels a head")
    decay_rank: int | None = option(None, "rank of the map to the decay; null: value channels a head")
    negative_eigenvalues: bool = option(False, "beta in 0..2 instead of 0..1 (arXiv 2411.12537)")
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} channels | paper: drawn as in Mamba-2")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})

    def rank_of_gate(self) -> int:
        return self.value_width if self.gate_rank is None else self.gate_rank

    def add_parts(self) -> None:
        self.max_erasure = 2 if self.negative_eigenvalues else 1
        rank = self.value_width if self.decay_rank is None else self.decay_rank
        self.decay = LowRank(self.dim, rank, self.heads * self.key_width, setting="decay_rank")
        self.log_decay_rate = nn.Parameter(torch.empty(self.heads, 1))
        self.decay_bias = nn.Parameter(torch.empty(self.heads, self.key_width))
        self.add_strengths()

    @classmethod
    def choose_backend(cls, options: dict[str, Any], *, device_type: str, precision: str) -> str:
        backend = super().choose_backend(options, device_type=device_type, precision=precision)
        width = options.get("head_width")
        if backend == "fla" and width is not None and width > WIDEST_FLA:
            raise UserError(
                f"attn.backend=fla: kernels take heads of up to {WIDEST_FLA} key channels, not head_width={width}; "
                "choose attn.backend=torch"
            )
        return backend

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        init_decay(self.log_decay_rate, self.decay_bias, self.decay_init, generator)

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        (hidden_BTHK,) = by_heads((self.decay(x_BTD).to(accumulation_dtype(x_BTD.dtype)),), self.key_width)
        log_decay_BTHK = self.in_pairs(softplus_decay(hidden_BTHK, self.log_decay_rate, self.decay_bias))
        return log_decay_BTHK, *self.strengths(x_BTD)

    def add_strengths(self) -> None:
        self.beta = Projection(self.dim, self.heads)

    def strengths(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return strengths of erasing and writing, a number a head or one for every channel."""
        beta_BTH = self.beta(x_BTD).to(accumulation_dtype(x_BTD.dtype)).sigmoid()
        beta_BTH1 = (self.max_erasure * beta_BTH)[..., None]
        return beta_BTH1, beta_BTH1
