"""From settings to a run with everything resolved."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnbench.data.corpus import load_corpus
from attnbench.machine.device import resolve_device
from attnbench.machine.precision import resolve_compile, resolve_precision
from attnbench.results.folder import data_root
from attnbench.results.identity import config_hash
from attnbench.settings.check import check_argument
from attnbench.settings.combinations import LENGTHS
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import with_backends
from attnbench.settings.schema import MAX_STEPS, MixerSettings, RunSettings
from attnbench.settings.untrusted import MAX_YAML_BYTES, parse_yaml, read_bounded
from attnbench.training.checkpoint import checkpoint_of
from attnbench.training.job import Run, code_of_training, corpus_label, epoch_steps, matched_model

TYPES_OF_RESOLVED = dict.fromkeys(("backend", "precision", "device", "corpus", "config_hash"), str) | {"compile": bool}
"""Resolved entries of a config.yaml that are part of the identity."""

OTHER_CODE = {"sources": "another source of its mixer", "numbers_version": "another version of attnbench"}


def prepare(settings: RunSettings) -> Run:
    """Load the corpus and resolve device, precision, backend, matching and identity; write nothing."""
    check_argument("settings", settings, RunSettings, 'settings that compose made: prepare(compose("attn=softmax"))')
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.train.precision, device.type)
    corpus = load_corpus(settings.data, settings.seq_len, data_root())
    matched = matched_model(settings, settings.model, device, precision, corpus)
    steps_per_epoch = epoch_steps(corpus, settings)
    num_steps = _num_steps(settings, steps_per_epoch)
    prepared = Run(
        settings=settings,
        device=device,
        precision=precision,
        compile=resolve_compile(settings.train.compile, device.type),
        corpus=corpus,
        mixers=matched.mixers,
        matched=matched,
        num_steps=num_steps,
        validation_interval=settings.train.validation_interval_steps or min(steps_per_epoch, num_steps),
        config_hash="",
        folder=Path(),
    )
    return with_identity(prepared, settings)


def _num_steps(settings: RunSettings, steps_per_epoch: int) -> int:
    train = settings.train
    num_steps = train.num_steps or steps_per_epoch * (train.num_epochs or 1)
    if train.num_tokens is not None:
        num_steps = math.ceil(train.num_tokens / (train.batch_size * settings.seq_len))
    if num_steps > MAX_STEPS:
        given = next(name for name in LENGTHS if getattr(train, name) is not None)
        raise UserError(f"train.{given}={getattr(train, given)}: {num_steps} steps, at most {MAX_STEPS} are made")
    return num_steps


def with_identity(prepared: Run, settings: RunSettings) -> Run:
    """Return a copy with these settings (rate, seed, evaluations), its hash and folder."""
    run = replace(prepared, settings=settings)
    run.config_hash = config_hash(run.content())
    name = f"{settings.mixer.name}-{settings.model.name}-T{settings.seq_len}-seed{settings.seed}-{run.config_hash}"
    run.folder = Path(settings.outputs_dir) / settings.experiment / name
    return run


def reopen(folder: Path, settings: RunSettings) -> Run:
    """Open a finished run on the device of the settings.

    Raises:
        UserError: there is no finished training, or settings, corpus or code are not those of the training.
    """
    checkpoint_of(folder, "final")
    resolved = _resolved_of(folder)
    hashed, corpus = resolved["config_hash"], resolved["corpus"]
    prepared = prepare(settings)
    check_code(folder, prepared.mixers, ("sources", "numbers_version"))
    if corpus_label(prepared.corpus) != corpus:
        raise UserError(f"run={folder}: was trained on {corpus}, and {corpus_label(prepared.corpus)} is what is found")
    trained = replace(
        prepared,
        mixers=with_backends(prepared.mixers, resolved["backend"]),
        device=torch.device(resolved["device"]),
        precision=resolved["precision"],
        compile=resolved["compile"],
    )
    if config_hash(trained.content()) != hashed:
        raise UserError(
            f"{folder / 'config.yaml'}: does not describe the training {hashed} as this version of attnbench makes it; "
            "was it altered?"
        )
    prepared.folder, prepared.config_hash = folder, hashed
    return prepared


def _resolved_of(folder: Path) -> dict[str, Any]:
    try:
        resolved = parse_yaml(read_bounded(folder / "config.yaml", MAX_YAML_BYTES))["resolved"]
        for name, kind in TYPES_OF_RESOLVED.items():
            if not isinstance(resolved[name], kind):
                raise TypeError(f"resolved.{name}={resolved[name]}")
        torch.device(resolved["device"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{folder / 'config.yaml'}: does not say what was trained ({error})") from None
    return resolved


def check_code(folder: Path, mixers: Sequence[MixerSettings], parts: Sequence[str] = ("sources",)) -> None:
    """Refuse a run that was trained by other code, or whose config.yaml is incomplete.

    Args:
        parts: of `code_of_training`; sources are those of classes outside attnbench.
    """
    resolved, code = _resolved_of(folder), code_of_training(mixers)
    for name in parts:
        if resolved.get(name, {}) != code.get(name, {}):
            raise UserError(
                f"run={folder}: was trained by {OTHER_CODE[name]}, whose numbers are not those of this one; the "
                "attnbench train command that made it trains it anew"
            )
