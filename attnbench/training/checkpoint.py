"""What a training is made of between two steps, and how it is kept: atomic, checksummed, without pickle.

    checkpoint/
      step-00000640/   config.json weights.safetensors optimizer.safetensors state.json   resumes; the last two are kept
      best-00000640/   config.json weights.safetensors state.json                         lowest validation loss
      final/           the same, when the training is complete

Whatever else lies there, a copy step-00000640.bak say, is the user's own, and neither read nor touched.

`state.json` is written last and holds the sha256 of every other file: an altered one is an error that says which, and
the checkpoint before it still loads. The folder is written beside, synced, then renamed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnbench.machine.memory import check_free
from attnbench.model.language_model import LanguageModel, build_meta, num_bytes
from attnbench.results.files import sync
from attnbench.settings.check import check, check_options
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings, ModelSettings, setting
from attnbench.settings.text import MAX_JSON_BYTES, open_regular, parse_json, read_bounded

FORMAT = 1
KEPT = 2
STEP, BEST = "step", "best"
NUMBER = r"([0-9]{8}|[1-9][0-9]{8,})"
"""The step in the name of a checkpoint."""
UNFINISHED = re.compile(rf"\.(final|({STEP}|{BEST})-{NUMBER})\.(partial|removed)")
"""Names of a checkpoint while it is written, and while it is removed."""
MOST_HEADER_BYTES = 2**24
"""Of a safetensors file; one of ours has a hundred a tensor."""
NEEDED, OPTIMIZER = ("config.json", "weights.safetensors"), "optimizer.safetensors"
COUNTERS = (
    *("step", "seconds", "warm_steps", "warm_seconds", "shared_device", "best_step", "best_nats", "num_metrics_rows"),
    "validation_due",
)
LATER_COUNTERS = ("shared_device", "num_metrics_rows", "validation_due")
"""Those that the first checkpoints of this format came without."""


@dataclass(slots=True, kw_only=True)
class ModelRecord:
    """All that is needed to build a trained model again, and to read its output."""

    mixers: list[MixerSettings]
    """One a layer, backends resolved."""
    model: ModelSettings
    """After matching."""
    vocabulary: list[str]
    vocabulary_size: int = setting(minimum=1, maximum=2**24)
    corpus: str
    seq_len: int = setting(minimum=1)
    precision: str
    match: str = "none"


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
    warm_steps: int = 0
    warm_seconds: float = 0.0
    """The same without each sitting's first step, which compiles."""
    shared_device: bool = False
    """Others ran on the device during one of the sittings: the seconds are no speed."""
    best_step: int = 0
    best_nats: float | None = None
    """Validation nats a character at `best_step`."""
    num_metrics_rows: int | None = None
    """Of metrics.jsonl, when this was last kept; None where a former version kept it."""
    validation_due: bool = False
    """A stop cut off the validation of this step."""

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

    def counters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COUNTERS}


