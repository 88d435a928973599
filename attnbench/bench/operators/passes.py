"""The forward and the backward call of an implementation, and their times."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.timing import ColdCaches, Times


class Passes:
    """Calls of a function of `inputs`, which get gradients from the output's, if given."""

    def __init__(self, function: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor | None) -> None:
        self._function, self.inputs, self.gradient = function, inputs, gradient
        self.output: Tensor | None = None

    def forward(self) -> None:
        """Keep the output with its graph, in place of the last one."""
        self.output = None
        with torch.set_grad_enabled(self.gradient is not None):
            self.output = self._function()

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of the last forward pass, and free its graph."""
        output, self.output = self.output, None
        assert output is not None
        # An unused input has no gradient.
        return torch.autograd.grad(output, self.inputs, self.gradient, allow_unused=True)

    def total(self) -> None:
        self.forward()
        self.backward()

    def outcome(self) -> list[Tensor]:
        self.forward()
        assert self.output is not None
        output = self.output.detach()
        return [output, *(self.backward() if self.gradient is not None else ())]

    def times(self, names: Sequence[str], repetition: Timed) -> Iterator[tuple[str, Times]]:
        device = self.inputs[0].device
        cold = ColdCaches(device)
        for name in names:
            prepare = self.forward if name == "backward" else None
            yield name, repetition.times(getattr(self, name), device, prepare=prepare, before=cold)
