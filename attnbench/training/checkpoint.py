"""State of a training between two steps, and checkpoints of it, each whole or not there.

    checkpoint/
      step-00000640/   config.json weights.safetensors optimizer.safetensors state.json   resumes; the last two are kept
      best-00000640/   config.json weights.safetensors state.json                         lowest validation loss
      final/           the same, when the training is complete

Other files there, a copy step-00000640.bak or step-00000640/notes.txt say, are the user's: neither read nor removed.

Each is written beside, synced, then renamed, so that the one before it still loads where a write is cut off.
model/stored.py writes and reads the files of one.
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
"""Number of states to resume from that stay."""
FIRST_COUNTERS = ("step", "seconds", "best_step", "best_nats")
COUNTERS = (
    *(*FIRST_COUNTERS, "shared_device", "num_devices", "num_metrics_rows", "validation_due"),
    *("last_step", "passed_step", "reached_step"),
)
"""Fields of TrainState in state.json; the first checkpoints of this format have FIRST_COUNTERS alone."""
MOMENTS = ("first_moment", "second_moment", "update_count")
"""Fields of TrainState in optimizer.safetensors."""


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Everything that a training step reads and writes."""

    model: LanguageModel
    first_moment: dict[str, Tensor]
    second_moment: dict[str, Tensor]
    update_count: dict[str, Tensor]
    """Updates that each parameter has had, as float32 scalars on its device: the fused optimizer counts them there."""
    step: int = 0
    seconds: float = 0.0
    """Spent in training steps alone, over all sittings."""
    shared_device: bool = False
    """Others ran on the device during one of the sittings, or these had several numbers of devices: the seconds are no
    speed."""
    num_devices: int = 1
    """Those of the last sitting."""
    best_step: int = 0
    best_nats: float | None = None
    """Validation nats a character at `best_step`."""
    num_metrics_rows: int | None = None
    """Rows of metrics.jsonl when this was last kept; None where a former version kept it."""
    validation_due: bool = False
    """A signal cut off the validation of this step."""
    last_step: int | None = None
    """Last step of a training that ends before all of its steps are made; None where no rule has ended it."""
    passed_step: int | None = None
    """First of the last checks in a row that passed a probe's threshold; None where the last one did not."""
    reached_step: int | None = None
    """First of the first two checks in a row that passed it."""

    @classmethod
    def fresh(cls, model: LanguageModel) -> "TrainState":
        """The state before the first step.

        Raises:
            UserError: on a CPU there is not enough memory for it and for the gradients.
        """
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
        """Return the last step, of at most `num_steps`."""
        return num_steps if self.last_step is None else self.last_step

    def num_updates(self) -> int:
        """Return how many steps changed the weights: all that have a gradient at once, as where one is not finite none
        does. A weight that never has one is not updated."""
        return int(torch.stack([*self.update_count.values()]).max())

    def counters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COUNTERS}


def save_step(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Keep a state to resume from, and drop all but the last two, and the best weights that neither refers to."""
    optimizer = {f"{kind}/{name}": tensor for kind in MOMENTS for name, tensor in getattr(state, kind).items()}
    _write(folder / f"{STEP}-{state.step:08d}", state, record, optimizer)
    for kind in (STEP, BEST):
        for old in kept(folder, kind)[:-KEPT]:
            remove_checkpoint(old)


def save_best(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Keep the weights of the lowest validation loss so far."""
    _write(folder / f"{BEST}-{state.step:08d}", state, record)


def save_final(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Mark the training complete, and drop what only a resume would need."""
    _write(folder / "final", state, record)
    for old in [*kept(folder, STEP), *kept(folder, BEST)]:
        if old.name != f"{BEST}-{state.best_step:08d}":
            remove_checkpoint(old)


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of a training that is to be run again."""
    for old in [folder / "final", *kept(folder, STEP), *kept(folder, BEST)]:
        if old.exists():
            remove_checkpoint(old)


def kept(folder: Path, kind: str) -> list[Path]:
    """List the checkpoints of a kind, STEP or BEST, the oldest first."""
    paths = [path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-{NUMBER}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))


def is_final(folder: Path) -> bool:
    """True where the training that writes here is complete, be its checkpoint damaged or not."""
    return (folder / "final").exists()


def load_last(folder: Path, model: LanguageModel) -> TrainState | None:
    """Load the newest state in the folder into `model`; None where there is none.

    Raises:
        UserError: it is torn or altered; the message names the file and the older checkpoint that can be used.
    """
    steps = kept(folder, STEP)
    if not steps:
        return None
    try:
        check_sizes(steps[-1], model)
        content, weights, optimizer = read_files(steps[-1])
        counters = _counters(steps[-1], content)
    except UserError as error:
        # Without another state the whole run: a best checkpoint that is left would count as one of the new training.
        way_out = f"no older state is kept; delete {folder.parent}, and the same command trains from the start"
        if len(steps) > 1:
            way_out = f"delete {steps[-1]} to resume from {steps[-2].name}"
        raise UserError(f"{error}; {way_out}") from None
    state = TrainState.fresh(model)
    for name, value in counters.items():
        setattr(state, name, value)
    fill(dict(model.named_parameters()), weights, steps[-1])
    moments = {f"{kind}/{name}": tensor for kind in MOMENTS for name, tensor in getattr(state, kind).items()}
    fill(moments, optimizer, steps[-1])
    return state


def load_counters(folder: Path) -> dict[str, Any]:
    """Read the COUNTERS of a checkpoint.

    Raises:
        UserError: its state.json is missing, torn or altered.
    """
    with naming_the_way_out(folder):
        return _counters(folder, read_state(folder)[0])


def _counters(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Take the counters out of state.json, their names, types and signs checked."""
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
    """Return the folder of a finished training's checkpoint.

    Args:
        which: final, or best: that of the lowest validation loss.

    Raises:
        UserError: there is none.
    """
    folder = run / "checkpoint"
    if not is_final(folder):
        raise UserError(
            f"run={run}: has no finished training; the attnbench train command that made it goes on with it"
        )
    return best_folder(folder) if which == "best" else folder / "final"


def best_folder(folder: Path) -> Path:
    """The checkpoint of the lowest validation loss.

    Raises:
        UserError: there is none; the final one under its name would be another model.
    """
    best = kept(folder, BEST)
    if not best:
        raise UserError(f"{folder}: has no best-* checkpoint; rerun=true trains again")
    return best[-1]


def _write(target: Path, state: TrainState, record: ModelRecord, optimizer: dict[str, Tensor] | None = None) -> None:
    """Write a checkpoint folder under another name, state.json last, sync it, and rename it."""
    # Without parents: a run whose folder is gone must not leave a checkpoint alone in a new one.
    target.parent.mkdir(exist_ok=True)
    # What a run that was killed left half written or half removed: it may never come to the same step again.
    for stale in target.parent.glob(".*"):
        if UNFINISHED.fullmatch(stale.name):
            remove_checkpoint(stale)
    beside = target.with_name(f".{target.name}.partial")
    beside.mkdir()
    try:
        write_files(beside, state.model, record, state.counters(), optimizer)
    except OSError:
        # On a full disk what was written so far is in the way.
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if target.exists():
        remove_checkpoint(target)
    beside.rename(target)
    sync(target.parent)
