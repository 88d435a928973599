"""From settings to the trainings of a probe's tasks with everything resolved."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from attnbench.evals.base import Probe
from attnbench.evals.lib.solving import CHECK_STEPS
from attnbench.evals.runners.probe import ProbeJob
from attnbench.machine.device import resolve_device
from attnbench.machine.precision import passes_in, resolve_precision
from attnbench.mixers.base import Mixer
from attnbench.mixers.recipe import OWN, is_off
from attnbench.model.matching import match_mixer
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import each
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import EvaluationSettings, MixerSettings, RunSettings, TrainSettings


def prepare_probe(settings: RunSettings, evaluation: EvaluationSettings) -> tuple[Probe, list[ProbeJob]]:
    """Return the probe, and a training of each of its tasks at the first rate of its grid."""
    probe = build(evaluation.target, evaluation.options, Probe, group=f"eval.{evaluation.name}")
    tasks, device = probe.tasks(), resolve_device(settings.device)
    precision = resolve_precision(probe.precision, device.type)
    return probe, [_job(settings, evaluation, probe, task, tasks, device, precision) for task in tasks]


def _job(
    settings: RunSettings,
    evaluation: EvaluationSettings,
    probe: Probe,
    task: Probe,
    tasks: Sequence[Probe],
    device: torch.device,
    precision: str,
) -> ProbeJob:
    mixer, not_applicable = _apply(task, settings)
    matched, obstacle = None, ""
    example = task.sequences("train", 0, 0, 1, torch.device("cpu"))
    try:
        matched = match_mixer(
            mixer,
            task.model,
            device_type=device.type,
            precision=passes_in(precision),
            match=settings.match,
            seq_len=example.tokens_BT.shape[1],
            vocabulary_size=task.vocabulary_size,
            num_logits=example.targets_BT.shape[1],
        )
    except UserError as error:
        obstacle = str(error)
    usual = {"warmup_steps": 50, "decay_fraction": None if task.fixed_steps else 0.2}
    train_settings = TrainSettings(
        num_steps=task.num_steps,
        batch_size=task.batch_size,
        learning_rate=probe.learning_rates[0],
        precision=precision,
        compile=False,
        log_interval_steps=CHECK_STEPS,
        **{**usual, **task.training},
    )
    return ProbeJob(
        settings=settings,
        probe=evaluation,
        task=task,
        task_label=_task_label(settings, evaluation, task, tasks),
        device=device,
        precision=passes_in(precision),
        train=train_settings,
        mixers=matched.mixers if matched is not None else [mixer] * task.model.num_layers,
        matched=matched,
        obstacle=obstacle,
        not_applicable=not_applicable,
        plots=probe.plots,
        primary=probe.primary,
        seq_len=example.tokens_BT.shape[1],
    )


def _task_label(settings: RunSettings, evaluation: EvaluationSettings, task: Probe, tasks: Sequence[Probe]) -> str:
    distinct = [
        f"{name} {value}"
        for name, value in task.settings.items()
        if any(other.settings.get(name) != value for other in tasks)
    ]
    return ", ".join([f"{evaluation.name} {settings.mixer.name}", *distinct])


def _apply(task: Probe, settings: RunSettings) -> tuple[MixerSettings, list[str]]:
    """Return the variant's mixer with the task's head width and mixer options, and the names of options that were not
    applied: the mixer, or one of a hybrid's mixers, does not have them, or they would undo it.

    The variant's options take precedence over the task's, and these over the yaml's.
    """
    lacking: set[str] = set()
    # What a recipe asks for is compared with the mixer's options elsewhere.
    of_recipe = asdict(settings.recipe) if settings.recipe is not None else {}
    decided = {name for name, value in of_recipe.items() if value not in (None, OWN)}
    asked = {name for name, value in task.mixer_options.items() if not is_off(value)} - decided

    def apply(mixer: MixerSettings, prefix: str) -> MixerSettings:
        cls, given = resolve(mixer.target, Mixer), mixer.options
        known = inspect.signature(cls).parameters
        named = {name: value for name, value in given.items() if prefix + name in settings.named_options}
        shape = {name: None for name in ("num_heads", "num_key_value_heads") if name in given}
        kept = {name: value for name, value in given.items() if name != "head_width"}
        # A part that would undo a mixer stays as its yaml has it.
        undoing = cls.undone_by.keys() - named.keys()
        wishes = {name: value for name, value in task.mixer_options.items() if name in known and name not in undoing}
        lacking.update(it for it in asked if it not in known or (it in undoing and is_off(given.get(it))))
        return replace(mixer, options={**kept, **shape, **wishes, **named})

    return each(settings.mixer, apply), sorted(lacking)
