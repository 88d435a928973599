"""DeltaProduct: several steps of the delta rule a position, whose product turns the state further than one can."""

from typing import ClassVar

from attnbench.mixers.around import Gate
from attnbench.mixers.decay import DecayInit
from attnbench.mixers.delta_rule import DeltaRuleMixer
from attnbench.ops.delta.delta_rule import delta_rule_flops
from attnbench.settings.check import check_value


class DeltaProduct(DeltaRuleMixer):
    """DeltaProduct (Siems et al., 2025; arXiv 2502.10297), per head, with S_0 = 0 and n sub-steps a position:

        S_t,0 = a_t S_{t-1,n},   S_t,j = (I - b_t,j k_t,j k_t,j^T) S_t,{j-1} + b_t,j k_t,j v_t,j^T,
        y_t = S_t,n^T q_t / sqrt(K)

    that is e = b k, r = k, u = b v in each sub-step, and a in the first alone. The keys, values and strengths of the
    sub-steps are projections of their own of the same x_t. q, k and v come through a short convolution and SiLU, b =
    2 sigmoid(beta(x_t)), a_t as in Gated DeltaNet.

    Defaults: the paper's, n = 2 and b in 0..2, in its gated form. Its decays are drawn as in Mamba-2,
    which is decay_init=paper.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla, as in Gated DeltaNet, whose kernels these are.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned after convolution
            and SiLU; null for no positions.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        num_householders: sub-steps a position, n; each adds a key and a value projection.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        negative_eigenvalues: b in 0..2, so that a sub-step can reflect; false: 0..1.
        decay: have the memory decay; false: a = 1, the paper's form without a gate.
        decay_init: initial decays, spread | paper, as in Gated DeltaNet.
    """

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"log_decay_rate", "decay_bias"})

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
        num_householders: int = 2,
        negative_eigenvalues: bool = True,
        decay: bool = True,
        decay_init: DecayInit = "spread",
    ) -> None:
        check_value("attn.num_householders", num_householders, minimum=1)
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
            decay_init=decay_init if decay else None,
            num_steps=num_householders,
        )

    def mixing_flops(self, length: int) -> int:
        return delta_rule_flops(length, self.num_heads, self.head_width, self.value_width, self.num_steps)
