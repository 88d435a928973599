"""Training: a loop of steps with hooks around it. `train_step` is the very function that throughput times."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from attnbench.checkpoint import TrainState
from attnbench.loss import nats_of
from attnbench.model import LanguageModel
from attnbench.runtime import computing
from attnbench.settings import TrainSettings


class Batch(NamedTuple):
    """Sequences and the labels that are scored: at every position, or at `positions_BL` alone."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """(B, T), or (B, L) where positions are given."""
    weight_BT: Tensor | None = None
    """1 where there is a label, 0 where there is none; None: everywhere."""
    positions_BL: Tensor | None = None

    def rows(self, part: slice | Tensor) -> "Batch":
        """Some of the sequences: a slice, or their indices."""
        return self._each(lambda tensor: tensor[part])

    def copy(self) -> "Batch":
        """The same in memory of its own."""
        return self._each(torch.clone)

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        weight, positions = self.weight_BT, self.positions_BL
        return Batch(
            function(self.tokens_BT),
            function(self.targets_BT),
            function(weight) if weight is not None else None,
            function(positions) if positions is not None else None,
        )


class StepReport(NamedTuple):
    """What a step leaves on the device; reading it waits for the device."""

    loss: Tensor
    """Nats a label."""
    gradient_norm: Tensor
    """Before clipping."""


class Hook(Protocol):
    """Called after every step; decides for itself whether it is its turn."""

    def __call__(self, state: TrainState, report: StepReport) -> None: ...


Step = Callable[[Batch, Tensor], StepReport]
"""One training step: a batch and its learning rate, a scalar on the device."""


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
) -> None:
    """Takes `state` to step `num_steps`, in place.

    Args:
        batches: the batch of each step, a function of the step alone, so that a resumed run sees what it would have.
        precision: resolved, see `runtime.resolve_precision`.
        compiled, captured: see `stepper`.
    """
    device = next(state.model.parameters()).device
    rates = learning_rates(settings, num_steps).to(device)
    step = stepper(state, settings, precision, compiled=compiled, captured=captured)
    state.model.train()
    while state.step < num_steps:
        report = step(batches(state.step), rates[state.step])
        state.step += 1
        for hook in hooks:
            hook(state, report)


def batch_nats(model: LanguageModel, batch: Batch) -> Tensor:
    """Nats over all labels of the batch, in the precision that is set: what is compiled, backward pass included."""
    hidden, _ = model.hidden(batch.tokens_BT, positions_BL=batch.positions_BL)
    return nats_of(model.embedding, hidden, batch.targets_BT, batch.weight_BT)


def train_step(
    state: TrainState,
    batch: Batch,
    rate: Tensor,
    settings: TrainSettings,
    precision: str,
    nats: Callable[[LanguageModel, Batch], Tensor] = batch_nats,
) -> StepReport:
    """Forward, backward, clip, update. Nothing here waits for the device.

    Args:
        rate: a scalar on the device, so that a captured step can be given another.
        nats: `batch_nats`, or the same compiled.
    """
    loss, gradients = loss_and_gradients(state.model, batch, settings.micro_batch_size, precision, nats)
    norm = clip(gradients, settings.clip_norm)
    update(state, gradients, norm, rate, settings)
    return StepReport(loss, norm)


def stepper(
    state: TrainState, settings: TrainSettings, precision: str, *, compiled: bool = False, captured: bool = False
) -> Step:
    """The step that trains `state`, and the one to time.

    Args:
        compiled: forward, loss and backward through torch.compile, as one graph. Changes the result by rounding.
        captured: replay it as a CUDA graph. Small models otherwise wait for the host to launch their kernels. Changes
            the speed, not the result; for batches of one shape.
    """
    nats = torch.compile(batch_nats, dynamic=False) if compiled else batch_nats

    def step(batch: Batch, rate: Tensor) -> StepReport:
        return train_step(state, batch, rate, settings, precision, nats)

    return CapturedStep(step) if captured else step


class CapturedStep:
    """A step whose first calls run as they are, after which it is recorded once and then replayed.

    What a call returns is overwritten by the next one.

    Raises:
        ValueError: a batch of another shape than the first one's.
    """

    NUM_WARMUP = 3
    """Ordinary steps before the recording, in which kernels are loaded and libraries allocate their workspaces."""

    def __init__(self, step: Step) -> None:
        self.step, self.num_calls = step, 0
        # What was warmed up on the default stream cannot be recorded. One stream: each has memory of its own.
        self.stream = torch.cuda.Stream()
        self.recording: tuple[torch.cuda.CUDAGraph, list[Tensor], StepReport] | None = None

    def __call__(self, batch: Batch, rate: Tensor) -> StepReport:
        self.num_calls += 1
        if self.num_calls <= self.NUM_WARMUP:
            return self._aside(batch, rate)
        if self.recording is None:
            self.recording = self._record(batch, rate)
        graph, inputs, report = self.recording
        for own, given in zip(inputs, _inputs(batch, rate), strict=True):
            if own.shape != given.shape:
                raise ValueError(f"a captured step takes one shape, {tuple(own.shape)}, not {tuple(given.shape)}")
            own.copy_(given)
        graph.replay()
        return report

    def _aside(self, batch: Batch, rate: Tensor) -> StepReport:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            report = self.step(batch, rate)
        torch.cuda.current_stream().wait_stream(self.stream)
        return report

    def _record(self, batch: Batch, rate: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor], StepReport]:
        own, own_rate = batch.copy(), rate.clone()
        # The graph's memory is its own. What the ordinary steps left in the allocator would double the peak.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            report = self.step(own, own_rate)
        return graph, _inputs(own, own_rate), report


def _inputs(batch: Batch, rate: Tensor) -> list[Tensor]:
    return [*(part for part in batch if part is not None), rate]


def loss_and_gradients(
    model: LanguageModel,
    batch: Batch,
    micro_batch_size: int | None,
    precision: str,
    nats: Callable[[LanguageModel, Batch], Tensor] = batch_nats,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean nats over all labels of the batch, and its gradients by name.

    Micro-batches add up sums over the batch's own count of labels, so that their number does not change the result.
    """
    parameters = dict(model.named_parameters())
    size = batch.tokens_BT.shape[0]
    count = batch.weight_BT.sum() if batch.weight_BT is not None else batch.targets_BT.numel()
    losses = []
    for start in range(0, size, micro_batch_size or size):
        part = batch.rows(slice(start, start + (micro_batch_size or size)))
        with computing(precision, batch.tokens_BT.device):
            loss = nats(model, part) / count
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
    for tensor in parameters.values():
        tensor.grad = None
    return torch.stack(losses).sum(), gradients


