"""A training step: forward, backward, clip, update. Throughput times the same `train_step`."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.device import on_kernels, wake_compiler
from attnbench.machine.group import Group
from attnbench.machine.precision import computing, multiplying
from attnbench.model.dropout import layer_keys
from attnbench.model.language_model import Block, LanguageModel
from attnbench.model.loss import nats_of
from attnbench.ops.common.importing import import_kernels
from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import TrainState

OWN_BACKENDS = ("torch", "triton")
EPSILON = 1e-8
"""AdamW's epsilon where the settings name none."""


class Batch(NamedTuple):
    """Sequences and their labels, at every position or at `positions_BL`."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """(B, T), or (B, L) with positions."""
    weight_BT: Tensor | None = None
    """1 for labels, 0 otherwise; None: 1 everywhere."""
    positions_BL: Tensor | None = None
    dropout_B: Tensor | None = None
    """Keys of the rows' dropout masks; given if and only if the model has dropout."""

    def rows(self, part: slice | Tensor) -> "Batch":
        tensors = (tensor[part] if tensor is not None else None for tensor in self)
        return Batch(*tensors)  # pyright: ignore[reportArgumentType]

    def wide(self) -> "Batch":
        """Return the batch in int64 and float32; stored dtypes may be smaller."""
        weight, positions = self.weight_BT, self.positions_BL
        return Batch(
            self.tokens_BT.long(),
            self.targets_BT.long(),
            # float64 weights, as in numerical tests, keep their dtype.
            weight if weight is None or weight.is_floating_point() else weight.float(),
            positions.long() if positions is not None else None,
            self.dropout_B,
        )


class StepReport(NamedTuple):
    """Tensors on the device."""

    loss: Tensor
    """In nats per label."""
    gradient_norm: Tensor
    """Before clipping."""


Step = Callable[[Batch, Tensor], StepReport]
"""A training step, from a batch and its learning rate, a scalar on the device."""


def foresee(
    model: LanguageModel,
    nats: Callable[[LanguageModel, Batch], Tensor],
    batch: Batch,
    precision: str,
    parameters: Iterable[Tensor] | None = None,
) -> None:
    """Start compiling the Triton kernels of a step that does not use torch.compile, on CUDA. `parameters` are
    differentiated; None: the model's."""
    if not on_kernels(first := next(model.parameters())):
        return
    # The trace uses tensors without storage, which kernels of other libraries would read.
    is_ours = all(type(part).__module__.startswith(("attnbench.", "torch.")) for part in model.modules())
    if not is_ours or any(layer.mixer.backend not in OWN_BACKENDS for layer in model.layers):
        return
    from attnbench.ops.common.triton import launching

    def loss(*parts: Tensor | None) -> Tensor:
        with computing(precision, first.device):
            return nats(model, Batch(*parts))  # pyright: ignore[reportArgumentType]

    learned = [*(model.parameters() if parameters is None else parameters)]
    with multiplying(precision):
        launching.foresee(loss, learned, batch, f"{model} in {precision}")


def batch_nats(model: LanguageModel, batch: Batch) -> Tensor:
    """Return the sum of the nats of all labels of the batch."""
    hidden, _ = model.hidden(batch.tokens_BT, positions_BL=batch.positions_BL, dropout_B=batch.dropout_B)
    return nats_of(model.readout, hidden, batch.targets_BT, batch.weight_BT)


def compiled_nats(device: torch.device) -> Callable[[LanguageModel, Batch], Tensor]:
    """Return `batch_nats` through torch.compile in three parts: before the blocks, a block, and after them.

    Equal blocks are compiled once; a graph of the whole model would take as many times longer to compile as it has
    blocks, and is hardly faster. A block returns its last residual sum as two terms; the next part adds them, fused
    with its norm.
    """
    wake_compiler(device)
    if device.type == "cuda":
        import_kernels()
    # Other models and shapes are compiled again. Beyond eight, torch would fall back to eager mode with a warning;
    # here the limit is higher and then an error.
    limits: Any = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    limits.recompile_limit, limits.fail_on_recompile_limit_hit = limits.accumulated_recompile_limit, True
    # Without padding: our operators need dense inputs and would copy padded ones.
    part: Any = partial(torch.compile, dynamic=False, options={"comprehensive_padding": False})
    enter, through, leave = part(_enter), part(_through), part(_leave)

    def nats(model: LanguageModel, batch: Batch) -> Tensor:
        x_BTD, branch_BTD = enter(model, batch.tokens_BT, batch.dropout_B)
        for index, block in enumerate(model.layers):
            x_BTD, branch_BTD = through(block, x_BTD, branch_BTD, layer_keys(batch.dropout_B, index))
        return leave(model, x_BTD, branch_BTD, batch.targets_BT, batch.weight_BT, batch.positions_BL)

    return nats


def _enter(model: LanguageModel, tokens_BT: Tensor, dropout_B: Tensor | None) -> tuple[Tensor, Tensor]:
    x_BTD = model.enter(tokens_BT, dropout_B)
    # Two halves, whose sum is exact: without a second summand the first block would have a different graph.
    half_BTD = x_BTD / 2
    return half_BTD, x_BTD - half_BTD


def _through(block: Block, x_BTD: Tensor, branch_BTD: Tensor, dropout_B: Tensor | None) -> tuple[Tensor, Tensor]:
    return block.summands(x_BTD + branch_BTD, None, dropout_B)[:2]


