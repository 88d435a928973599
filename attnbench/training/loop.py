"""Training: a loop of steps with hooks around it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from attnbench.data.batches import Batches
from attnbench.machine.group import Group
from attnbench.model.dropout import row_keys
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.learning_rate import learning_rates
from attnbench.training.step import Batch, StepReport, stepper

RATES_AT_A_TIME = 2**12


class Hook(Protocol):
    """Called after every step."""

    def __call__(self, state: TrainState, report: StepReport) -> None: ...


def text_batch(batches: Batches, step: int, dropout: float | None) -> Batch:
    """`step` counts from 0; keys of dropout masks are added if there is dropout."""
    tokens_BT, targets_BT = batches.train_batch(step)
    if not dropout:
        return Batch(tokens_BT, targets_BT)
    row_B = torch.arange(batches.rank, batches.batch_size, batches.num_ranks, device=tokens_BT.device)
    return Batch(tokens_BT, targets_BT, dropout_B=row_keys(batches.seed, step, row_B))


def train(
    state: TrainState,
    batches: Callable[[int], Batch],
    settings: TrainSettings,
    *,
    precision: str,
    num_steps: int,
    hooks: Sequence[Hook],
    compiled: bool = False,
    captured: bool = False,
    group: Group | None = None,
    goes_on: Callable[[TrainState], bool] | None = None,
) -> None:
    """Take `state` to step `num_steps`, or to the last step that a hook sets, in place.

    Args:
        batches: a function of the step only, so that a resumed run gets the same batches.
        compiled, captured, group: see `stepper`.
        goes_on: asked before every step; None: until the last one.
    """
    rates = Rates(state, settings, num_steps)
    step = stepper(state, settings, precision, compiled=compiled, captured=captured, group=group)
    goes_on = goes_on or (lambda state: state.step < state.end(num_steps))
    state.model.train()
    while goes_on(state):
        report = step(batches(state.step), rates.next())
        state.step += 1
        for hook in hooks:
            hook(state, report)


class Rates:
    """Learning rates of a training, computed for thousands of steps at once."""

    def __init__(self, state: TrainState, settings: TrainSettings, num_steps: int) -> None:
        self.state, self.settings, self.num_steps = state, settings, num_steps
        self._known, self._end, self._rates_S = range(0), 0, torch.empty(0)

    def next(self) -> Tensor:
        """Return the rate of the state's next step, a scalar on the device."""
        step, end = self.state.step, self.state.end(self.num_steps)
        if step not in self._known or end != self._end:
            self._known, self._end = range(step, min(step + RATES_AT_A_TIME, end)), end
            device = next(self.state.model.parameters()).device
            self._rates_S = learning_rates(self.settings, end, self._known).to(device)
        return self._rates_S[step - self._known.start]
