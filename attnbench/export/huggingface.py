"""Folder of a trained model that Hugging Face's transformers loads without attnbench.

config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
modeling_attnbench.py and the files that it imports, README.md results.csv LICENSE
"""

import errno
import inspect
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from attnbench.export.card import model_card
from attnbench.export.sources import copied_sources, read_source
from attnbench.export.tokenizer import tokenizer_files
from attnbench.export.torch_form import BACKEND
from attnbench.machine.environment import is_checkout
from attnbench.mixers.adapter import Adapter
from attnbench.mixers.base import Mixer
from attnbench.model.building import function_of, layer_sizes
from attnbench.model.stored import ModelRecord, as_other_files, check_finite, load_model, load_record, tokenizer_of
from attnbench.results.files import sync
from attnbench.results.folder import ROOT
from attnbench.results.row_tables import write_csv
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import parts_of
from attnbench.settings.paths import user_path
from attnbench.settings.registry import class_named, resolve
from attnbench.settings.schema import ExportSettings, MixerSettings, RunSettings
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.prepare import check_code

log = logging.getLogger(__name__)

MODELING, MIXERS = "attnbench.export.modeling", "attnbench.export.mixers"


def export_run(settings: ExportSettings, trained: RunSettings) -> Path:
    """Export a run to a temporary folder and rename that to its target; `trained` is the run's config.yaml."""
    run = Path(settings.run).absolute()
    target = run / settings.format if settings.to is None else user_path(settings.to).absolute()
    there = UserError(f"to={target}: exists and is not an empty folder; remove it or name another")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise there
    for mixer in parts_of(trained.mixer).values():
        _refuse_adapter(mixer)
    checkpoint = checkpoint_of(run, settings.checkpoint)
    record = load_record(checkpoint)
    mixers = [in_torch(mixer) for mixer in record.mixers]
    check_code(run, record.mixers)
    record.mixers = mixers
    model, _ = load_model(checkpoint, mixers=record.mixers)
    check_finite(model, checkpoint)
    rows = read_folders([run])
    texts = {
        **source_files(record.mixers),
        "config.json": json.dumps(configuration(record), indent=2) + "\n",
        "generation_config.json": json.dumps(generation(record), indent=2) + "\n",
        **tokenizer_files(tokenizer_of(record)),
        "README.md": model_card(run, trained, record, rows, settings, model.num_parameters()),
        "LICENSE": _licence(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, because renaming needs one file system; one level deeper, because only its owner can read
    # tempfile's folder.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as temporary:
        made = Path(temporary) / settings.format
        made.mkdir()
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        write_csv(rows, made / "results.csv")
        tensors = {f"model.{name}": x.detach().contiguous() for name, x in model.named_parameters()}
        weights = made / "model.safetensors"
        with as_other_files(weights):
            save_file(tensors, weights, metadata={"format": "pt"})
        for path in [*made.iterdir(), made]:
            sync(path)
        try:
            # Replaces an empty folder; the second of two concurrent exports fails.
            made.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise there from None
            raise
    sync(target.parent)
    log.info(f"{target}/: {model.num_parameters():,} weights of {run.name}, checkpoint {settings.checkpoint}")
    return target


def _refuse_adapter(mixer: MixerSettings) -> None:
    if issubclass(resolve(mixer.target, Mixer), Adapter):
        raise UserError(
            f"attn={mixer.name}: contains {class_named(mixer)}, a layer of another library, which is not exported; "
            "attnbench's own mixers are"
        )


def in_torch(mixer: MixerSettings) -> MixerSettings:
    _refuse_adapter(mixer)
    cls = resolve(mixer.target, Mixer)
    options = {**mixer.options, "backend": BACKEND}
    if BACKEND in cls.backends:
        return replace(mixer, options=options)
    same = function_of(mixer)
    target = str(same.pop("target"))
    if target == mixer.target or BACKEND not in resolve(target, Mixer).backends:
        raise UserError(
            f"attn={mixer.name}: {cls.__name__} with these options has {', '.join(cls.backends)} but no form in torch "
            "alone, which an exported model needs"
        )
    return replace(mixer, target=target, options={**same, "backend": BACKEND})


def source_files(mixers: Sequence[MixerSettings]) -> dict[str, str]:
    targets = list(dict.fromkeys(mixer.target for mixer in mixers))
    own = frozenset({"attnbench", *(target.partition(".")[0] for target in targets)})
    return copied_sources({MODELING: read_source(MODELING), MIXERS: _table(targets)}, own)


def _table(targets: Sequence[str]) -> str:
    names = [target.rpartition(".")[2] for target in targets]
    if len(set(names)) < len(names):
        raise UserError(f"attn: two mixers of one model have the class name {max(names, key=names.count)}; rename one")
    imports = (f"from {target.rpartition('.')[0]} import {name}" for target, name in zip(targets, names, strict=True))
    entries = ", ".join(f'"{name}": {name}' for name in names)
    docstring = '"""Mixers of this model by the names of their classes."""'
    return "\n".join([docstring, "", *imports, "", f"MIXERS = {{{entries}}}", ""])


def configuration(record: ModelRecord) -> dict[str, Any]:
    return {
        "architectures": ["AttnbenchForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_attnbench.AttnbenchConfig",
            "AutoModelForCausalLM": "modeling_attnbench.AttnbenchForCausalLM",
        },
        "model_type": "attnbench",
        "dtype": "float32",
        "vocab_size": record.vocabulary_size,
        "hidden_size": record.model.dim,
        "feed_forward_width": record.model.feed_forward_width,
        **({"norm": record.model.norm} if record.model.norm else {}),
        **({"untied": True} if record.model.untied else {}),
        "trained_length": record.seq_len,
        "mixers": [
            {"class": mixer.target.rpartition(".")[2], "options": _options(mixer, layer_sizes(record.model, layer))}
            for layer, mixer in enumerate(record.mixers)
        ],
    }


def _options(mixer: MixerSettings, sizes: dict[str, Any]) -> dict[str, Any]:
    wanted = inspect.signature(resolve(mixer.target, Mixer)).parameters
    return {**{name: value for name, value in sizes.items() if name in wanted}, **mixer.options}


def generation(record: ModelRecord) -> dict[str, Any]:
    """Return the content of generation_config.json: greedy, without symbols that stand for no text."""
    never = list(range(tokenizer_of(record).num_writable, record.vocabulary_size))
    return {"do_sample": False, **({"suppress_tokens": never} if never else {})}


def _licence() -> str:
    path = ROOT / "LICENSE"
    if is_checkout(ROOT) and path.is_file():
        return path.read_text(encoding="utf-8")
    return metadata.distribution("attnbench").read_text("licenses/LICENSE") or ""
