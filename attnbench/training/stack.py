"""Several trainings of one shape as one: one step moves all of them, and each stays a training of its own.

Parameters and moments lie stacked, (R, ...), and those of a training are views of its part. Whatever reads or keeps a
training (checks, scores, checkpoints) works on the views as if it were alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import computing, multiplying
from attnbench.model.language_model import LanguageModel
from attnbench.settings.errors import Interrupted
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import MOMENTS, TrainState
from attnbench.training.hooks import DivergedError
from attnbench.training.loop import Batch, Rates, StepReport, batch_nats, clip, update

MIN_STEPS_TO_COMPACT = 200
"""Steps that may be left from which on a stack leaves out its finished trainings: another recording of the step has to
come back. Counted, not timed, so that the same trainings are stacked in the same way again."""


@dataclass(kw_only=True, eq=False)
class Member:
    """One training of a stack: a seed, a learning rate, and a state of its own."""

    state: TrainState
    batches: Callable[[int], Batch]
    """The batch of each step, of one shape in all members."""
    settings: TrainSettings
    """Equal in all members but for the learning rate."""
    num_steps: int
    hooks: Sequence[Any]
    """See `loop.Hook`; the last one keeps the state where a stop was asked for."""
    error: DivergedError | None = None
    """Set where it ended without reaching its end; the others go on."""
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.state, self.settings, self.num_steps)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.steps_left <= 0

    @property
    def steps_left(self) -> int:
        return self.state.end(self.num_steps) - self.state.step

    def look(self, report: StepReport) -> None:
        """Call the hooks after a step."""
        try:
            for hook in self.hooks:
                hook(self.state, report)
        except DivergedError as error:
            self.error = error


def train_stack(members: Sequence[Member], *, precision: str, captured: bool = False) -> Iterator[Member]:
    """Train all to their ends, and yield each as soon as it is over.

    Args:
        captured: see `loop.stepper`.

    Raises:
        Interrupted: a hook was asked to stop; all members that are not over have been kept.
    """
    waiting, stack = list(members), None
    for member in members:
        member.state.model.train()
    while True:
        for member in [member for member in waiting if member.is_over]:
            waiting.remove(member)
            yield member
        if not waiting:
            return
        if stack is None or _is_worth_compacting(stack.members, waiting):
            # Released before another is made: a recorded step holds memory of its own.
            stack = None
            stack = Stack(waiting, precision, captured=captured)
        interrupted = _advance(stack, waiting)
        if interrupted is not None:
            # Those that this step was the last of have kept nothing: they are recorded before the stop.
            yield from [member for member in waiting if member.is_over and not member.state.validation_due]
            raise interrupted


def _advance(stack: "Stack", waiting: Sequence[Member]) -> Interrupted | None:
    """Make one step of those that are not over; return the stop that a hook was asked for."""
    reports, interrupted = stack.step(waiting), None
    # All of them before the first hook, which may look at several.
    for member in waiting:
        member.state.step += 1
    for member in waiting:
        try:
            member.look(reports[member])
        except Interrupted as error:
            interrupted = error
    for member in waiting if interrupted is not None else ():
        # The stop may have come after its turn; one that has kept its state keeps the same again.
        if not member.is_over:
            try:
                member.hooks[-1](member.state)
            except Interrupted as error:
                interrupted = error
    return interrupted


def _is_worth_compacting(members: Sequence[Member], waiting: Sequence[Member]) -> bool:
    """Tell if half of a stack stands still, and enough steps may be left."""
    return 2 * len(waiting) <= len(members) and max(one.steps_left for one in waiting) >= MIN_STEPS_TO_COMPACT


class Stack:
    """Stacked parameters and moments of R trainings, and the step that moves them.

    Args:
        members: their states' tensors become views of the stack, bit by bit what they were.
        captured: replay the step as a CUDA graph.
    """

    def __init__(self, members: Sequence[Member], precision: str, *, captured: bool = False) -> None:
        self.members, self.settings, self.precision = list(members), members[0].settings, precision
        states = [member.state for member in self.members]
        self.device = next(states[0].model.parameters()).device
        self.nats = _Nats(states[0].model)
        self.parameters = _stack_parameters([state.model for state in states])
        for kind in MOMENTS:
            _stack_tensors([getattr(state, kind) for state in states])
        self._parts: list[str] = []
        self._last: dict[Member, Batch] = {}
        self._call = CapturedCall(self._on_tensors) if captured else self._on_tensors
        # Torch's attention on a CPU has no batching rule. It is called a training at a time, as alone, and would warn
        # at every step of its backward pass.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, moving: Sequence[Member]) -> dict[Member, StepReport]:
        """Make the next step of these; the others stand still."""
        batches = [
            member.batches(member.state.step) if member in moving else self._last[member] for member in self.members
        ]
        self._last = dict(zip(self.members, batches, strict=True))
        still = torch.zeros((), device=self.device)
        rates_R = torch.stack([member.rates.next() if member in moving else still for member in self.members])
        is_still_R = torch.tensor([member not in moving for member in self.members], device=self.device)
        named = {
            name: torch.stack([getattr(batch, name) for batch in batches])
            for name, part in batches[0]._asdict().items()
            if part is not None
        }
        # The same at every step.
        self._parts[:] = named
        loss_R, norm_R = self._call(rates_R, is_still_R, *named.values())
        return {member: StepReport(loss_R[index], norm_R[index]) for index, member in enumerate(self.members)}

    def _on_tensors(self, rates_R: Tensor, is_still_R: Tensor, *parts: Tensor) -> StepReport:
        with record_function("forward"), computing(self.precision, self.device):
            loss_R = torch.vmap(self._mean_nats)(self.parameters, *parts)
        # One sum: no training's loss is in another's gradient.
        with record_function("backward"), multiplying(self.precision):
            loss_R.sum().backward()
        gradients = {name: tensor.grad for name, tensor in self.parameters.items() if tensor.grad is not None}
        for tensor in self.parameters.values():
            tensor.grad = None
        with record_function("optimizer"):
            norms = [
                self._update(index, gradients, rates_R[index], is_still_R[index]) for index in range(len(self.members))
            ]
        return StepReport(loss_R.detach(), torch.stack(norms))

    def _mean_nats(self, parameters: dict[str, Tensor], *parts: Tensor) -> Tensor:
        batch = dict(zip(self._parts, parts, strict=True))
        weight = batch.get("weight_BT")
        count = weight.sum() if weight is not None else batch["targets_BT"].numel()
        named = {f"model.{name}": tensor for name, tensor in parameters.items()}
        return torch.func.functional_call(self.nats, named, kwargs=batch) / count

    def _update(self, index: int, gradients: dict[str, Tensor], rate: Tensor, is_still: Tensor) -> Tensor:
        """Clip and update one training as it is alone; one that stands still is left as it is."""
        own = {name: tensor[index] for name, tensor in gradients.items()}
        norm = clip(own, self.settings.clip_norm)
        update(self.members[index].state, own, norm.masked_fill(is_still, math.inf), rate, self.settings)
        return norm


class _Nats(nn.Module):
    """`batch_nats` as the forward pass of a module, whose parameters a call can replace."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **parts: Tensor) -> Tensor:
        return batch_nats(self.model, Batch(**parts))


def _stack_parameters(models: Sequence[LanguageModel]) -> dict[str, Tensor]:
    """Stack the parameters by name, as leaves that take gradients; each model's become views of its part."""
    by_model = [dict(model.named_parameters()) for model in models]
    stacked = {}
    for name in by_model[0]:
        tensor = torch.stack([parameters[name].detach() for parameters in by_model])
        for index, parameters in enumerate(by_model):
            parameters[name].data = tensor[index]
        stacked[name] = tensor.requires_grad_()
    return stacked


def _stack_tensors(by_run: Sequence[dict[str, Tensor]]) -> None:
    """Stack tensors by name, and put views into the dictionaries."""
    for name in by_run[0]:
        stacked = torch.stack([tensors[name] for tensors in by_run])
        for index, tensors in enumerate(by_run):
            tensors[name] = stacked[index]
