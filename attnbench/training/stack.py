"""Several trainings of equal shapes computed as one.

Parameters and moments are stacked, (R, ...), and the tensors of each training are views of its part, so that checks,
scores and checkpoints work as for a single training.
"""

import math
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
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.errors import Interrupted
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError, is_logged
from attnbench.training.loop import Rates
from attnbench.training.stack_linear import SplitSums
from attnbench.training.step import EPSILON, Batch, StepReport, batch_nats, foresee

Item = TypeVar("Item")

MIN_STEPS_TO_COMPACT = 200
"""Fewest remaining steps for which a stack is rebuilt without its finished trainings: capturing the step again must pay
off. In steps rather than seconds, so that the same trainings are always stacked in the same way."""
ALIGNMENT = 64
"""Elements to which the parameters in a row are aligned."""
LEAST_CPU_ROWS = 2
"""On a CPU, a sum of a single row is rounded differently than one of several rows, whatever their number. A training
that is left alone is therefore computed with a copy."""


@dataclass(kw_only=True, eq=False)
class Member:
    state: TrainState
    batches: Callable[[int], Batch]
    """Batch of each step; equal shapes in all members, except for the length after the last label."""
    settings: TrainSettings
    """Equal in all members except for the learning rate."""
    num_steps: int
    hooks: Sequence[Any]
    """See `loop.Hook`; the last one keeps the state, and raises Interrupted if a stop was requested."""
    error: DivergedError | None = None
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.state, self.settings, self.num_steps)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.steps_left <= 0

    @property
    def steps_left(self) -> int:
        return self.state.end(self.num_steps) - self.state.step

    def after_step(self, report: StepReport) -> None:
        """Call all hooks but the last."""
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
    """Train all members to their ends; yield each when it is over. Raises Interrupted if a hook was asked to stop; all
    remaining members have been kept."""
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
            # A captured step has its own memory.
            stack = None
            stack = Stack(waiting, precision, captured=captured)
        interrupted = _advance(stack, waiting)
        if interrupted is not None:
            # They have kept nothing, so they are recorded before the stop.
            yield from [member for member in waiting if member.is_over and not member.state.validation_due]
            raise interrupted


def _advance(stack: "Stack", waiting: Sequence[Member]) -> Interrupted | None:
    """Make one step of the waiting members; return an interruption."""
    reports, interrupted = stack.step(waiting), None
    # A hook may read several states.
    for member in waiting:
        member.state.step += 1
    # Until a state is kept, a signal may interrupt any hook. This step is then discarded: its validation or log may be
    # incomplete.
    for member in waiting:
        member.after_step(reports[member])
    for member in waiting:
        try:
            member.keep(reports[member])
        except Interrupted as error:
            interrupted = error
    for member in waiting if interrupted is not None else ():
        # Members before the signal keep their state too, possibly a second time.
        if not member.is_over:
            try:
                member.keep()
            except Interrupted as error:
                interrupted = error
    return interrupted


def _is_worth_compacting(members: Sequence[Member], waiting: Sequence[Member]) -> bool:
    return 2 * len(waiting) <= len(members) and max(one.steps_left for one in waiting) >= MIN_STEPS_TO_COMPACT


class Stack:
    """Stacked parameters and moments of R trainings, and their common step.

    Args:
        members: the tensors of their states become views of the stack.
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
        # Torch's attention on a CPU has no batching rule and would warn at every step.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, moving: Sequence[Member]) -> dict[Member, StepReport]:
        """Make the next step of `moving`; other members do not change. Returns loss and gradient norm by member, copied
        to the CPU at once if any is logged."""
        given = {member: member.batches(member.state.step) for member in moving}
        # The results of inactive members are discarded.
        batches = self._with_twins([given.get(member, given[moving[0]]) for member in self.members])
        if self._moving != moving:
            # Creating a tensor from a list waits for the device.
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
        # Equal at every step.
        self._parts[:] = named
        if self._is_new:
            self._is_new = False
            parameters = self.tensors.parameters.values()
            foresee(self.nats.model, self._stacked_nats, Batch(**named), self.precision, parameters)
        report = self._call(rates_R, self._is_still_R, *named.values())
        if any(is_logged(one.state.step + 1, one.state.end(one.num_steps), self.settings) for one in moving):
            report = StepReport(report.loss.cpu(), report.gradient_norm.cpu())
        of_rows = zip(report.loss.unbind(), report.gradient_norm.unbind(), strict=True)
        # The last rows may be copies.
        return {member: StepReport(*of_row) for member, of_row in zip(self.members, of_rows, strict=False)}

    def _with_twins(self, of_members: list[Item]) -> list[Item]:
        return of_members + of_members[:1] * self.num_twins

    def _on_tensors(self, rates_R: Tensor, is_still_R: Tensor, *parts: Tensor) -> StepReport:
        with record_function("forward"), computing(self.precision, self.device):
            loss_R = self._losses(*parts)
        # No training's loss affects another's gradient.
        with record_function("backward"), multiplying(self.precision):
            gradients = torch.autograd.grad(loss_R.sum(), [*self.tensors.parameters.values()], allow_unused=True)
        with record_function("optimizer"):
            norm_R = self.tensors.update(gradients, rates_R, is_still_R, self.settings)
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
    """Shorter rows are padded with zeros, which are not labels."""
    width = max(part.shape[-1] for part in parts)
    return torch.stack(
        [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]
    )


class _Nats(nn.Module):
    """`batch_nats` as a module, for functional_call."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **parts: Tensor) -> Tensor:
        return batch_nats(self.model, Batch(**parts))


