"""Several trainings of one shape as one: one step moves all of them, and each stays a training of its own.

Parameters and moments lie stacked, (R, ...), and those of a training are views of its part. Whatever reads or keeps a
training (checks, scores, checkpoints) works on the views as if it were alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.precision import computing, multiplying
from attnbench.model.language_model import LanguageModel
from attnbench.settings.errors import Interrupted
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError, is_logged
from attnbench.training.loop import Rates
from attnbench.training.stack_linear import SplitSums
from attnbench.training.step import EPSILON, Batch, StepReport, batch_nats, foresee

Item = TypeVar("Item")

MIN_STEPS_TO_COMPACT = 200
"""Steps that may be left from which on a stack leaves out its finished trainings: another recording of the step has to
come back. Counted, not timed, so that the same trainings are stacked in the same way again."""
ALIGNMENT = 64
"""Elements: each parameter of a row begins at a multiple of so many."""
LEAST_CPU_ROWS = 2
"""A CPU rounds sums of one row otherwise than those of the same row beside others, and those alike however many others
there are. A training that is left alone, in its stack or when it goes on, ends as it would have beside the rest."""


@dataclass(kw_only=True, eq=False)
class Member:
    """One training of a stack: a seed, a learning rate, and a state of its own."""

    state: TrainState
    batches: Callable[[int], Batch]
    """The batch of each step, of one shape in all members but for the length of sequences behind their last label."""
    settings: TrainSettings
    """Equal in all members but for the learning rate."""
    num_steps: int
    hooks: Sequence[Any]
    """See `loop.Hook`; the last one keeps the state, and raises Interrupted then where a stop was asked for."""
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
        """Call the hooks after a step, all but the last."""
        self._call(self.hooks[:-1], report)

    def keep(self, report: StepReport | None = None) -> None:
        """Call the last hook, unless the training has diverged."""
        self._call(self.hooks[-1:] if self.error is None else (), report)

    def _call(self, hooks: Sequence[Any], report: StepReport | None) -> None:
        try:
            for hook in hooks:
                hook(self.state, report)
        except DivergedError as error:
            self.error = error


def train_stack(members: Sequence[Member], *, precision: str, captured: bool = False) -> Iterator[Member]:
    """Train all to their ends, and yield each as soon as it is over.

    Args:
        captured: see `step.stepper`.

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
    # Until a sitting has kept a state a signal may end a look anywhere: then nobody keeps this step, whose validation
    # or line of the log may be missing.
    for member in waiting:
        member.look(reports[member])
    for member in waiting:
        try:
            member.keep(reports[member])
        except Interrupted as error:
            interrupted = error
    for member in waiting if interrupted is not None else ():
        # The stop may have come after its turn; one that has kept its state keeps the same again.
        if not member.is_over:
            try:
                member.keep()
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
        self.num_twins = max(0, LEAST_CPU_ROWS - len(states)) if self.device.type == "cpu" else 0
        self.tensors = StackedTensors(states, self.settings.weight_decay, num_twins=self.num_twins)
        self._parts: list[str] = []
        self._moving: list[Member] = []
        self._is_still_R = torch.empty(0)
        self._still = torch.zeros((), device=self.device)
        self._is_new = True
        self._call = CapturedCall(self._on_tensors) if captured else self._on_tensors
        # Torch's attention on a CPU has no batching rule. It is called a training at a time, as alone, and would warn
        # at every step of its backward pass.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, moving: Sequence[Member]) -> dict[Member, StepReport]:
        """Make the next step of these; the others stand still.

        Returns:
            loss and gradient norm of each, on the CPU where its log may read them: one copy for all of them.
        """
        given = {member: member.batches(member.state.step) for member in moving}
        # Whatever those compute that stand still is thrown away.
        batches = self._with_twins([given.get(member, given[moving[0]]) for member in self.members])
        if self._moving != moving:
            # A tensor made of a list waits for the device.
            self._moving = list(moving)
            is_still = self._with_twins([member not in moving for member in self.members])
            self._is_still_R = torch.tensor(is_still, device=self.device)
        rates = [member.rates.next() if member in moving else self._still for member in self.members]
        rates_R = torch.stack(self._with_twins(rates))
        named = {
            name: _stacked([getattr(batch, name) for batch in batches])
            for name, part in batches[0]._asdict().items()
            if part is not None
        }
        # The same at every step.
        self._parts[:] = named
        if self._is_new:
            self._is_new = False
            parameters = self.tensors.parameters.values()
            foresee(self.nats.model, self._stacked_nats, Batch(**named), self.precision, parameters)
        report = self._call(rates_R, self._is_still_R, *named.values())
        if any(is_logged(one.state.step + 1, one.state.end(one.num_steps), self.settings) for one in moving):
            report = StepReport(report.loss.cpu(), report.gradient_norm.cpu())
        of_rows = zip(report.loss.unbind(), report.gradient_norm.unbind(), strict=True)
        # Nobody is told of twins.
        return {member: StepReport(*of_row) for member, of_row in zip(self.members, of_rows, strict=False)}

    def _with_twins(self, of_members: list[Item]) -> list[Item]:
        return of_members + of_members[:1] * self.num_twins

    def _on_tensors(self, rates_R: Tensor, is_still_R: Tensor, *parts: Tensor) -> StepReport:
        with record_function("forward"), computing(self.precision, self.device):
            loss_R = self._losses(*parts)
        # One sum: no training's loss is in another's gradient.
        with record_function("backward"), multiplying(self.precision):
            loss_R.sum().backward()
        with record_function("optimizer"):
            norm_R = self.tensors.update(rates_R, is_still_R, self.settings)
        for tensor in self.tensors.parameters.values():
            tensor.grad = None
        return StepReport(loss_R.detach(), norm_R)

    def _losses(self, *parts: Tensor) -> Tensor:
        with SplitSums() if self.device.type == "cuda" else nullcontext():
            return torch.vmap(self._mean_nats)(self.tensors.parameters, *parts)

    def _stacked_nats(self, _: LanguageModel, stacked: Batch) -> Tensor:
        return self._losses(*(part for part in stacked if part is not None))

    def _mean_nats(self, parameters: dict[str, Tensor], *parts: Tensor) -> Tensor:
        batch = Batch(**dict(zip(self._parts, parts, strict=True))).wide()
        count = batch.weight_BT.sum() if batch.weight_BT is not None else batch.targets_BT.numel()
        named = {f"model.{name}": tensor for name, tensor in parameters.items()}
        given = {name: part for name, part in batch._asdict().items() if part is not None}
        return torch.func.functional_call(self.nats, named, kwargs=given) / count


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack a part of the members' batches; shorter rows are filled up with zeros, which are no labels."""
    width = max(part.shape[-1] for part in parts)
    return torch.stack(
        [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]
    )


