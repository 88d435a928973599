"""From settings to one training of a probe's task with everything resolved: kernel, size, rate, seed, folder.

outputs/<experiment>/cells/<evaluation>-<variant>-<task>-lr<rate>-seed<n>-<hash>/
"""

import inspect
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnbench.evals.base import Probe, Task
from attnbench.machine.device import resolve_device, resolve_precision
from attnbench.mixers.base import Mixer
from attnbench.model.language_model import function_of, resolve_mixer
from attnbench.model.matching import Matched, match_model
from attnbench.results.identity import code_of, config_hash
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS, Identity
from attnbench.settings.errors import UserError
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, MixerSettings, RunSettings, TrainSettings
from attnbench.training.checkpoint import ModelRecord
from attnbench.training.loop import Batch
from attnbench.training.prepare import hashed_model, measured_by, mixer_options

CHECK_STEPS = 100
"""How often `selection` is looked at while a task trains."""


@dataclass(slots=True, kw_only=True)
class ProbeRun:
    """One training of one task, with everything resolved."""

    settings: RunSettings
    """The variant's; size and training are the task's."""
    evaluation: EvaluationSettings
    task: Task
    device: torch.device
    precision: str
    train: TrainSettings
    mixers: list[MixerSettings]
    matched: Matched | None
    """None where the combination cannot run; `obstacle` says why."""
    obstacle: str
    not_applicable: list[str]
    """The task's wishes that this mixer has no setting for."""
    config_hash: str
    function_hash: str
    """The same for mixers that are one function by other kernels."""
    folder: Path

    @property
    def results(self) -> Path:
        return self.folder / "results" / f"{self.evaluation.name}-{self.config_hash}.jsonl"

    @property
    def is_scored(self) -> bool:
        return self.settings.seed != SELECTION_SEED


def build_tasks(settings: RunSettings, evaluation: EvaluationSettings) -> tuple[Probe, list[Task]]:
    """The probe and its tasks."""
    probe = build(evaluation.target, evaluation.options, Probe)
    return probe, probe.tasks()


def prepare_probe(settings: RunSettings, evaluation: EvaluationSettings, index: int, rate: float) -> ProbeRun:
    """Resolves device, precision, kernel, size and identity of one training; writes nothing.

    Args:
        index: of the task among the probe's.
    """
    probe, tasks = build_tasks(settings, evaluation)
    task, device = tasks[index], resolve_device(settings.device)
    precision = resolve_precision(probe.precision, device.type)
    mixer, not_applicable = _apply(task, settings)
    mixers, matched, obstacle = [mixer] * task.model.num_layers, None, ""
    try:
        mixers, matched = _matched(task, mixer, settings, device.type, precision)
    except UserError as error:
        obstacle = str(error)
    train_settings = TrainSettings(
        num_steps=task.num_steps,
        batch_size=task.batch_size,
        learning_rate=rate,
        warmup_steps=50,
        precision=precision,
        compile=False,
        log_interval_steps=CHECK_STEPS,
    )
    content = {
        "mixers": [{"target": own.target, **own.options} for own in mixers],
        "evaluation": evaluation.target,
        "task": {name: value for name, value in asdict(task).items() if name != "model"},
        "model": hashed_model(matched.model if matched is not None else task.model, matched),
        "train": {name: value for name, value in asdict(train_settings).items() if name != "log_interval_steps"},
        "device": device.type,
        "seed": settings.seed,
        **code_of([mixer.target, evaluation.target], ["mixers", "model", "training", "evals"]),
    }
    hashed = config_hash(content)
    functions = [function_of(own) for own in mixers]
    words = [evaluation.name, settings.mixer.name, task_label(task), f"lr{rate:g}", f"seed{settings.seed}", hashed]
    return ProbeRun(
        settings=settings,
        evaluation=evaluation,
        task=task,
        device=device,
        precision=precision,
        train=train_settings,
        mixers=mixers,
        matched=matched,
        obstacle=obstacle,
        not_applicable=not_applicable,
        config_hash=hashed,
        function_hash=config_hash({**content, "mixers": functions}),
        folder=Path(settings.outputs_dir) / settings.experiment / "cells" / "-".join(filter(None, words)),
    )


def task_label(task: Task) -> str:
    """The task's settings in a folder's name: sequence_length256-num_pairs16."""
    return "-".join(f"{name}{value}" for name, value in task.settings.items() if isinstance(value, int | str))