class StackedTensors:
    """Parameters and moments of R trainings, one tensor (R, P) of each kind: clipping and AdamW then need few
    kernels.

    Args:
        states: their tensors become views of the rows.
        num_twins: copies of the first row after the others.
    """

    def __init__(self, states: Sequence[TrainState], weight_decay: float, *, num_twins: int = 0) -> None:
        models = [dict(state.model.named_parameters()) for state in states]
        self.rows, shapes = {}, {name: tensor.shape for name, tensor in models[0].items()}
        end = 0
        for name, shape in shapes.items():
            self.rows[name] = slice(end, end + shape.numel())
            # Kernels need addresses that are multiples of 16 bytes.
            end += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        like, num_rows = next(iter(models[0].values())), len(states) + num_twins
        self.parameters_RP, self.first_RP, self.second_RP = (like.new_zeros(num_rows, end) for _ in range(3))
        # Checkpoints have a count for each parameter; within a training all are equal.
        self.count_RN = torch.zeros(num_rows, len(shapes), device=like.device)
        self.padding_RA = like.new_zeros(num_rows, ALIGNMENT)
        self.dtype = accumulation_dtype(like.dtype)
        self.decay_P = like.new_zeros(end, dtype=self.dtype)
        self.parameters: dict[str, Tensor] = {}
        """(R, ...) by name; leaves with gradients."""
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
    def update(
        self, gradients: Sequence[Tensor | None], rates_R: Tensor, is_still_R: Tensor, settings: TrainSettings
    ) -> Tensor:
        """Clip and update each training as `step.clip` and `step.update`; return the norms (R,) before clipping.
        Trainings in `is_still_R`, and those with non-finite gradients, do not change."""
        parts = []
        for tensor, gradient in zip(self.parameters.values(), gradients, strict=True):
            parts.append((torch.zeros_like(tensor) if gradient is None else gradient).flatten(1))
            parts.append(self.padding_RA[:, : -parts[-1].shape[1] % ALIGNMENT])
        gradient_RP = torch.cat(parts, dim=1).to(self.dtype)
        norm_R = torch.linalg.vector_norm(gradient_RP, dim=1)
        # False for NaN too; `isfinite` is four launches.
        moves_R1 = ((norm_R < math.inf) & ~is_still_R)[:, None]
        if settings.clip_norm:
            gradient_RP *= (settings.clip_norm / (norm_R + 1e-6)).clamp(max=1.0)[:, None]
        # Masked, because 0 times a non-finite number is not 0.
        gradient_RP.masked_fill_(~moves_R1, 0.0)
        moves_R1 = moves_R1.to(gradient_RP.dtype)
        self.count_RN += moves_R1
        # Clamped for trainings without any update.
        count_R1 = self.count_RN[:, :1].double().clamp(min=1.0)
        kept = self.parameters_RP, self.first_RP, self.second_RP
        # Unless in bfloat16 they are themselves: as in torch's fused kernel a step is rounded once.
        parameters_RP, first_RP, second_RP = moved = [tensor.to(self.dtype) for tensor in kept]
        root_R1 = (1 - settings.beta2**count_R1).sqrt().to(gradient_RP.dtype)
        rates_R1 = rates_R[:, None].to(gradient_RP.dtype) * moves_R1
        first_RP.lerp_(gradient_RP, (1 - settings.beta1) * moves_R1)
        second_RP.lerp_(gradient_RP.square_(), (1 - settings.beta2) * moves_R1)
        scale_RP = (second_RP.sqrt() / root_R1).add_(settings.epsilon or EPSILON)
        step_R1 = rates_R1 / (1 - settings.beta1**count_R1).to(gradient_RP.dtype)
        if settings.weight_decay:
            parameters_RP *= 1 - rates_R1 * self.decay_P
        parameters_RP.addcdiv_(step_R1 * first_RP, scale_RP, value=-1)
        if self.dtype != self.parameters_RP.dtype:
            for tensor, new in zip(kept, moved, strict=True):
                tensor.copy_(new)
        return norm_R