class _Nats(nn.Module):
    """`batch_nats` as the forward pass of a module, whose parameters a call can replace."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **parts: Tensor) -> Tensor:
        return batch_nats(self.model, Batch(**parts))


class StackedTensors:
    """Parameters and moments of R trainings of one shape, each kind as one tensor (R, P).

    All parameters of a training lie in one row, so that clipping and AdamW take as many kernels for all trainings as
    for one tensor of one.

    Args:
        states: their tensors become views of the rows, bit by bit what they were.
        weight_decay: of the parameters that take any.
        num_twins: rows behind theirs that begin as the first does, and are nobody's.
    """

    def __init__(self, states: Sequence[TrainState], weight_decay: float, *, num_twins: int = 0) -> None:
        models = [dict(state.model.named_parameters()) for state in states]
        self.rows, shapes = {}, {name: tensor.shape for name, tensor in models[0].items()}
        end = 0
        for name, shape in shapes.items():
            self.rows[name] = slice(end, end + shape.numel())
            # Kernels want the addresses of tensors to be multiples of 16 bytes.
            end += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        like, num_rows = next(iter(models[0].values())), len(states) + num_twins
        self.parameters_RP, self.first_RP, self.second_RP = (like.new_zeros(num_rows, end) for _ in range(3))
        # A count a parameter, as checkpoints have them; all of a training's are equal.
        self.count_RN = torch.zeros(num_rows, len(shapes), device=like.device)
        self.decay_P = like.new_zeros(end)
        self.parameters: dict[str, Tensor] = {}
        """(R, ...) by name, leaves that take gradients."""
        undecayed = states[0].model.undecayed()
        for index, (name, shape) in enumerate(shapes.items()):
            self.decay_P[self.rows[name]] = 0.0 if name in undecayed else weight_decay
            view = self._view(self.parameters_RP, name, shape)
            for row, (state, model) in enumerate(zip(states, models, strict=True)):
                view[row] = model[name].detach()
                model[name].data = view[row]
                for moments, stacked in ((state.first_moment, self.first_RP), (state.second_moment, self.second_RP)):
                    moments_row = self._view(stacked, name, shape)[row]
                    moments[name] = moments_row.copy_(moments[name])
                state.update_count[name] = self.count_RN[row, index].copy_(state.update_count[name])
            self.parameters[name] = view.detach().requires_grad_()
        for stacked in (self.parameters_RP, self.first_RP, self.second_RP, self.count_RN):
            stacked[len(states) :] = stacked[:1]

    def _view(self, stacked_RP: Tensor, name: str, shape: torch.Size) -> Tensor:
        return stacked_RP[:, self.rows[name]].unflatten(1, shape)

    @torch.no_grad()
    def update(self, rates_R: Tensor, is_still_R: Tensor, settings: TrainSettings) -> Tensor:
        """Clip and update each training as `step.clip` and `step.update` do it alone; returns the norms (R,) before.

        Args:
            is_still_R: trainings that are left as they are, as those are whose gradient is not finite.
        """
        gradient_RP = torch.zeros_like(self.parameters_RP)
        for name, tensor in self.parameters.items():
            if tensor.grad is not None:
                gradient_RP[:, self.rows[name]] = tensor.grad.flatten(1)
        norm_R = torch.linalg.vector_norm(gradient_RP, dim=1)
        moves_R1 = (norm_R.isfinite() & ~is_still_R)[:, None]
        gradient_RP *= (settings.clip_norm / (norm_R + 1e-6)).clamp(max=1.0)[:, None]
        # A product with 0 would keep what is not finite.
        gradient_RP.masked_fill_(~moves_R1, 0.0)
        moves_R1 = moves_R1.to(gradient_RP.dtype)
        self.count_RN += moves_R1
        # One that has never moved divides by no 0.
        count_R1 = self.count_RN[:, :1].double().clamp(min=1.0)
        root_R1 = (1 - settings.beta2**count_R1).sqrt().to(gradient_RP.dtype)
        rates_R1 = rates_R[:, None].to(gradient_RP.dtype) * moves_R1
        self.first_RP.lerp_(gradient_RP, (1 - settings.beta1) * moves_R1)
        self.second_RP.lerp_(gradient_RP.square_(), (1 - settings.beta2) * moves_R1)
        scale_RP = (self.second_RP.sqrt() / root_R1).add_(EPSILON)
        step_R1 = rates_R1 / (1 - settings.beta1**count_R1).to(gradient_RP.dtype)
        self.parameters_RP *= 1 - rates_R1 * self.decay_P
        self.parameters_RP -= step_R1 * self.first_RP / scale_RP
        return norm_R
