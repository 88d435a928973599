"""From settings to a run with everything resolved: device, kernel, corpus, matched model, identity, folder."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbench.data.corpus import Corpus, load_corpus
from attnbench.machine.device import resolve_device
from attnbench.machine.precision import resolve_compile, resolve_precision
from attnbench.mixers.recipe import not_applicable
from attnbench.model.building import build_model, function_of
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import Matched, match_mixer
from attnbench.model.stored import ModelRecord, load_model
from attnbench.results.folder import data_root
from attnbench.results.identity import TRAINED, code_of, config_hash, hashed_options
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS
from attnbench.settings.combinations import LENGTHS
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import backends_of, classes_of, with_backends
from attnbench.settings.registry import class_named
from attnbench.settings.schema import (
    MAX_STEPS,
    EvaluationSettings,
    MixerSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from attnbench.settings.untrusted import MAX_YAML_BYTES, parse_yaml, read_bounded
from attnbench.training.checkpoint import best_folder, is_final

NOT_HASHED = ("log_interval_steps", "checkpoint_interval_seconds", *LENGTHS, "precision", "compile")
"""Training settings left out of the hash: they change no number, or their resolved value is hashed."""

TYPES_OF_RESOLVED = dict.fromkeys(("backend", "precision", "device", "corpus", "config_hash"), str) | {"compile": bool}
"""Resolved entries of a config.yaml that are part of the identity."""

OTHER_CODE = {"sources": "another source of its mixer", "numbers_version": "another version of attnbench"}


@dataclass(kw_only=True)
class Run:
    """A run with its open settings resolved."""

    settings: RunSettings
    device: torch.device
    precision: str
    compile: bool
    """True if training steps are compiled."""
    corpus: Corpus
    mixers: list[MixerSettings]
    matched: Matched
    num_steps: int
    validation_interval: int
    config_hash: str
    folder: Path

    def __getstate__(self) -> dict[str, Any]:
        # Another process reads the corpus itself: it may be too large for a pipe.
        return {**vars(self), "corpus": corpus_label(self.corpus)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        label, corpus = state["corpus"], load_corpus(state["settings"].data, state["settings"].seq_len, data_root())
        if corpus_label(corpus) != label:
            raise UserError(f"the corpus was {label} and is {corpus_label(corpus)} now")
        vars(self).update(state, corpus=corpus)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    def columns(self) -> dict[str, Any]:
        """See `results.job.Job.columns`."""
        return {
            "mixer": classes_of(self.mixers),
            "variant": self.settings.mixer.name,
            "backend": backends_of(self.mixers),
            "model": self.matched.model.name,
            "parameters": self.matched.parameters,
            "seq_len": self.settings.seq_len,
            "seed": self.settings.seed,
            "precision": self.precision,
            "corpus": corpus_label(self.corpus),
        }

    def record(self) -> ModelRecord:
        """The record of its checkpoints."""
        return ModelRecord(
            mixers=self.mixers,
            model=self.matched.model,
            vocabulary=list(self.corpus.vocabulary),
            vocabulary_size=self.corpus.vocabulary_size,
            tokenizer=self.corpus.tokenizer.state() if self.corpus.tokenizer.kind != "characters" else None,
            corpus=corpus_label(self.corpus),
            seq_len=self.settings.seq_len,
            precision=self.precision,
            match=self.settings.match,
        )

    @property
    def steps_per_epoch(self) -> int:
        return _steps_per_epoch(self.corpus, self.settings)

    @property
    def mixer(self) -> str:
        return self.settings.mixer.name

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def seq_len(self) -> int:
        return self.settings.seq_len

    @property
    def train(self) -> TrainSettings:
        return self.settings.train

    def builder(self, model: ModelSettings | None = None, seed: int | None = None) -> Callable[[], LanguageModel]:
        """Return a picklable builder of the matched model with initial weights.

        Args:
            model: another size; None: the run's own.
            seed: of the weights; None: the run's own.

        Raises:
            UserError: the size cannot be matched.
        """
        mixers, size = self.mixers, self.matched.model
        if model is not None:
            matched = _matched(self.settings, model, self.device, self.precision, self.corpus)
            mixers, size = matched.mixers, matched.model
        given = {"vocabulary_size": self.corpus.vocabulary_size, "device": self.device}
        return partial(build_model, mixers, size, seed=self.seed if seed is None else seed, **given)

    def new_model(self, model: ModelSettings | None = None, seed: int | None = None) -> LanguageModel:
        """Build the model by calling `builder`."""
        return self.builder(model, seed)()

    def trained_model(self, which: str = "final") -> LanguageModel:
        """Load the model of the run's `final` or `best` checkpoint."""
        folder = best_folder(self.checkpoints) if which == "best" else self.checkpoints / "final"
        model, _ = load_model(folder, device=self.device)
        return model


def prepare(settings: RunSettings) -> Run:
    """Load the corpus and resolve device, precision, backend, matching and identity; write nothing."""
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.train.precision, device.type)
    corpus = load_corpus(settings.data, settings.seq_len, data_root())
    matched = _matched(settings, settings.model, device, precision, corpus)
    steps_per_epoch = _steps_per_epoch(corpus, settings)
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


