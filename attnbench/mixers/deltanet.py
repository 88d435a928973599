"""DeltaNet: a memory without decay, in which each key overwrites what it points to."""

from attnbench.mixers.around import Gate
from attnbench.mixers.delta_rule import DeltaRuleMixer
from attnbench.ops.delta.delta_rule import delta_rule_flops


class DeltaNet(DeltaRuleMixer):
    """DeltaNet (Yang, Wang, Zhang, Shen and Kim, 2024; arXiv 2406.06484), per head, with S_0 = 0:

        S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,   y_t = S_t^T q_t / sqrt(K)

    that is a = 1, e = b k, r = k, u = b v. q, k and v come through a short convolution and SiLU, b_t =
    sigmoid(beta(x_t)). The paper's defaults stand here: q and k of length 1, a convolution of four taps, a norm and no
    gate on the output.

    Args:
        num_heads: null for dim / head_width; the inner widths need not add up to dim.
        head_width: channels of query and key a head, K.
        value_expansion: channels of value a head, V, as a multiple of head_width.
        backend: auto | torch | triton | fla, as in Gated DeltaNet, whose kernels these are.
        rotary_theta: base of the wavelengths of rotary positions, by which query and key are turned after convolution
            and SiLU; null for no positions.
        conv_size: taps of the short convolution over query, key and value; 0 for none.
        qk_norm: divide query and key of each head by their length. Without it the recurrence can grow.
        output_norm: RMS norm with a learned gain over each head's output, before gate and projection.
        output_gate: multiply the output by silu(gate(x)) or sigmoid(gate(x)); none: no gate.
        negative_eigenvalues: b_t in 0..2 instead of 0..1, so that the state can also be reflected (arXiv 2411.12537).
    """

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
        output_gate: Gate = "none",
        negative_eigenvalues: bool = False,
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
        )

    def mixing_flops(self, length: int) -> int:
        return delta_rule_flops(length, self.num_heads, self.head_width, self.value_width)