def _apply(task: Task, settings: RunSettings) -> tuple[MixerSettings, list[str]]:
    """The variant's mixer at the task's head width, with its wishes; and the wishes that it has no setting for.

    What the variant names, its number of heads or their width too, wins over the wishes, and these over the yaml.
    """
    known = inspect.signature(resolve(settings.mixer.target, Mixer)).parameters
    given = settings.mixer.options
    named = {name: value for name, value in given.items() if name in settings.named_options}
    shape = {name: None for name in ("num_heads", "num_key_value_heads") if name in given}
    kept = {name: value for name, value in given.items() if name != "head_width"}
    wishes = {name: value for name, value in task.mixer_options.items() if name in known}
    options = {**kept, **shape, **wishes, **named}
    mixer = MixerSettings(name=settings.mixer.name, target=settings.mixer.target, options=options)
    return mixer, sorted(set(task.mixer_options) - set(wishes))


def _matched(
    task: Task, mixer: MixerSettings, settings: RunSettings, device_type: str, precision: str
) -> tuple[list[MixerSettings], Matched]:
    resolved = resolve_mixer(mixer, task.model, device_type=device_type, precision=precision)
    batch = _one_sequence(task)
    matched = match_model(
        [resolved] * task.model.num_layers,
        task.model,
        match=settings.match,
        seq_len=batch.tokens_BT.shape[1],
        vocabulary_size=task.vocabulary_size,
        num_logits=batch.targets_BT.shape[1],
        precision=precision,
    )
    return matched.mixers, matched


def train_length(task: Task) -> int:
    """Positions of a training sequence."""
    return _one_sequence(task).tokens_BT.shape[1]


def _one_sequence(task: Task) -> Batch:
    return task.sequences("train", 0, 0, 1, torch.device("cpu"))


def probe_identity(prepared: ProbeRun, stamp: dict[str, Any]) -> Identity:
    matched = prepared.matched
    return Identity(
        experiment=prepared.settings.experiment,
        run=prepared.folder.name,
        mixer=prepared.mixers[0].target.rpartition(".")[2],
        variant=prepared.settings.mixer.name,
        backend=prepared.mixers[0].options["backend"] if matched is not None else "none",
        model=prepared.task.model.name,
        parameters=matched.parameters if matched is not None else None,
        seq_len=train_length(prepared.task),
        evaluation=prepared.evaluation.name,
        seed=prepared.settings.seed,
        precision=prepared.precision,
        corpus=None,
        config_hash=prepared.config_hash,
        **measured_by(stamp),
    )


def probe_settings(prepared: ProbeRun) -> dict[str, Any]:
    """Settings of all rows: the task's axes, the rate, the mixer as it was built, and everything else that was set."""
    task, wishes = prepared.task, prepared.not_applicable
    of_task = asdict(task)
    # Before matching: that a variant's feed-forward is wider is no difference of what was asked.
    model = of_task.pop("model")
    told = ("settings", "mixer_options", "name", "parameters")
    return {
        **task.settings,
        "learning_rate": prepared.train.learning_rate,
        **({"not_applicable": wishes} if wishes else {}),
        MIXER_OPTIONS: mixer_options(prepared.mixers),
        EVALUATION_OPTIONS: {
            **{name: value for name, value in {**of_task, **model}.items() if name not in told},
            "match": prepared.settings.match,
        },
    }


def probe_record(prepared: ProbeRun) -> ModelRecord:
    assert prepared.matched is not None
    return ModelRecord(
        mixers=prepared.mixers,
        model=prepared.matched.model,
        vocabulary=[],
        vocabulary_size=prepared.task.vocabulary_size,
        corpus=prepared.evaluation.name,
        seq_len=train_length(prepared.task),
        precision=prepared.precision,
        match=prepared.matched.match,
    )


def probe_config(prepared: ProbeRun) -> dict[str, Any]:
    return {
        "variant": prepared.settings.mixer.name,
        "seed": prepared.settings.seed,
        "evaluation": asdict(prepared.evaluation),
        "task": asdict(prepared.task),
        "mixers": [asdict(mixer) for mixer in prepared.mixers],
        "train": asdict(prepared.train),
        "device": str(prepared.device),
        "config_hash": prepared.config_hash,
    }
