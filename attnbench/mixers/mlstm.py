"""mLSTM: a matrix memory written by an exponential gate, forgotten by another, and read through a normaliser."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.around import Gate
from attnbench.mixers.base import expanded, expansions, head_count
from attnbench.mixers.decay import DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.decayed import DecayedAttention
from attnbench.mixers.layers import Projection
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.mlstm import Memory, mlstm, mlstm_flops, recurrent_mlstm
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING
from attnbench.settings.check import check_value


class MLSTMState(NamedTuple):
    """Memory of the past, all of it times exp(-maximum); its size does not depend on the length."""

    memory_BHKV: Tensor
    normaliser_BHK: Tensor
    maximum_BH: Tensor
    """Running maximum of the gates' logarithms, see ops/scalar/mlstm.py."""
    history_BWC: Tensor
    position: Tensor
    """Number of positions seen, an int64 scalar; of length zero without rotary positions."""


class MLSTM(DecayedAttention):
    """mLSTM (Beck et al., 2024; arXiv 2405.04517), per head, with S_0 = 0 and n_0 = 0:

        S_t = a_t S_{t-1} + k_t (i_t v_t)^T,   n_t = a_t n_{t-1} + i_t k_t,   y_t = S_t^T q_t / max(|n_t . q_t|, 1)

    a_t = sigmoid(-decay(x_t) - decay_bias), the paper's f, not below exp(-MAX_FORGETTING), and i_t = exp(write(x_t)).
    q, k and v come through a short convolution and SiLU, and q is divided by sqrt(K). All is computed around a running
    maximum of the gates' logarithms.

    The paper's: sigmoid or exponential f, biases of f from 3 to 6 over the heads, a convolution of 4 taps and SiLU
    before query and key, a norm a head, a sigmoid gate of the output. Ours has the sigmoid f, and differs in this: the
    convolution and SiLU come after the projection, and over the value too; the norm is an RMS norm; there is no
    bias of query, key, value and i, which for i would multiply S and n alike and be undone by the norm; no skip around
    the memory; and the block is that of all mixers here, with its feed-forward, instead of one that expands by 2. V =
    2K is xLSTM 7B's (arXiv 2503.13427).

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. triton is this bench's own kernel, for CUDA and a head_width that is a
            multiple of 16 up to 128; auto: triton where it runs, otherwise torch. fla is flash-linear-attention's
            kernel of simple GLA, the normaliser a column of values, for CUDA.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned, in the normaliser
            too, whose absolute value is taken; null for none.
        conv_size: taps of the short convolution over query, key and value; 0 for none, SiLU alone.
        qk_norm: RMS norm of query and key over the head width, with a learned gain.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        decay_init: initial half-lives of f. spread: of 693 down to 1.7 positions, evenly by ratio over the heads, of
            693 with one head. paper: biases of f from 3 to 6, half-lives of 14 to 280.
    """

    is_packed: ClassVar[bool] = False
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

    def __init__(
        self,
        *,
        dim: int,
        head_width: int,
        num_heads: int | None = None,
        value_expansion: float = 2,
        backend: str = "auto",
        rotary_theta: float | None = None,
        conv_size: int = 4,
        qk_norm: bool = False,
        output_norm: bool = True,
        output_gate: Gate = "sigmoid",
        decay_init: DecayInit = "spread",
    ) -> None:
        super().__init__(
            dim,
            head_count(num_heads, dim, head_width),
            head_width,
            expanded(head_width, value_expansion),
            scale=head_width**-0.5,
            backend=backend,
            rotary_theta=rotary_theta,
            conv_size=conv_size,
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
        )
        check_value("attn.decay_init", decay_init, choices=get_args(DecayInit))
        self.decay_init: DecayInit = decay_init
        self.decay, self.write = Projection(dim, self.num_heads), Projection(dim, self.num_heads)
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def activates(cls, options: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def widths(cls, options: dict[str, Any]) -> tuple[int, float]:
        # Of the value any, as the normaliser's column is filled up to 16.
        return options["head_width"], 16

    @classmethod
    def state_choices(cls, options: dict[str, Any], *, dim: int, head_width: int) -> list[dict[str, Any]]:
        """Vary `value_expansion`."""
        return expansions(options, dim=dim, head_width=head_width)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        """Set the bias as `decay_init` has it."""
        spread = inverse_softplus(spread_steps(self.num_heads))
        self.decay_bias.copy_(spread if self.decay_init == "spread" else -torch.linspace(3, 6, self.num_heads))

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of f and i of every position, (B, T, H)."""
        forgetting_BTH = F.softplus(at_least_float32(self.decay(x_BTD)) + self.decay_bias)
        return -forgetting_BTH.clamp(max=MAX_FORGETTING), at_least_float32(self.write(x_BTD))

    def mix(
        self,
        query_BTGK: Tensor,
        key_BTGK: Tensor,
        value_BTHV: Tensor,
        log_decay_BTH: Tensor,
        write_BTH: Tensor,
        state: MLSTMState | None,
    ) -> Tensor:
        memory = None if state is None else Memory(*state[:3])
        inputs = (query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, write_BTH)
        mixed_BTHV, last = mlstm(*inputs, memory, self.backend)
        if state is not None and last is not None:
            for before, after in zip(state[:3], last, strict=True):
                before.copy_(after)
        return mixed_BTHV

    def define(
        self, query_BTGK: Tensor, key_BTGK: Tensor, value_BTHV: Tensor, log_decay_BTH: Tensor, write_BTH: Tensor
    ) -> Tensor:
        return recurrent_mlstm(query_BTGK, key_BTGK, value_BTHV, log_decay_BTH, write_BTH)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> MLSTMState:
        memory_BHKV, history_BWC, position = super().init_state(batch_size, max_length, dtype)
        normaliser_BHK = torch.zeros_like(memory_BHKV[..., 0])
        return MLSTMState(memory_BHKV, normaliser_BHK, torch.zeros_like(normaliser_BHK[..., 0]), history_BWC, position)

    def mixing_flops(self, length: int) -> int:
        return mlstm_flops(length, self.num_heads, self.key_width, self.value_width)
