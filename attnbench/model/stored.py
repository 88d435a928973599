"""Trained model on disk: weights and the record that builds the model, without pickle.

    config.json weights.safetensors state.json, and optimizer.safetensors where a training resumes from it

`state.json` is written last and has the sha256 of every other file.
"""

import hashlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnbench.data.bpe import from_state
from attnbench.data.tokenizer import Tokenizer
from attnbench.machine.device import resolve_device
from attnbench.machine.precision import resolve_precision
from attnbench.model.building import build_meta, num_bytes, resolve_mixer, take_memory
from attnbench.model.language_model import LanguageModel
from attnbench.results.checkpoint_files import NEEDED, OPTIMIZER, WEIGHTS
from attnbench.results.files import sync
from attnbench.settings.check import check_argument, read
from attnbench.settings.earlier import current_mixer
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import MixerSettings, ModelSettings, setting
from attnbench.settings.untrusted import MAX_JSON_BYTES, open_regular, parse_json, read_bounded

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class ModelRecord:
    mixers: list[MixerSettings]
    """One a layer, backends resolved."""
    model: ModelSettings
    """After matching."""
    vocabulary: list[str]
    """Symbols of data.tokenizer=characters, otherwise empty."""
    vocabulary_size: int = setting(minimum=1, maximum=2**24)
    corpus: str
    seq_len: int = setting(minimum=1)
    precision: str
    match: str = "none"
    tokenizer: dict[str, Any] | None = None
    """State of another tokenizer: {"kind": "bytes"}, or {"kind": "bpe", "tokenizer": CONTENT OF tokenizer.json}."""


def tokenizer_of(record: ModelRecord) -> Tokenizer:
    """Raises ValueError if the record has none, or one with more ids than the model has symbols."""
    made = from_state(record.tokenizer or {"kind": "characters", "vocabulary": record.vocabulary})
    if made.size > record.vocabulary_size or (record.tokenizer is not None and record.vocabulary):
        raise ValueError(f"its tokenizer has {made.size} ids, its vocabulary_size is {record.vocabulary_size}")
    return made