def _steps_per_epoch(corpus: Corpus, settings: RunSettings) -> int:
    num_blocks = (len(corpus.tokens["train"]) - 1) // settings.seq_len
    return max(1, num_blocks // settings.train.batch_size)


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
    """Return a copy with these settings (rate, seed, evaluations), and compute its hash and folder."""
    run = replace(prepared, settings=settings)
    run.config_hash = config_hash(_identity_of_training(run))
    name = f"{settings.mixer.name}-{settings.model.name}-T{settings.seq_len}-seed{settings.seed}-{run.config_hash}"
    run.folder = Path(settings.outputs_dir) / settings.experiment / name
    return run


def reopen(folder: Path, settings: RunSettings) -> Run:
    """Open a finished run on the device of the settings.

    Raises:
        UserError: there is no finished training, or settings, corpus or code are not those of the training.
    """
    if not is_final(folder / "checkpoint"):
        raise UserError(f"run={folder}: has no finished training; the attnbench train command that made it resumes it")
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
    if config_hash(_identity_of_training(trained)) != hashed:
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
    """Refuse a run that was trained by other code.

    Args:
        parts: of `code_of_training`; sources are those of classes outside attnbench.

    Raises:
        UserError: it was, or its config.yaml is incomplete.
    """
    resolved, code = _resolved_of(folder), code_of_training(mixers)
    for name in parts:
        if resolved.get(name, {}) != code.get(name, {}):
            raise UserError(
                f"run={folder}: was trained by {OTHER_CODE[name]}, whose numbers are not those of this one; the "
                "attnbench train command that made it trains it anew"
            )


def _matched(
    settings: RunSettings, model: ModelSettings, device: torch.device, precision: str, corpus: Corpus
) -> Matched:
    return match_mixer(
        settings.mixer,
        model,
        device_type=device.type,
        precision=precision,
        match=settings.match,
        match_by=settings.match_by,
        seq_len=settings.seq_len,
        vocabulary_size=corpus.vocabulary_size,
    )


def _identity_of_training(prepared: Run) -> dict[str, Any]:
    """Everything that can change the numbers of this training."""
    training = {key: value for key, value in asdict(prepared.settings.train).items() if key not in NOT_HASHED}
    return {
        "mixers": [{"target": mixer.target, **hashed_options(mixer.options)} for mixer in prepared.mixers],
        "model": hashed_model(prepared.matched.model, prepared.matched),
        "data": {"fingerprint": prepared.corpus.fingerprint, "vocabulary_size": prepared.corpus.vocabulary_size},
        "train": {**training, "num_steps": prepared.num_steps, "compile": prepared.compile},
        "precision": prepared.precision,
        "device": prepared.device.type,
        "seq_len": prepared.settings.seq_len,
        "seed": prepared.settings.seed,
        **code_of_training(prepared.mixers),
    }


def function_hash(prepared: Run) -> str:
    """The `config_hash` without the kernel, the same for mixers that compute one function."""
    functions = [function_of(mixer) for mixer in prepared.mixers]
    return config_hash({**_identity_of_training(prepared), "mixers": functions})


def code_of_training(mixers: Sequence[MixerSettings]) -> dict[str, Any]:
    """See `identity.code_of`."""
    return code_of([class_named(mixer) for mixer in mixers], TRAINED)


def hashed_model(model: ModelSettings, matched: Matched | None) -> dict[str, Any]:
    """The settings of a model that change its numbers, and the number of branches if it is not two per layer."""
    settings = {key: value for key, value in asdict(model).items() if key not in ("name", "parameters")}
    num_branches = matched.num_branches if matched is not None else None
    settings["dropout"] = model.dropout or None
    return {**settings, "num_branches": None if num_branches == 2 * model.num_layers else num_branches}


def resolved_config(prepared: Run) -> dict[str, Any]:
    """The given settings and the resolved ones."""
    given = asdict(prepared.settings)
    del given["rerun"]
    return {
        **given,
        "resolved": {
            "backend": backends_of(prepared.mixers),
            "precision": prepared.precision,
            "compile": prepared.compile,
            "device": str(prepared.device),
            "num_steps": prepared.num_steps,
            "feed_forward_width": prepared.matched.model.feed_forward_width,
            "parameters": prepared.matched.parameters,
            "corpus": corpus_label(prepared.corpus),
            "vocabulary_size": prepared.corpus.vocabulary_size,
            "num_unknown": prepared.corpus.num_unknown,
            "num_bytes": {split: sizes.num_bytes for split, sizes in prepared.corpus.splits.items()},
            "config_hash": prepared.config_hash,
            **code_of_training(prepared.mixers),
        },
    }


def mixer_options(mixers: Sequence[MixerSettings]) -> Any:
    """The options of the mixer without its kernel; a list by layer if layers differ."""
    options = [{name: value for name, value in mixer.options.items() if name != "backend"} for mixer in mixers]
    return options[0] if all(other == options[0] for other in options) else options


def row_settings(prepared: Run, evaluation: EvaluationSettings | None = None) -> dict[str, Any]:
    """Settings of all rows of a run, and of an evaluation of it."""
    options = {EVALUATION_OPTIONS: evaluation.options} if evaluation is not None else {}
    dropout = prepared.settings.model.dropout
    axes = {"dropout": dropout} if dropout else {}
    return {**recipe_settings(prepared.settings), **axes, MIXER_OPTIONS: mixer_options(prepared.mixers), **options}


def recipe_settings(settings: RunSettings, lacking: Collection[str] = ()) -> dict[str, Any]:
    """Settings of rows on the recipe: its name, and the parts that the mixer has no setting for.

    Args:
        lacking: such parts that were asked for otherwise.
    """
    parts = sorted({*lacking, *not_applicable(settings.mixer, settings.recipe)})
    named = {"recipe": settings.recipe.name} if settings.recipe is not None else {}
    return {**named, **({"not_applicable": parts} if parts else {})}


def corpus_label(corpus: Corpus) -> str:
    """Name and fingerprint: equal labels mean equal text."""
    return f"{corpus.name}@{corpus.fingerprint}"
