"""The state of a training between two steps, and its checkpoints, which are written completely or not at all.

    checkpoint/
      step-00000640/   config.json weights.safetensors optimizer.safetensors state.json   to resume; the last two stay
      best-00000640/   config.json weights.safetensors state.json                         lowest validation loss
      final/           the same, after the last step

Other files there are the user's and are neither read nor removed. model/stored.py has the format of a checkpoint.
"""

import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbench.machine.memory import check_free
from attnbench.model.building import num_bytes
from attnbench.model.language_model import LanguageModel
from attnbench.model.stored import (
    ModelRecord,
    check_sizes,
    fill,
    kept_tensors,
    naming_the_way_out,
    read_files,
    read_state,
    write_files,
)
from attnbench.results.checkpoint_files import BEST, NUMBER, STEP, UNFINISHED, remove_checkpoint
from attnbench.results.files import sync
from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError

KEPT = 2
FIRST_COUNTERS = ("step", "seconds", "best_step", "best_nats")
COUNTERS = (
    *(*FIRST_COUNTERS, "shared_device", "num_devices", "num_metrics_rows", "validation_due"),
    *("last_step", "passed_step", "reached_step"),
)
"""Fields of TrainState in state.json; old checkpoints have only FIRST_COUNTERS."""
MOMENTS = ("first_moment", "second_moment", "update_count")


@dataclass(slots=True, kw_only=True)
class TrainState:
    model: LanguageModel
    first_moment: dict[str, Tensor]
    second_moment: dict[str, Tensor]
    update_count: dict[str, Tensor]
    """Updates of each parameter, float32 scalars on its device, where the fused optimizer counts them."""
    step: int = 0
    seconds: float = 0.0
    """Time in training steps, over all processes that trained it."""
    shared_device: bool = False
    """The device was shared, or the number of devices changed: the seconds are not a speed."""
    num_devices: int = 1
    best_step: int = 0
    best_nats: float | None = None
    """Validation nats per character at `best_step`."""
    num_metrics_rows: int | None = None
    """Rows of metrics.jsonl at the last checkpoint; None in old checkpoints."""
    validation_due: bool = False
    """A signal interrupted the validation of this step."""
    last_step: int | None = None
    passed_step: int | None = None
    """First step of the current row of checks above a probe's threshold."""
    reached_step: int | None = None
    """First step of the first two consecutive checks above it."""

    @classmethod
    def fresh(cls, model: LanguageModel) -> "TrainState":
        """Raise UserError if a CPU lacks memory for the model and its gradients."""
        parameters = dict(model.named_parameters())
        if model.embedding.weight.device.type == "cpu":
            check_free(3 * num_bytes(model), f"gradients and moments of {model.num_parameters():,} weights")
        return cls(
            model=model,
            first_moment={name: torch.zeros_like(tensor) for name, tensor in parameters.items()},
            second_moment={name: torch.zeros_like(tensor) for name, tensor in parameters.items()},
            update_count={name: torch.zeros((), device=tensor.device) for name, tensor in parameters.items()},
        )

    def end(self, num_steps: int) -> int:
        return num_steps if self.last_step is None else self.last_step

    def num_updates(self) -> int:
        """A non-finite gradient skips the whole step."""
        return int(torch.stack([*self.update_count.values()]).max())

    def counters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COUNTERS}


def save_step(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Keep a state to resume from; remove all but the last two, and best weights that neither refers to."""
    optimizer = {f"{kind}/{name}": tensor for kind in MOMENTS for name, tensor in getattr(state, kind).items()}
    _write(folder / f"{STEP}-{state.step:08d}", state, record, optimizer)
    for kind in (STEP, BEST):
        for old in kept(folder, kind)[:-KEPT]:
            remove_checkpoint(old)


def save_best(folder: Path, state: TrainState, record: ModelRecord) -> None:
    _write(folder / f"{BEST}-{state.step:08d}", state, record)


def save_final(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Mark the training as finished; remove what only resuming needs."""
    _write(folder / "final", state, record)
    for old in [*kept(folder, STEP), *kept(folder, BEST)]:
        if old.name != f"{BEST}-{state.best_step:08d}":
            remove_checkpoint(old)


def remove_all(folder: Path) -> None:
    for old in [folder / "final", *kept(folder, STEP), *kept(folder, BEST)]:
        if old.exists():
            remove_checkpoint(old)


def kept(folder: Path, kind: str) -> list[Path]:
    paths = [path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-{NUMBER}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))


def is_final(folder: Path) -> bool:
    return (folder / "final").exists()


def load_last(folder: Path, model: LanguageModel) -> TrainState | None:
    """Load the newest state in the folder into `model`, if there is one. The error of a damaged one names an older
    checkpoint."""
    steps = kept(folder, STEP)
    if not steps:
        return None
    try:
        check_sizes(steps[-1], model)
        content, weights, optimizer = read_files(steps[-1])
        counters = _counters(steps[-1], content)
    except UserError as error:
        # Delete the run: a remaining best checkpoint would count as the new training's.
        way_out = f"no older state is kept; delete {folder.parent}, and the same command trains from the start"
        if len(steps) > 1:
            way_out = f"delete {steps[-1]} to resume from {steps[-2].name}"
        raise UserError(f"{error}; {way_out}") from None
    state = TrainState.fresh(model)
    for name, value in counters.items():
        setattr(state, name, value)
    fill(kept_tensors(model), weights, steps[-1])
    moments = {f"{kind}/{name}": tensor for kind in MOMENTS for name, tensor in getattr(state, kind).items()}
    fill(moments, optimizer, steps[-1])
    return state


def load_counters(folder: Path) -> dict[str, Any]:
    with naming_the_way_out(folder):
        return _counters(folder, read_state(folder)[0])


def _counters(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    path, counters = folder / "state.json", {name: content[name] for name in COUNTERS if name in content}
    try:
        check_options(TrainState, counters, given=[entry.name for entry in fields(TrainState)], group="")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    missing = [name for name in FIRST_COUNTERS if name not in counters]
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}")
    if any(value is not None and value < 0 for value in counters.values()):
        raise UserError(f"{path}: a counter is below 0")
    return counters


def checkpoint_of(run: Path, which: str) -> Path:
    folder = run / "checkpoint"
    if not is_final(folder):
        raise UserError(f"run={run}: has no finished training; the attnbench train command that made it resumes it")
    return best_folder(folder) if which == "best" else folder / "final"


def best_folder(folder: Path) -> Path:
    best = kept(folder, BEST)
    if not best:
        raise UserError(f"{folder}: has no best-* checkpoint; rerun=true trains again")
    return best[-1]


def _write(target: Path, state: TrainState, record: ModelRecord, optimizer: dict[str, Tensor] | None = None) -> None:
    """Write under another name, state.json last, sync, and rename."""
    # Without parents: a run's folder that is gone must not come back with a checkpoint alone.
    target.parent.mkdir(exist_ok=True)
    # Of a killed run, which may never reach their step again.
    for stale in target.parent.glob(".*"):
        if UNFINISHED.fullmatch(stale.name):
            remove_checkpoint(stale)
    beside = target.with_name(f".{target.name}.partial")
    beside.mkdir()
    try:
        write_files(beside, state.model, record, state.counters(), optimizer)
    except OSError:
        # Free the space on a full disk.
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if target.exists():
        remove_checkpoint(target)
    beside.rename(target)
    sync(target.parent)