def save_step(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Keeps a state to resume from, and drops all but the last two, and the best weights that neither refers to."""
    optimizer = {
        f"{kind}/{name}": tensor
        for kind in ("first_moment", "second_moment", "update_count")
        for name, tensor in getattr(state, kind).items()
    }
    _write(folder / f"{STEP}-{state.step:08d}", state, record, optimizer)
    for kind in (STEP, BEST):
        for old in kept(folder, kind)[:-KEPT]:
            _remove(old)


def save_best(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Keeps the weights of the lowest validation loss so far."""
    _write(folder / f"{BEST}-{state.step:08d}", state, record)


def save_final(folder: Path, state: TrainState, record: ModelRecord) -> None:
    """Marks the training complete; what only a resume would need is dropped."""
    _write(folder / "final", state, record)
    for old in [*kept(folder, STEP), *kept(folder, BEST)]:
        if old.name != f"{BEST}-{state.best_step:08d}":
            _remove(old)


def remove_all(folder: Path) -> None:
    """Removes the checkpoints of a training that is to be run again."""
    final = folder / "final"
    for old in [*([final] if final.exists() else []), *kept(folder, STEP), *kept(folder, BEST)]:
        _remove(old)


def kept(folder: Path, kind: str) -> list[Path]:
    """The checkpoints of a kind, STEP or BEST, the oldest first."""
    found = [path for path in folder.glob(f"{kind}-*") if re.fullmatch(rf"{kind}-{NUMBER}", path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def is_final(folder: Path) -> bool:
    """True where the training that writes here is complete, be its checkpoint damaged or not."""
    return (folder / "final").exists()


def load_last(folder: Path, model: LanguageModel) -> TrainState | None:
    """The newest state in the folder, into `model`; None where there is none.

    Raises:
        UserError: it is torn or altered; the message names the file and the older checkpoint that can be used.
    """
    steps = kept(folder, STEP)
    if not steps:
        return None
    try:
        counters, weights, optimizer = _read(steps[-1])
    except UserError as error:
        way_out = (
            f"delete {steps[-1]} to resume from {steps[-2].name}" if len(steps) > 1 else "delete it to start again"
        )
        raise UserError(f"{error}; {way_out}") from None
    state = TrainState.fresh(model)
    for name, value in counters.items():
        setattr(state, name, value)
    _fill(dict(model.named_parameters()), weights, steps[-1])
    for kind in ("first_moment", "second_moment", "update_count"):
        own = {
            name.removeprefix(f"{kind}/"): tensor for name, tensor in optimizer.items() if name.startswith(f"{kind}/")
        }
        _fill(getattr(state, kind), own, steps[-1])
    return state


def load_record(folder: Path) -> ModelRecord:
    """What a checkpoint says of its model; `load_model` tells whether it was altered.

    Raises:
        UserError: it cannot be read, or is no record.
    """
    with _naming_the_way_out(folder):
        return _record(folder / "config.json")


def load_counters(folder: Path) -> dict[str, Any]:
    """The `COUNTERS` of a checkpoint; those of LATER_COUNTERS may be missing.

    Raises:
        UserError: its state.json is missing, torn or altered.
    """
    with _naming_the_way_out(folder):
        content = _read_state(folder / "state.json")
        missing = set(COUNTERS) - set(LATER_COUNTERS) - set(content)
        if missing:
            raise UserError(f"{folder / 'state.json'}: has no {', '.join(sorted(missing))}")
    return {name: content[name] for name in COUNTERS if name in content}


@contextmanager
def _naming_the_way_out(folder: Path) -> Iterator[None]:
    """Add the way out to what is wrong with a finished training's checkpoint; load_last knows that of the others."""
    try:
        yield
    except UserError as error:
        if folder.name != "final" and not folder.name.startswith(BEST):
            raise
        final = folder.parent / "final"
        raise UserError(f"{error}; once {final} is removed, the command that trained it trains again") from None


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    mixers: Sequence[MixerSettings] | None = None,
) -> tuple[LanguageModel, ModelRecord]:
    """A trained model, built again from the checkpoint's own record.

    Args:
        folder: one of a run's checkpoint/final, checkpoint/best-* or checkpoint/step-*.
        mixers: in place of the record's, with other kernels say; the weights must fit.

    Raises:
        UserError: a missing, torn, altered or foreign file, or a class that may not be built.
    """
    with _naming_the_way_out(folder):
        _, weights, _ = _read(folder)
        record = _record(folder / "config.json")
    try:
        model = build_meta(
            record.mixers if mixers is None else mixers,
            record.model,
            vocabulary_size=record.vocabulary_size,
        )
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    # Before memory is taken for what the record only claims.
    _compare(dict(model.named_parameters()), weights, folder)
    model.to_empty(device=device)
    _fill(dict(model.named_parameters()), weights, folder)
    return model, record


def best_folder(folder: Path) -> Path:
    """The checkpoint of the lowest validation loss.

    Raises:
        UserError: there is none; the final one under its name would be another model.
    """
    found = kept(folder, BEST)
    if not found:
        raise UserError(f"{folder}: has no best-* checkpoint; rerun=true trains again")
    return found[-1]


def _write(target: Path, state: TrainState, record: ModelRecord, optimizer: dict[str, Tensor] | None = None) -> None:
    """Writes a checkpoint folder beside its place, syncs it, and renames it into place."""
    # Without parents: a run whose folder is gone must not leave a checkpoint alone in a new one.
    target.parent.mkdir(exist_ok=True)
    # What a run that was killed left half written or half removed: it may never come to the same step again.
    for stale in target.parent.glob(".*"):
        if UNFINISHED.fullmatch(stale.name):
            _discard(stale)
    beside = target.with_name(f".{target.name}.partial")
    beside.mkdir()
    try:
        _fill_folder(beside, state, record, optimizer)
    except OSError:
        # On a full disk what was written so far is in the way.
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if target.exists():
        _remove(target)
    beside.rename(target)
    sync(target.parent)


def _fill_folder(
    beside: Path, state: TrainState, record: ModelRecord, optimizer: dict[str, Tensor] | None = None
) -> None:
    """Writes a checkpoint's files, state.json last, and syncs them."""
    weights = {name: tensor.detach().contiguous() for name, tensor in _weights(state.model)}
    _save_tensors(weights, beside / "weights.safetensors")
    if optimizer is not None:
        _save_tensors(optimizer, beside / OPTIMIZER)
    (beside / "config.json").write_text(json.dumps(asdict(record), ensure_ascii=False), encoding="utf-8")
    checksums = {path.name: _sha256(path) for path in sorted(beside.iterdir())}
    content = {"format": FORMAT, **state.counters(), "sha256": checksums}
    (beside / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for path in [*beside.iterdir(), beside]:
        sync(path)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: it cannot be written; the library's own error has no number and no name.
    """
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None


def _remove(folder: Path) -> None:
    """Removes a checkpoint; one that has its name is whole, also where the removal is cut off."""
    hidden = folder.with_name(f".{folder.name}.removed")
    folder.rename(hidden)
    _discard(hidden)


def _discard(path: Path) -> None:
    """Removes a folder; of a link to one the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _weights(model: LanguageModel) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Counters, weights and optimizer tensors (none in a best or final checkpoint), all checked."""
    content = _read_state(folder / "state.json")
    checksums = content["sha256"]
    try:
        for name, expected in checksums.items():
            if _sha256(folder / name) != expected:
                raise UserError(f"{folder / name}: altered or torn, its checksum does not match state.json")
        weights = _tensors(folder / "weights.safetensors")
        optimizer = _tensors(folder / OPTIMIZER) if OPTIMIZER in checksums else {}
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: missing, so {folder} is no complete checkpoint") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: not a readable checkpoint ({error})") from None
    return {name: content[name] for name in COUNTERS if name in content}, weights, optimizer


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, whose header says how long it is before anything else."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:
        raise UserError(f"{path}: a header of {length} bytes, more than the {MOST_HEADER_BYTES} that one may have")
    return load_file(path)


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json, its format as it should be."""
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
        version, checksums = content["format"], dict(content["sha256"])
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so {path.parent} is no complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: altered or torn ({error})") from None
    if version != FORMAT:
        raise UserError(f"{path}: format {version}, this attnbench reads format {FORMAT}")
    counters = {name: content[name] for name in COUNTERS if name in content}
    try:
        check_options(TrainState, counters, given=[entry.name for entry in fields(TrainState)], group="")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if any(value is not None and value < 0 for value in counters.values()):
        raise UserError(f"{path}: a counter is below 0")
    if not set(checksums) <= {*NEEDED, OPTIMIZER}:
        raise UserError(f"{path}: has checksums of files that are none of a checkpoint's")
    for name in NEEDED:
        if name not in checksums:
            raise UserError(f"{path.parent / name}: not in a complete checkpoint, {path.name} has no checksum of it")
    return content


def _record(path: Path) -> ModelRecord:
    """The record in a checkpoint, its names, types and numbers checked like a configuration's."""
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
        mixers = content.pop("mixers")
        model = content.pop("model")
        for entry in mixers:
            check_options(MixerSettings, entry, group="mixers")
        check_options(ModelSettings, model, group="model")
        check_options(ModelRecord, content, given=("mixers", "model"), group="record")
        built = ModelSettings(**model)
        check(built, "model.")
        record = ModelRecord(mixers=[MixerSettings(**entry) for entry in mixers], model=built, **content)
        check(record)
        if any(len(symbol) != 1 for symbol in record.vocabulary) or len(record.vocabulary) > record.vocabulary_size:
            raise ValueError("its vocabulary is no list of single characters, or longer than vocabulary_size")
        return record
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so {path.parent} is no complete checkpoint") from None
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a record of a model ({error})") from None


def _fill(own: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    """Copies stored tensors into existing ones of the same names and shapes."""
    _compare(own, stored, folder)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def _compare(own: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
        raise UserError(f"{folder}: its tensors are not those of the model that its record describes")


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