def write_files(
    folder: Path,
    model: LanguageModel,
    record: ModelRecord,
    counters: Mapping[str, Any],
    optimizer: dict[str, Tensor] | None = None,
) -> None:
    """Write and sync the files of a new folder, state.json last, with `counters` in it."""
    _save_tensors({name: x.detach().contiguous() for name, x in kept_tensors(model).items()}, folder / WEIGHTS)
    if optimizer is not None:
        _save_tensors(optimizer, folder / OPTIMIZER)
    (folder / "config.json").write_text(json.dumps(asdict(record), ensure_ascii=False), encoding="utf-8")
    checksums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    content = {"format": FORMAT, **counters, "sha256": checksums}
    (folder / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        sync(path)


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint: parameters, and persistent buffers, which only layers from elsewhere have."""
    buffers, kept = dict(model.named_buffers()), model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: x for name, x in buffers.items() if name in kept}}


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    with as_other_files(path):
        save_file(tensors, path)


@contextmanager
def as_other_files(path: Path) -> Iterator[None]:
    """Give the file that safetensors writes inside the usual mode instead of 0600. Raises OSError if it cannot be
    written; the error of safetensors has no number and path."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        yield
        path.chmod(mode)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None


def load_model(
    folder: Path, *, device: torch.device | str = "cpu", mixers: Sequence[MixerSettings] | None = None
) -> tuple[LanguageModel, ModelRecord]:
    """Build a trained model from the checkpoint's record.

    Args:
        folder: a run's checkpoint/final, checkpoint/best-* or checkpoint/step-*.
        mixers: instead of the record's, with other backends, say; the weights must fit.
    """
    with naming_the_way_out(folder):
        _check_sum(folder / "config.json", read_state(folder)[1])
        record = _record(folder / "config.json")
    try:
        built = record.mixers if mixers is None else mixers
        model = build_meta(built, record.model, vocabulary_size=record.vocabulary_size)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    with naming_the_way_out(folder):
        check_sizes(folder, model)
        _, weights, _ = read_files(folder)
    # Before allocating what the record claims.
    _compare(kept_tensors(model), weights, folder)
    take_memory(model, device)
    fill(kept_tensors(model), weights, folder)
    return model, record


def load_checkpoint(
    folder: Path | str,
    *,
    device: str = "auto",
    precision: str = "auto",
    backend: str | Mapping[str, str] = "auto",
    trusted: Collection[str] = (),
) -> tuple[LanguageModel, ModelRecord]:
    """Load a trained model for this device, and its record with the backends and precision used here.

    Args:
        folder: a run, for its checkpoint/final; or that folder, or a checkpoint/best-<step>.
        device, precision, backend: as the settings `device`, `train.precision` and `attn.backend`; a hybrid's backends
            by name of its mixers, {"flash": "sdpa"}, the others auto.
        trusted: classes outside attnbench that may be built, beside those of a `compose([...], config_dir=...)`.
    """
    check_argument("folder", folder, Path | str, "the folder of a run")
    trust(trusted)
    final, resolved = Path(folder, "checkpoint", "final"), resolve_device(device)
    folder = final if final.is_dir() else Path(folder)
    record = load_record(folder)
    record.precision = resolve_precision(precision, resolved.type)
    backends = defaultdict(lambda: "auto", backend) if isinstance(backend, Mapping) else defaultdict(lambda: backend)
    record.mixers = [
        resolve_mixer(
            replace(mixer, options={**mixer.options, "backend": backends[mixer.name]}),
            record.model,
            device_type=resolved.type,
            precision=record.precision,
        )
        for mixer in record.mixers
    ]
    model, _ = load_model(folder, device=resolved, mixers=record.mixers)
    return model.eval(), record


def load_record(folder: Path) -> ModelRecord:
    """Read the record of a checkpoint without its checksum, which `load_model` checks."""
    with naming_the_way_out(folder):
        return _record(folder / "config.json")


@contextmanager
def naming_the_way_out(folder: Path) -> Iterator[None]:
    """Add the remedy to an error about a finished training's checkpoint; resuming has another one."""
    try:
        yield
    except UserError as error:
        if not folder.exists():
            raise UserError(
                f"{folder}: is not there, or was removed while it was read; the command that trained it trains it again"
            ) from None
        if folder.name != "final" and not folder.name.startswith("best-"):
            raise
        final = folder.parent / "final"
        raise UserError(f"{error}; once {final} is removed, the command that trained it trains again") from None


def check_sizes(folder: Path, model: LanguageModel) -> None:
    """Refuse a file larger than the model needs, before reading it."""
    header = 2**20 + 1024 * len(kept_tensors(model))
    # Two moments and a count of updates for each parameter, all float32.
    for name, copies in ((WEIGHTS, 1), (OPTIMIZER, 3)):
        path, most = folder / name, copies * num_bytes(model) + header
        if path.exists() and path.stat().st_size > most:
            raise UserError(
                f"{path}: {path.stat().st_size:,} bytes, and the model of its record needs at most {most:,}"
            )


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Read state.json, weights and optimizer tensors (perhaps none), checked by their checksums."""
    content, checksums = read_state(folder)
    try:
        for name in checksums:
            _check_sum(folder / name, checksums)
        weights = load_file(folder / WEIGHTS)
        optimizer = load_file(folder / OPTIMIZER) if OPTIMIZER in checksums else {}
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename or folder / WEIGHTS}: missing, so {folder} is no complete checkpoint"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: not a readable checkpoint ({error})") from None
    return content, weights, optimizer


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    path = folder / "state.json"
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
        version, checksums = content["format"], dict(content["sha256"])
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so {path.parent} is no complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: altered or torn ({error})") from None
    if version != FORMAT:
        raise UserError(f"{path}: format {version}, this attnbench reads format {FORMAT}")
    if not set(checksums) <= {*NEEDED, OPTIMIZER}:
        raise UserError(f"{path}: has checksums of files that do not belong to a checkpoint")
    for name in NEEDED:
        if name not in checksums:
            raise UserError(f"{path.parent / name}: not in a complete checkpoint, {path.name} has no checksum of it")
    return content, checksums


def _record(path: Path) -> ModelRecord:
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
        mixers = [current_mixer(read(MixerSettings, entry, "mixers")) for entry in content.pop("mixers")]
        record = read(ModelRecord, content, "record", given={"mixers": mixers})
        tokenizer_of(record)
        return record
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so {path.parent} is no complete checkpoint") from None
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a record of a model ({error})") from None


def fill(tensors: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    _compare(tensors, stored, folder)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])


def check_finite(model: LanguageModel, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{folder}: its weights {name} are not all finite; use another checkpoint, or train again")


def _compare(tensors: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    shapes, stored_shapes = ({name: x.shape for name, x in each.items()} for each in (tensors, stored))
    if shapes != stored_shapes:
        raise UserError(f"{folder}: its tensors are not those of the model that its record describes")


def _check_sum(path: Path, checksums: Mapping[str, str]) -> None:
    try:
        checksum = _sha256(path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so {path.parent} is no complete checkpoint") from None
    except OSError as error:
        raise UserError(f"{path.parent}: not a readable checkpoint ({error})") from None
    if checksum != checksums[path.name]:
        raise UserError(f"{path}: altered or torn, its checksum does not match state.json")


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
