from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnbench.settings.schema import TrainSettings
from attnbench.training.checkpoint import BEST, STEP, TrainState, kept
from attnbench.training.hooks import DivergedError
from attnbench.training.step import Batch, loss_and_gradients


def located(
    error: DivergedError,
    state: TrainState,
    batches: Callable[[int], Batch],
    settings: TrainSettings,
    precision: str,
    checkpoints: Path,
) -> DivergedError:
    """Add the step, the layer and the last checkpoint to the error.

    Non-finite updates are skipped, so the weights are those of the last good step: the steps since the loss was last
    read are computed again, uncompiled.
    """
    culprits = ((step, first_not_finite(state.model, batches(step), settings, precision)) for step in error.steps)
    step, culprit = next(((step, culprit) for step, culprit in culprits if culprit is not None), (None, None))
    where = f"; first in step {step + 1}, in {culprit}" if step is not None else ""
    names = [path.name for kind in (STEP, BEST) for path in kept(checkpoints, kind)]
    newest = max(names, key=lambda name: (int(name.partition("-")[2]), name), default=None)
    last = f"; last good checkpoint {checkpoints / newest}" if newest is not None else "; no checkpoint before it"
    return DivergedError(f"{error}{where}{last}", error.steps)


def first_not_finite(model: nn.Module, batch: Batch, settings: TrainSettings, precision: str) -> str | None:
    culprits: list[str] = []
    handles = []

    def check_gradient(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not _is_finite(parameter.grad):
            culprits.append(f"the gradient of {name}")

    def check_output(name: str, module: nn.Module, given: Any, output: Any) -> None:
        if not all(_is_finite(x) for x in tree_leaves(output) if isinstance(x, Tensor)):
            culprits.append(f"the output of {name}")

    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"the weight {name}"
        handles.append(parameter.register_post_accumulate_grad_hook(partial(check_gradient, name)))
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(check_output, name)))
    try:
        loss, gradients = loss_and_gradients(model, batch, settings.micro_batch_size, precision)  # pyright: ignore[reportArgumentType]
    finally:
        for handle in handles:
            handle.remove()
    if culprits:
        return culprits[0]
    if not _is_finite(loss):
        return "the loss"
    # Finite gradients may have an infinite norm.
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    return None if _is_finite(norm) else "the norm of all gradients"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
