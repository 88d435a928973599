"""Parts of an eager training step: labels around the model's modules, and each part's share of the step.

Forward work lies inside a label. Backward work has the sequence number of its forward operator, and belongs to its
label.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from attnbench.bench.profiling.recording import Recording, is_operator, own_microseconds
from attnbench.mixers.base import Mixer
from attnbench.mixers.layers import FeedForward, RMSNorm
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import nats_of
from attnbench.results.rows import Measurement
from attnbench.training.step import Batch

PARTS = ("mixing", "projections", "feed-forward", "norm", "loss", "optimizer", "other")
"""Mixing is everything in a mixer besides its projections and norms. Other are embedding, residual additions, copies of
the inputs, and work of unknown part."""

IDLE = "idle"
"""Time of a step without work; a part beside PARTS."""

PASSES = ("forward", "backward", "optimizer")

NORMS = (RMSNorm, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)

BACKWARD_NODE = "autograd::engine::evaluate_function"
"""Beginning of the operator's name in which autograd's engine runs one node; the node's name follows."""


def parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that are labelled, and their labels; the innermost label counts.

    A feed-forward is one part. In a mixer linear maps are projections, norms are norms, and everything else is mixing.
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
    """`training.step.batch_nats`, with the loss under its label."""
    hidden, _ = model.hidden(batch.tokens_BT, positions_BL=batch.positions_BL, dropout_B=batch.dropout_B)
    with record_function("loss"):
        return nats_of(model.readout, hidden, batch.targets_BT, batch.weight_BT)


def part_rows(recording: Recording, num_steps: int, step_ms: float, settings: dict[str, Any]) -> Iterator[Measurement]:
    """Yield milliseconds and share of every part and pass of a step, idle time among the parts.

    Args:
        recording: `num_steps` labelled steps.
        step_ms: the step without the profiler.
    """
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    passes: dict[str, float] = dict.fromkeys(PASSES, 0.0)
    busy = recording.milliseconds / num_steps
    for part, step_pass, milliseconds in _placed(recording):
        parts[part] += milliseconds / num_steps
        if step_pass:
            passes[step_pass] += milliseconds / num_steps
    # Work that no operator started is in no part yet.
    missing = max(0.0, busy - math.fsum(parts.values()))
    parts["other"] += missing
    unplaced = missing + sum(ms for part, name, ms in _placed(recording) if part == "other" and not name) / num_steps
    # Kernels take a little longer under the profiler: their sum may exceed the step's time.
    whole = max(step_ms, busy) or 1.0
    for part, milliseconds in parts.items():
        labels = settings | {"part": part}
        yield Measurement(metric="part_share", value=milliseconds / whole, unit="1", settings=labels)
        yield Measurement(metric="part_milliseconds", value=milliseconds, unit="ms", settings=labels)
    yield idle_row(busy, step_ms, settings)
    for name, milliseconds in passes.items():
        yield Measurement(metric="pass_milliseconds", value=milliseconds, unit="ms", settings=settings | {"pass": name})
    yield Measurement(metric="unplaced_share", value=unplaced / (busy or 1.0), unit="1", settings=settings)


def idle_row(busy_ms: float, step_ms: float, settings: dict[str, Any]) -> Measurement:
    share = max(0.0, 1 - busy_ms / step_ms) if step_ms else 0.0
    return Measurement(metric="part_share", value=share, unit="1", settings=settings | {"part": IDLE})


def _placed(recording: Recording) -> Iterator[tuple[str, str, float]]:
    """Yield part, pass (empty if unknown) and milliseconds of the work that each operator started itself."""
    events = [event for event in recording.profiler.events() or () if is_operator(event)]
    makers: dict[int, Any] = {}
    # A forward operator shows the number of the next node, whether it makes that node or not. The maker is the last
    # operator that begins with the number.
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not event.fwd_thread and not any(map(_is_backward, _path(event))):
            makers[event.sequence_nr] = event
    for event in events:
        milliseconds = own_microseconds(event, recording.device_type) / 1e3
        path = [*_path(event)]
        node = next(filter(_is_backward, path), None)
        if node is not None:
            maker = makers.get(node.sequence_nr)
            yield _label(_path(maker)) if maker is not None else "other", "backward", milliseconds
            continue
        step_pass = next((one.name for one in reversed(path) if one.name in PASSES), "")
        yield "optimizer" if step_pass == "optimizer" else _label(path), step_pass, milliseconds


def _path(event: Any) -> Iterator[Any]:
    """Yield the event and those around it, innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _is_backward(event: Any) -> bool:
    return event.name.startswith(BACKWARD_NODE)


def _label(path: Any) -> str:
    return next((event.name for event in path if event.name in PARTS), "other")
