"""Gated DeltaNet: a memory that decays, and in which each key overwrites what it points to."""

from typing import Any, ClassVar

from attnbench.mixers.around import Gate
from attnbench.mixers.decay import DecayInit
from attnbench.mixers.delta_rule import DeltaRuleMixer
from attnbench.ops.delta.delta_rule import delta_rule_flops


class GatedDeltaNet(DeltaRuleMixer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025; arXiv 2412.06464), per head, with M_0 = 0:

        M_t = a_t M_{t-1} + b_t k_t (v_t - a_t M_{t-1}^T k_t)^T,   y_t = M_t^T q_t / sqrt(K)

    q, k and v come through a short convolution and SiLU; a_t = exp(-exp(log_decay_rate) softplus(decay(x_t) +
    decay_bias)) as in Mamba-2, not below exp(-MAX_FORGETTING), b_t = sigmoid(beta(x_t)).

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla. Triton, our own kernels, takes heads of 16, 32, 64, 128 and, in bfloat16,
            256 key channels and a multiple of 16 value channels; auto is triton for these on CUDA, and else torch.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned after convolution
            and SiLU; null for no positions. They are turned before they get unit length, which a rotation keeps.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        negative_eigenvalues: b_t in 0..2 instead of 0..1, so that the state can also be reflected (arXiv 2411.12537).
        decay_init: initial values of exp(log_decay_rate), the rate, and softplus(decay_bias), the time step, whose
            product is the decay -log a_t. spread: rates of 1 and steps of 0.001 to 0.4, evenly by ratio over the heads,
            the slowest first: half-lives of 693 down to 1.7 positions, of 693 with one head. paper: as in Mamba-2
            (arXiv 2405.21060) rates drawn evenly from 1..16 and steps, by their logarithms, from 0.001..0.1. With these
            it is luck whether a model of one head can remember the beginning of a sequence; and one that forgets slowly
            learns recall sooner.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})
    paper_options: ClassVar[dict[str, Any]] = {"value_expansion": 2}

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
        output_gate: Gate = "silu",
        negative_eigenvalues: bool = False,
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
            qk_norm=qk_norm,
            output_norm=output_norm,
            output_gate=output_gate,
            max_beta=2 if negative_eigenvalues else 1,
            decay_init=decay_init,
        )

    def mixing_flops(self, length: int) -> int:
        return delta_rule_flops(length, self.num_heads, self.head_width, self.value_width)
