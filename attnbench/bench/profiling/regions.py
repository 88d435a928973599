"""Labels that a profiler shows around the parts of a model, and the weights that tell its matrix products apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from attnbench.mixers.base import Mixer
from attnbench.mixers.layers import FeedForward, RMSNorm
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import nats_of
from attnbench.training.step import Batch

NORMS = (RMSNorm, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)


def parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that are labelled, and their labels; a label inside another is the one that counts.

    A feed-forward is one part with all that it has inside. In a mixer its linear maps are projections and its norms are
    norms; all else that it does is mixing.
    """
    for child in model.children():
        if isinstance(child, FeedForward):
            yield child, "feed-forward"
            continue
        if isinstance(child, Mixer):
            yield child, "mixing"
        elif isinstance(child, nn.Linear):
            yield child, "projections"
        elif isinstance(child, NORMS):
            yield child, "norm"
        yield from parts_of(child)


@contextmanager
def labelled(model: nn.Module) -> Iterator[None]:
    """Run every module of `parts_of` under its label inside the block. For steps that are not compiled."""
    open_labels: list[record_function] = []

    def enter(part: str) -> Any:
        def hook(*_: Any) -> None:
            label = record_function(part)
            label.__enter__()
            open_labels.append(label)

        return hook

    def leave(*_: Any) -> None:
        open_labels.pop().__exit__(None, None, None)

    handles = []
    for module, part in parts_of(model):
        handles.append(module.register_forward_pre_hook(enter(part)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def labelled_nats(model: LanguageModel, batch: Batch) -> Tensor:
    """Compute `training.step.batch_nats`, the loss under its label."""
    hidden, _ = model.hidden(batch.tokens_BT, positions_BL=batch.positions_BL, dropout_B=batch.dropout_B)
    with record_function("loss"):
        return nats_of(model.embedding, hidden, batch.targets_BT, batch.weight_BT)


def weight_parts(model: LanguageModel) -> dict[tuple[int, ...], str]:
    """The part of each pair of sizes, in order, that a weight has; other where weights of two parts have the same."""
    parts_by_size: dict[tuple[int, ...], set[str]] = {}

    def note(part: str, rows: int, columns: int) -> None:
        parts_by_size.setdefault(tuple(sorted((rows, columns))), set()).add(part)

    note("loss", *model.embedding.weight.shape)
    for block in model.layers:
        for module in block.mixer.modules():
            if isinstance(module, nn.Linear):
                note("projections", *module.weight.shape)
        if block.feed_forward is not None:
            dim, width = block.feed_forward.down.weight.shape
            note("feed-forward", dim, width)
            # Gate and up are one product on a GPU.
            note("feed-forward", dim, 2 * width)
    return {sizes: parts.pop() if len(parts) == 1 else "other" for sizes, parts in parts_by_size.items()}
