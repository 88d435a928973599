"""LSTM: torch's own, the positive control of probes that track a state."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.options import MixerOptions
from attnbench.ops.common.precision import accumulation_dtype, at_least_float32, without_autocast
from attnbench.settings.options import option


class LSTMState(NamedTuple):
    hidden_BC: Tensor
    cell_BC: Tensor


@torch.compiler.disable
def _lstm(x_BTD: Tensor, hidden_BC: Tensor, cell_BC: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Run torch's kernel outside of compiled graphs, in which torch writes out every position, for minutes."""
    # cuDNN wants the weights in one piece.
    flat = torch.cat([weight.flatten() for weight in weights])
    sizes = [weight.numel() for weight in weights]
    parts = [part.view_as(weight) for part, weight in zip(flat.split(sizes), weights, strict=True)]
    memory = hidden_BC[None], cell_BC[None]
    # Always as in training: without gradients torch rounds otherwise, and cuDNN keeps nothing for a backward pass.
    with torch.enable_grad():
        y_BTC, hidden_1BC, cell_1BC = torch.lstm(x_BTD, memory, parts, True, 1, 0.0, True, False, True)
    found = y_BTC, hidden_1BC[0], cell_1BC[0]
    return found if torch.is_grad_enabled() else tuple(part.detach() for part in found)


class LSTM(MixerOptions):
    """LSTM with a forget gate (Hochreiter and Schmidhuber, 1997; Gers et al., 2000), with h_0 = c_0 = 0:

        i, f, g, o = W x_t + b + U h_(t-1) + b',   c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
        h_t = sigmoid(o) tanh(c_t)

    h has model.dim channels and is the output, without a projection. Weights and biases begin as torch.nn.LSTM's,
    uniform in +-1/sqrt(model.dim). It computes in float32 at least and has none of the parts around other mixers. It
    runs position by position and is a control: its speed says nothing about LSTMs.
    """

    dim: int
    head_width: int
    backend: str = option("auto", "")

    auto_rule = "there is no other"
    without_vmap = frozenset({"torch"})
    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"bias_input", "bias_hidden"})
    has_order = True

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.check_options()
        self.backend = self.known_backend(self.backend)
        self.weight_input, self.weight_hidden = (nn.Parameter(torch.empty(4 * self.dim, self.dim)) for _ in range(2))
        self.bias_input, self.bias_hidden = (nn.Parameter(torch.empty(4 * self.dim)) for _ in range(2))

    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        bound = self.dim**-0.5
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def weights(self) -> list[Tensor]:
        own = (self.weight_input, self.weight_hidden, self.bias_input, self.bias_hidden)
        return [at_least_float32(weight) for weight in own]

    def forward(self, x_BTD: Tensor, state: LSTMState | None = None) -> tuple[Tensor, LSTMState | None]:
        dtype = accumulation_dtype(self.weight_input.dtype)
        before = self.init_state(len(x_BTD), x_BTD.shape[1], dtype) if state is None else state
        with without_autocast(x_BTD.device.type):
            hidden_BC, cell_BC = (part.to(dtype) for part in before)
            found = _lstm(x_BTD.to(dtype), hidden_BC, cell_BC, self.weights())  # pyright: ignore[reportCallIssue]
        y_BTC, hidden_BC, cell_BC = found
        if state is not None:
            state.hidden_BC.copy_(hidden_BC)
            state.cell_BC.copy_(cell_BC)
        return y_BTC.to(x_BTD.dtype), state

    def reference(self, x_BTD: Tensor) -> Tensor:
        input_weight, hidden_weight, input_bias, hidden_bias = self.weights()
        hidden_BC, cell_BC = self.init_state(len(x_BTD), x_BTD.shape[1], input_weight.dtype)
        outputs = []
        for x_BD in x_BTD.to(input_weight.dtype).unbind(1):
            gates_BC = F.linear(x_BD, input_weight, input_bias) + F.linear(hidden_BC, hidden_weight, hidden_bias)
            write_BC, keep_BC, new_BC, read_BC = gates_BC.chunk(4, dim=-1)
            cell_BC = keep_BC.sigmoid() * cell_BC + write_BC.sigmoid() * new_BC.tanh()
            hidden_BC = read_BC.sigmoid() * cell_BC.tanh()
            outputs.append(hidden_BC)
        return torch.stack(outputs, dim=1).to(x_BTD.dtype)

    def init_state(self, batch_size: int, max_length: int, dtype: torch.dtype) -> Any:
        like = {"dtype": accumulation_dtype(dtype), "device": self.weight_input.device}
        return LSTMState(*(torch.zeros(batch_size, self.dim, **like) for _ in range(2)))

    def mixing_flops(self, length: int) -> int:
        """Count sums of gates and products of single channels; the model counts both matrices, once a position."""
        return length * 8 * self.dim
