"""BaseConv: a short convolution times a linear gate, the first layer of Zoology's models."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnbench.mixers.layers import Projection, ShortConvolution
from attnbench.mixers.options import MixerOptions
from attnbench.settings.options import option


class BaseConvState(NamedTuple):
    history_BWC: Tensor


class BaseConv(MixerOptions):
    """Gated short convolution (Arora et al., 2023; arXiv 2312.04927), channel by channel, with a gate's matrix W:

        y_t = (sum_i w_i x_(t - taps + 1 + i) + b) (W x_t + b') + x_t

    The x_t at the end is the code's (github.com/HazyResearch/zoology); the block adds its own residual stream. Taps and
    b begin as torch's convolution has them, W as other projections, and b' at 0. It sees `taps` positions: a layer
    below another mixer, as in attn=hybrid 'attn.layers=[base_conv,deltanet]', and none by itself. It has none of the
    parts around other mixers.
    """

    dim: int
    head_width: int
    taps: int = option(3, "positions that the convolution sees, the present one among them", minimum=2)
    backend: str = option("auto", "")

    auto_rule = "there is no other"
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"convolution_bias", "gate_bias"})
    has_order = True

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.check_options()
        self.backend = self.known_backend(self.backend)
        self.convolution, self.gate = ShortConvolution(self.dim, self.taps), Projection(self.dim, self.dim)
        self.convolution_bias, self.gate_bias = (nn.Parameter(torch.empty(self.dim)) for _ in range(2))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        bound = self.taps**-0.5
        nn.init.uniform_(self.convolution_bias, -bound, bound, generator=generator)
        nn.init.zeros_(self.gate_bias)

    def forward(self, x_BTD: Tensor, state: BaseConvState | None = None) -> tuple[Tensor, BaseConvState | None]:
        mixed_BTD = self.convolution(x_BTD, None if state is None else state.history_BWC) + self.convolution_bias
        return (mixed_BTD * (self.gate(x_BTD) + self.gate_bias) + x_BTD).to(x_BTD.dtype), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        return self.forward(x_BTD)[0]

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> BaseConvState:
        shape = (batch_size, self.taps - 1, self.dim)
        return BaseConvState(history_BWC=torch.zeros(shape, dtype=dtype, device=self.gate_bias.device))

    def mixing_flops(self, length: int) -> int:
        """Count two biases, a product and a sum a channel; the model counts the taps and the gate's matrix."""
        return length * 4 * self.dim
