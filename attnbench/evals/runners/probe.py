"""One training of a probe's task and its scores, as a job in a folder of its own.

outputs/<experiment>/cells/<evaluation>-<variant>-<task>-lr<rate>-seed<n>-<hash>/
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from attnbench.evals.base import NUM_SELECTION, Probe
from attnbench.evals.lib.scoring import mean_accuracy
from attnbench.evals.lib.sequences import STREAMED_FROM, TrainingSequences, training_sequences
from attnbench.evals.lib.solving import is_check, is_over, stop_rule
from attnbench.evals.runners.probe_scores import ProbeScores
from attnbench.machine.precision import computing
from attnbench.machine.signals import StopRequest
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.mixers.base import Mixer
from attnbench.model.building import build_model, function_of
from attnbench.model.dropout import row_keys
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import Matched
from attnbench.model.stored import ModelRecord
from attnbench.results.identity import code_of, config_hash, hashed_options
from attnbench.results.metrics import Primary
from attnbench.results.numbers import reaches
from attnbench.results.protocol import protocol_of
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS, Measurement
from attnbench.settings.hybrid import backends_of, classes_of
from attnbench.settings.registry import class_named, resolve
from attnbench.settings.schema import (
    BFLOAT16_WEIGHTS,
    SELECTION_SEED,
    EvaluationSettings,
    MixerSettings,
    RunSettings,
    TrainSettings,
)
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError
from attnbench.training.job import budget, hashed_model, mixer_options, recipe_settings
from attnbench.training.learning_rate import shortened
from attnbench.training.run import TrainedJob, make_ready
from attnbench.training.speed import speed_row
from attnbench.training.step import Batch

log = logging.getLogger(__name__)

NAMED_IF_SET = ("length_buckets", "stop_at", "norm", "untied", "dropout", "dropout_of", "doubled_residual")
"""Options that rows name only where they have a value."""


@dataclass(kw_only=True, eq=False)
class ProbeJob(TrainedJob):
    """One training of one task, with everything resolved."""

    settings: RunSettings
    """The variant's; the task has its own size and training."""
    probe: EvaluationSettings
    task: Probe
    """The probe, narrowed to one of its tasks."""
    task_label: str
    """For people: the probe, the variant, and the axes in which the probe's tasks differ."""
    device: torch.device
    precision: str
    """Precision of the passes; `train.precision` may also set that of weights and moments."""
    train: TrainSettings
    mixers: list[MixerSettings]
    matched: Matched | None
    """None where the combination cannot run; `obstacle` says why."""
    obstacle: str
    not_applicable: list[str]
    """The task's wishes that this mixer has no option for."""
    plots: tuple[tuple[str, str], ...]
    primary: Primary | None
    """The probe's primary metric, whose accuracy decides what is solved."""
    seq_len: int
    """Positions of a training sequence."""
    limit: int | None = None
    """Step at which a training ends early if it has not reached the threshold; None: it trains on."""
    in_stack: bool = False
    """Stacks were asked for, even if this one has a single member."""
    stack: int | None = None
    """Number of trainings that are stepped together; None: no stack was asked for."""
    too_large: list[int] = field(default_factory=list)
    """Sizes of stacks that ran out of memory before this one."""
    compiled: bool = False
    """Its steps go through torch.compile, which changes their result by rounding."""
    sequences: TrainingSequences | None = None
    """Data of the training while it runs; trainings of one seed in a stack share them."""
    look: Callable[[TrainState], float] | None = None
    """Measures `selection` in a stack, of all at once; None: measured alone."""
    outcome: "Outcome | None" = None
    """Result of its training in a stack; None: it trains itself."""
    config_hash: str = field(init=False)
    folder: Path = field(init=False)
    _validation: Batch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        settings, task, rate = self.settings, folder_label(self.task), self.train.learning_rate
        self.evaluation, self.name, self.experiment = self.probe.name, settings.mixer.name, settings.experiment
        self.label = f"{self.task_label}, {trained_label(rate, settings.seed)}"
        self.num_steps = self.checkpoint_interval = self.task.num_steps
        self.captured = self.device.type == "cuda"
        self.config_hash = config_hash(self._content())
        words = [self.evaluation, settings.mixer.name, task, f"lr{rate:g}", f"seed{settings.seed}", self.config_hash]
        self.folder = Path(settings.outputs_dir) / settings.experiment / "cells" / "-".join(filter(None, words))

    @property
    def shape_hash(self) -> str:
        """The `config_hash` without seed, learning rate and limit, equal for trainings that may be stacked."""
        content = self._content()
        train = {**content["train"], "learning_rate": None}
        return config_hash({**content, "train": train, "seed": None, "limit": None})

    def can_stack(self) -> bool:
        """True if every layer's kernel has a batching rule."""
        mixers = [(resolve(mixer.target, Mixer), mixer.options["backend"]) for mixer in self.mixers if self.matched]
        return bool(mixers) and all(backend not in cls.without_vmap for cls, backend in mixers)

    def at(self, rate: float, seed: int, limit: int | None = None) -> "ProbeJob":
        train = replace(self.train, learning_rate=rate)
        return replace(self, settings=replace(self.settings, seed=seed), train=train, limit=limit)

    @property
    def rerun(self) -> bool:
        return self.settings.rerun

    @property
    def function_hash(self) -> str:
        """The `config_hash`, the same for mixers that are one function by other kernels."""
        functions = [function_of(mixer) for mixer in self.mixers]
        return config_hash({**self._content(), "mixers": functions})

    def _content(self) -> dict[str, Any]:
        """Everything that decides the numbers of this training, and nothing else."""
        matched, targets = self.matched, [class_named(mixer) for mixer in self.mixers]
        task = {**self.task.content(), "mixer_options": hashed_options(self.task.mixer_options)}
        return {
            "mixers": [{"target": mixer.target, **hashed_options(mixer.options)} for mixer in self.mixers],
            "evaluation": self.probe.target,
            "task": task,
            "model": hashed_model(matched.model if matched is not None else self.task.model, matched),
            "train": {name: value for name, value in asdict(self.train).items() if name != "log_interval_steps"},
            "limit": self.limit,
            "streamed": self.task.num_train_sequences >= STREAMED_FROM,
            "device": self.device.type,
            "seed": self.settings.seed,
            **code_of([*targets, self.probe.target], ["mixers", "model", "training", "evals"]),
        }

    def columns(self) -> dict[str, Any]:
        matched = self.matched
        return {
            "mixer": classes_of(self.mixers),
            "variant": self.settings.mixer.name,
            "backend": backends_of(self.mixers) if matched is not None else "none",
            "model": self.task.model.name,
            "parameters": matched.parameters if matched is not None else None,
            "seq_len": self.seq_len,
            "seed": self.settings.seed,
            "precision": self.train.precision,
            "corpus": None,
        }

    def row_settings(self) -> dict[str, Any]:
        # Before matching: rows name the width that was asked for.
        of_task = {**self.task.content(), **self.task.training, **asdict(self.task.model)}
        elsewhere = ["settings", "mixer_options", "name", "parameters"]
        elsewhere += [name for name in NAMED_IF_SET if not of_task.get(name)]
        return {
            **self.task.settings,
            "learning_rate": self.train.learning_rate,
            **({"stack": self.stack} if self.stack is not None else {}),
            **({"stack_too_large": self.too_large} if self.too_large else {}),
            **({"compiled": True} if self.compiled else {}),
            **recipe_settings(self.settings, self.not_applicable),
            MIXER_OPTIONS: mixer_options(self.mixers),
            EVALUATION_OPTIONS: {
                **{name: value for name, value in of_task.items() if name not in elsewhere},
                "match": self.settings.match,
            },
        }

    def protocol(self) -> dict[str, Any]:
        stop = stop_rule(self.task.check_interval_steps)
        if self.task.fixed_steps:
            stop = None if self.task.stop_at is None else {"stop_at": self.task.stop_at}
        return protocol_of(self.primary, stop)

    def config(self) -> dict[str, Any]:
        return {
            "variant": self.settings.mixer.name,
            "seed": self.settings.seed,
            "evaluation": asdict(self.probe),
            "task": {**self.task.content(), "model": asdict(self.task.model)},
            "mixers": [asdict(mixer) for mixer in self.mixers],
            "train": asdict(self.train),
            "device": str(self.device),
            "config_hash": self.config_hash,
        }

    def rows(self) -> Iterator[Measurement]:
        """A training that diverges, does not fit, or cannot be built gives rows that say so."""
        if self.matched is None:
            yield from ProbeScores(self).missing("unsupported", self.obstacle)
            return
        log.info(self.matched.statement(self.settings.mixer.name))
        yield Measurement(metric="parameters", value=self.matched.parameters, unit="")
        yield from budget(self.matched)
        stop = StopRequest()
        trained = self.outcome if self.outcome is not None else self._train_alone(stop)
        if isinstance(trained, DivergedError):
            yield from ProbeScores(self).missing("diverged", str(trained))
            return
        if isinstance(trained, OutOfMemory):
            yield from ProbeScores(self).missing("out_of_memory", trained.reason)
            return
        state, speeds = trained
        scored = attempt(lambda: list(ProbeScores(self).measured(state, self.selection(state))))
        if isinstance(scored, OutOfMemory):
            yield from ProbeScores(self).missing("out_of_memory", scored.reason)
        else:
            yield from scored
        for row in speeds:
            yield replace(row, settings={"shared_device": True} if self.shares_device else {})
        checkpoint.save_final(self.folder / "checkpoint", state, self.record())
        if stop.signal is not None:
            # The signal came during the last step: what follows is stopped.
            self.failure = stop.interruption(
                f"trained and scored to the end: {self.folder}; the same command resumes from there"
            )

    def build(self) -> LanguageModel:
        assert self.matched is not None
        model = build_model(
            self.mixers,
            self.matched.model,
            vocabulary_size=self.task.vocabulary_size,
            seed=self.settings.seed,
            device=self.device,
        )
        return model.bfloat16() if self.train.precision == BFLOAT16_WEIGHTS else model

    def _train_alone(self, stop: StopRequest) -> "Outcome | OutOfMemory":
        def train() -> Outcome:
            make_ready(self.device, self.shape_hash if self.compiled else None)
            state, _ = self.train_model(stop)
            return self.trained(state)

        try:
            return attempt(train)
        except DivergedError as error:
            return error
        finally:
            self.sequences = None

    def trained(self, state: TrainState) -> "Outcome":
        assert self.sequences is not None
        generated = self.sequences.tokens_per_second
        speed = speed_row(self.folder / "metrics.jsonl", state.step, self.task.batch_size * self.seq_len)
        if speed.value is not None:
            # The log counts sequences of full length.
            speed = replace(speed, value=speed.value * self.sequences.mean_length / self.seq_len)
        return state, [Measurement(metric="generator_tokens_per_second", value=generated, unit="token/s"), speed]

    def load_data(self) -> None:
        self.sequences = training_sequences(self.task, self.settings.seed, self.device)

    def batches(self, step: int) -> Batch:
        assert self.sequences is not None
        return self._with_keys(self.sequences.batch(step), step)

    def trial_batch(self) -> Batch:
        return self._with_keys(self.task.sequences("train", 0, 0, self.task.batch_size, self.device), 0)

    def _with_keys(self, batch: Batch, step: int) -> Batch:
        if not self.task.embedding_dropout:
            return batch
        row_B = torch.arange(len(batch.tokens_BT), device=self.device)
        return batch._replace(dropout_B=row_keys(self.settings.seed, step, row_B))

    def measure(self, state: TrainState) -> dict[str, Any]:
        return {"selection": (self.look or self.selection)(state)}

    def is_due(self, step: int) -> bool:
        return is_check(step, self.task.check_interval_steps)

    def new_end(self, state: TrainState, row: dict[str, Any]) -> int | None:
        """Return the last step of a training that is done at this check, or leaves its search there."""
        has_done, stop_at = is_over(state, row["selection"]), self.task.stop_at
        if stop_at is not None and reaches(row["selection"], stop_at):
            return state.step
        if self.limit is not None and state.step >= self.limit and state.passed_step is state.reached_step is None:
            return state.step
        if not has_done or self.task.fixed_steps:
            return None
        return shortened(self.train, self.task.num_steps, state.step)

    def selection(self, state: TrainState) -> float:
        with computing(self.precision, self.device):
            return mean_accuracy(state.model, self.validation())

    def validation(self) -> Batch:
        if self._validation is None:
            self._validation = self.task.sequences("validation", self.settings.seed, 0, NUM_SELECTION, self.device)
        return self._validation

    def record(self) -> ModelRecord:
        assert self.matched is not None
        return ModelRecord(
            mixers=self.mixers,
            model=self.matched.model,
            vocabulary=[],
            vocabulary_size=self.task.vocabulary_size,
            corpus=self.evaluation,
            seq_len=self.seq_len,
            precision=self.precision,
            match=self.matched.match,
        )


Outcome = tuple[TrainState, list[Measurement]] | DivergedError
"""Result of a training: see `ProbeJob.trained`."""


def folder_label(task: Probe) -> str:
    """Name the task in a folder: sequence_length256-num_pairs16."""
    return "-".join(f"{name}{value}" for name, value in task.settings.items() if isinstance(value, int | str))


def trained_label(rate: float, seed: int) -> str:
    trial = seed - SELECTION_SEED
    return f"lr {rate:g}, " + (f"seed {seed}" if trial < 0 else f"search {trial + 1}" if trial else "search")