def _leave(
    model: LanguageModel,
    x_BTD: Tensor,
    branch_BTD: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    positions_BL: Tensor | None,
) -> Tensor:
    return nats_of(model.readout, model.leave(x_BTD + branch_BTD, positions_BL), targets, weight)


def train_step(
    state: TrainState,
    batch: Batch,
    rate: Tensor,
    settings: TrainSettings,
    precision: str,
    nats: Callable[[LanguageModel, Batch], Tensor] = batch_nats,
    group: Group | None = None,
) -> StepReport:
    """Forward, backward, clip, update, without waiting for the device.

    A profiler shows the labels forward, backward and optimizer; in a group also reduction, the wait for sums after the
    backward pass.

    Args:
        batch: in a group, this rank's rows, equally many on all ranks.
        rate: a scalar on the device, so that a captured step can use another.
        nats: `batch_nats` or `compiled_nats`.
    """
    loss, gradients = loss_and_gradients(state.model, batch, settings.micro_batch_size, precision, nats, group)
    with record_function("optimizer"):
        norm = clip(gradients, settings.clip_norm)
        update(state, gradients, norm, rate, settings)
    return StepReport(loss, norm)


def stepper(
    state: TrainState,
    settings: TrainSettings,
    precision: str,
    *,
    compiled: bool = False,
    captured: bool = False,
    group: Group | None = None,
) -> Step:
    """Return the step that trains `state`.

    Args:
        compiled: use `compiled_nats`, which changes results by rounding.
        captured: replay a CUDA graph, which changes only the speed; needs batches of one shape.
    """
    nats = compiled_nats(next(state.model.parameters()).device) if compiled else batch_nats
    is_new = not compiled

    def step(batch: Batch, rate: Tensor) -> StepReport:
        nonlocal is_new
        if is_new:
            is_new = False
            foresee(state.model, batch_nats, batch.wide().rows(slice(settings.micro_batch_size)), precision)
        return train_step(state, batch, rate, settings, precision, nats, group)

    return _captured(step, others_ask=group is not None) if captured else step


def _captured(step: Step, *, others_ask: bool) -> Step:
    names: list[str] = []

    def on_tensors(rate: Tensor, *parts: Tensor) -> StepReport:
        return step(Batch(**dict(zip(names, parts, strict=True))), rate)

    call = CapturedCall(on_tensors, others_ask=others_ask)

    def replayed(batch: Batch, rate: Tensor) -> StepReport:
        given = {name: part for name, part in batch._asdict().items() if part is not None}
        # Equal at every step.
        names[:] = given
        return call(rate, *given.values())

    return replayed


def loss_and_gradients(
    model: LanguageModel,
    batch: Batch,
    micro_batch_size: int | None,
    precision: str,
    nats: Callable[[LanguageModel, Batch], Tensor] = batch_nats,
    group: Group | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean nats over all labels of the batch, and gradients by name.

    Micro-batches are weighted by the batch's count of labels, so that their number does not change the result. With
    `group`, the mean is over all its processes, whose batches have equally many labels; gradients are summed during the
    backward pass of the last micro-batch.

    Raises:
        ValueError: the model has dropout but the batch has no keys; or a group and weights.
    """
    if group is not None and batch.weight_BT is not None:
        raise ValueError("several ranks, and weights: the count of labels on the other ranks is not known")
    if model.dropout and batch.dropout_B is None:
        raise ValueError(f"dropout={model.dropout}: the batch has no keys; text_batch makes batches that have them")
    parameters, batch = dict(model.named_parameters()), batch.wide()
    size = batch.tokens_BT.shape[0]
    count = batch.weight_BT.sum() if batch.weight_BT is not None else batch.targets_BT.numel()
    if group is not None:
        count *= group.size
    num_rows = micro_batch_size or size
    losses = []
    for start in range(0, size, num_rows):
        part = batch.rows(slice(start, start + num_rows))
        with record_function("forward"), computing(precision, batch.tokens_BT.device):
            loss = nats(model, part) / count
        losses.append(loss.detach())
        adding_up = nullcontext()
        if group is not None and start + num_rows >= size:
            losses = [torch.stack(losses).sum()]
            adding_up = group.adding_up(losses[0], parameters.values())
        # Without autocast, which has chosen the dtypes, but with the matrix products of the forward pass.
        with adding_up, record_function("backward"), multiplying(precision):
            loss.backward()
    gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
    for tensor in parameters.values():
        tensor.grad = None
    return torch.stack(losses).sum(), gradients


def clip(gradients: dict[str, Tensor], limit: float) -> Tensor:
    """Scale all gradients in place to a common norm of at most `limit`, 0: any; return the norm before."""
    tensors = list(gradients.values())
    norm = torch.nn.utils.get_total_norm(tensors)
    if limit:
        torch._foreach_mul_(tensors, (limit / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def update(
    state: TrainState, gradients: dict[str, Tensor], norm: Tensor, rate: Tensor, settings: TrainSettings
) -> None:
    """One AdamW step (Loshchilov and Hutter, 2019) in place, by torch's fused kernel; nothing changes if `norm` is not
    finite."""
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
                eps=settings.epsilon or EPSILON,
                maximize=False,
            )
