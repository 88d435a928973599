"""Folder of a trained model for Hugging Face's transformers, which loads it where attnbench is not installed.

config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
modeling_attnbench.py and what it imports, README.md results.csv LICENSE
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
from attnbench.settings.registry import class_named, resolve
from attnbench.settings.schema import ExportSettings, MixerSettings, RunSettings
from attnbench.settings.text import user_path
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.prepare import check_code

log = logging.getLogger(__name__)

MODELING, MIXERS = "attnbench.export.modeling", "attnbench.export.mixers"


def export_run(settings: ExportSettings, trained: RunSettings) -> Path:
    """Make the folder under a name of its own, rename it to its target, and return it.

    Args:
        trained: the settings in the run's config.yaml.

    Raises:
        UserError: a target that is there and not empty, no finished training, weights that are not finite, or a mixer
            that cannot be exported.
    """
    run = Path(settings.run).absolute()
    target = run / settings.format if settings.to is None else user_path(settings.to).absolute()
    there = UserError(f"to={target}: is there already, and is no empty folder; remove it or name another")
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
        **tokenizer_files(tokenizer_of(record)),
        "config.json": _as_json(configuration(record)),
        "generation_config.json": _as_json(generation(record)),
        "README.md": model_card(run, trained, record, rows, settings, model.num_parameters()),
        "LICENSE": _licence(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a folder is renamed inside one file system alone; inside one more, because that of
    # tempfile can be read by its owner alone.
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
            # An empty folder gives way. Of two exports to one target the second finds that of the first.
            made.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise there from None
            raise
    sync(target.parent)
    log.info(f"{target}/: {model.num_parameters():,} weights of {run.name}, checkpoint {settings.checkpoint}")
    return target


def _refuse_adapter(mixer: MixerSettings) -> None:
    """Refuse a mixer that is a layer of somebody else, whose code is not attnbench's to copy."""
    if issubclass(resolve(mixer.target, Mixer), Adapter):
        raise UserError(
            f"attn={mixer.name}: holds {class_named(mixer)}, a layer of another library, which is not exported; "
            "attnbench's own mixers are"
        )


def in_torch(mixer: MixerSettings) -> MixerSettings:
    """Return the settings of the same function computed by torch alone.

    Raises:
        UserError: it has no such form.
    """
    _refuse_adapter(mixer)
    cls = resolve(mixer.target, Mixer)
    options = {**mixer.options, "backend": BACKEND}
    if BACKEND in cls.backends:
        return replace(mixer, options=options)
    same = function_of(mixer)
    target = str(same.pop("target"))
    if target == mixer.target or BACKEND not in resolve(target, Mixer).backends:
        raise UserError(
            f"attn={mixer.name}: {cls.__name__} with these options has {', '.join(cls.backends)} and no form in torch "
            "alone, which is what an exported model has"
        )
    return replace(mixer, target=target, options={**same, "backend": BACKEND})


def source_files(mixers: Sequence[MixerSettings]) -> dict[str, str]:
    """Return the text of every Python file of a model by its name."""
    targets = list(dict.fromkeys(mixer.target for mixer in mixers))
    own = frozenset({"attnbench", *(target.partition(".")[0] for target in targets)})
    return copied_sources({MODELING: read_source(MODELING), MIXERS: _table(targets)}, own)


def _table(targets: Sequence[str]) -> str:
    """Write the module that names the mixers of one model."""
    names = [target.rpartition(".")[2] for target in targets]
    if len(set(names)) < len(names):
        raise UserError(f"attn: two mixers of one model have the class name {max(names, key=names.count)}; rename one")
    imports = (f"from {target.rpartition('.')[0]} import {name}" for target, name in zip(targets, names, strict=True))
    entries = ", ".join(f'"{name}": {name}' for name in names)
    docstring = '"""Mixers of this model by the names of their classes."""'
    return "\n".join([docstring, "", *imports, "", f"MIXERS = {{{entries}}}", ""])


def configuration(record: ModelRecord) -> dict[str, Any]:
    """Return the content of config.json, see `AttnbenchConfig`."""
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
        "trained_length": record.seq_len,
        "mixers": [
            {"class": mixer.target.rpartition(".")[2], "options": _options(mixer, layer_sizes(record.model, layer))}
            for layer, mixer in enumerate(record.mixers)
        ],
    }


def _options(mixer: MixerSettings, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return all that the constructor of a mixer is given."""
    wanted = inspect.signature(resolve(mixer.target, Mixer)).parameters
    return {**{name: value for name, value in sizes.items() if name in wanted}, **mixer.options}


def generation(record: ModelRecord) -> dict[str, Any]:
    """Return the content of generation_config.json: greedy, and never a symbol that stands for no text."""
    never = list(range(tokenizer_of(record).num_writable, record.vocabulary_size))
    return {"do_sample": False, **({"suppress_tokens": never} if never else {})}


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _licence() -> str:
    """Return the licence of the copied code, of the checkout or of the installed package."""
    path = ROOT / "LICENSE"
    if is_checkout(ROOT) and path.is_file():
        return path.read_text(encoding="utf-8")
    return metadata.distribution("attnbench").read_text("licenses/LICENSE") or ""