def clip(gradients: dict[str, Tensor], limit: float) -> Tensor:
    """Scales all gradients, in place, so that their common norm is at most `limit`; returns the norm before."""
    tensors = list(gradients.values())
    norm = torch.nn.utils.get_total_norm(tensors)
    torch._foreach_mul_(tensors, (limit / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def update(
    state: TrainState, gradients: dict[str, Tensor], norm: Tensor, rate: Tensor, settings: TrainSettings
) -> None:
    """One AdamW step (Loshchilov and Hutter, 2019), in place, by torch's fused kernel.

    Where `norm`, that of the gradients, is not finite, nothing changes: the weights stay those of the last good step.
    """
    parameters = dict(state.model.named_parameters())
    spared = state.model.undecayed()
    not_finite = (~torch.isfinite(norm)).float()
    for decay, names in (
        (settings.weight_decay, [name for name in gradients if name not in spared]),
        (0.0, [name for name in gradients if name in spared]),
    ):
        with torch.no_grad():
            adamw(
                [parameters[name] for name in names],
                [gradients[name] for name in names],
                [state.first_moment[name] for name in names],
                [state.second_moment[name] for name in names],
                [],
                [state.update_count[name] for name in names],
                fused=True,
                found_inf=not_finite,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=rate,  # pyright: ignore[reportArgumentType]
                weight_decay=decay,
                eps=1e-8,
                maximize=False,
            )


def learning_rates(settings: TrainSettings, num_steps: int) -> Tensor:
    """The rate of every step, (num_steps,): a linear warm-up, then a cosine down to `final_rate_fraction`."""
    warmup = min(settings.warmup_steps, num_steps)
    floor = settings.learning_rate * settings.final_rate_fraction
    rates = []
    for step in range(num_steps):
        if step < warmup:
            rates.append(settings.learning_rate * (step + 1) / warmup)
        else:
            progress = (step - warmup) / max(1, num_steps - 1 - warmup)
            rates.append(floor + (settings.learning_rate - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    return torch.tensor(rates, dtype=torch.float32)
