"""A language model's training as a job, which plans and commands run.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbench.data.batches import Batches, evaluation_batches, evaluation_shape
from attnbench.data.corpus import Corpus, load_corpus
from attnbench.machine.device import peak_memory_mib
from attnbench.machine.group import Group
from attnbench.machine.signals import StopRequest
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.mixers.recipe import not_applicable
from attnbench.model.building import build_model, function_of
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import perplexity, split_nats
from attnbench.model.matching import UNCOUNTED, Matched, match_mixer
from attnbench.model.stored import ModelRecord, load_model
from attnbench.results.folder import data_root, first_environment
from attnbench.results.identity import TRAINED, code_of, config_hash, hashed_options
from attnbench.results.protocol import protocol_of
from attnbench.results.rows import EVALUATION_OPTIONS, HASH, MIXER_OPTIONS, TRAINING, Measurement
from attnbench.settings.combinations import LENGTHS
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.hybrid import backends_of, classes_of
from attnbench.settings.registry import class_named
from attnbench.settings.schema import SELECTION_SEED, EvaluationSettings, MixerSettings, ModelSettings, RunSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState, best_folder
from attnbench.training.hooks import DivergedError, Stopwatch
from attnbench.training.learning_rate import shortened
from attnbench.training.log import watched
from attnbench.training.loop import text_batch
from attnbench.training.run import TrainedJob, make_ready
from attnbench.training.sample import write_sample
from attnbench.training.speed import speed_row
from attnbench.training.step import Batch
from attnbench.training.wandb import WandbMirror, beside

log = logging.getLogger(__name__)

NOT_HASHED = ("log_interval_steps", "checkpoint_interval_seconds", *LENGTHS, "precision", "compile")
"""Training settings left out of the hash: they change no number, or their resolved value is hashed."""

FAILED = ("diverged", "out_of_memory")
"""Status of the single row of a failed training."""


@dataclass(kw_only=True, eq=False)
class Run(TrainedJob):
    """A language model, trained or resumed in a folder that the evaluations of its checkpoints share."""

    settings: RunSettings
    device: torch.device
    precision: str
    compile: bool
    """True if training steps are compiled."""
    corpus: Corpus
    mixers: list[MixerSettings]
    matched: Matched  # pyright: ignore[reportIncompatibleVariableOverride]
    num_steps: int
    validation_interval: int
    config_hash: str
    folder: Path

    evaluation = TRAINING
    _loaded = None

    def __post_init__(self) -> None:
        settings, on_gpu = self.settings, self.device.type == "cuda"
        self.mixer, self.seed, self.seq_len = settings.mixer.name, settings.seed, settings.seq_len
        self.label = self.task_label = f"training {self.mixer}"
        self.name, self.experiment, self.train = self.mixer, settings.experiment, settings.train
        self.checkpoint_interval, self.estimated = self.validation_interval, not on_gpu
        # On GPUs the step, with the reduction over them, is replayed as a CUDA graph.
        self.compiled, self.captured = self.compile, self.compile and on_gpu

    def __getstate__(self) -> dict[str, Any]:
        # The corpus may be too large for a pipe, and the other process is not in the group.
        return {**vars(self), "corpus": corpus_label(self.corpus), "group": None, "_loaded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        label, corpus = state["corpus"], load_corpus(state["settings"].data, state["settings"].seq_len, data_root())
        if corpus_label(corpus) != label:
            raise UserError(f"the corpus was {label} and is {corpus_label(corpus)} now")
        vars(self).update(state, corpus=corpus)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    def columns(self) -> dict[str, Any]:
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
            # Rows made from a final checkpoint describe its training.
            "num_devices": self.num_devices if self.rerun else trained_on(self),
        }

    def record(self) -> ModelRecord:
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
        return epoch_steps(self.corpus, self.settings)

    @property
    def rerun(self) -> bool:
        """Rows without a final checkpoint: the training failed."""
        return self.settings.rerun or not checkpoint.is_final(self.checkpoints)

    def builder(self, model: ModelSettings | None = None, seed: int | None = None) -> Callable[[], LanguageModel]:
        """Return a picklable builder of the matched model with initial weights; raise UserError for another size that
        cannot be matched."""
        mixers, size = self.mixers, self.matched.model
        if model is not None:
            other = matched_model(self.settings, model, self.device, self.precision, self.corpus)
            mixers, size = other.mixers, other.model
        given = {"vocabulary_size": self.corpus.vocabulary_size, "device": self.device}
        return partial(build_model, mixers, size, seed=self.seed if seed is None else seed, **given)

    def new_model(self, model: ModelSettings | None = None, seed: int | None = None) -> LanguageModel:
        return self.builder(model, seed)()

    build = new_model

    def trained_model(self, which: str = "final") -> LanguageModel:
        folder = best_folder(self.checkpoints) if which == "best" else self.checkpoints / "final"
        model, _ = load_model(folder, device=self.device)
        return model

    def content(self) -> dict[str, Any]:
        """Everything that can change the numbers of this training."""
        training = {key: value for key, value in asdict(self.settings.train).items() if key not in NOT_HASHED}
        return {
            "mixers": [{"target": mixer.target, **hashed_options(mixer.options)} for mixer in self.mixers],
            "model": hashed_model(self.matched.model, self.matched),
            "data": {"fingerprint": self.corpus.fingerprint, "vocabulary_size": self.corpus.vocabulary_size},
            "train": {**training, "num_steps": self.num_steps, "compile": self.compile},
            "precision": self.precision,
            "device": self.device.type,
            "seq_len": self.settings.seq_len,
            "seed": self.settings.seed,
            **code_of_training(self.mixers),
        }

    @property
    def function_hash(self) -> str:
        """The `config_hash` without the kernel, the same for mixers that compute one function."""
        functions = [function_of(mixer) for mixer in self.mixers]
        return config_hash({**self.content(), "mixers": functions})

    def config(self) -> dict[str, Any]:
        given = asdict(self.settings)
        del given["rerun"]
        return {
            **given,
            "resolved": {
                "backend": backends_of(self.mixers),
                "precision": self.precision,
                "compile": self.compile,
                "device": str(self.device),
                "num_steps": self.num_steps,
                "feed_forward_width": self.matched.model.feed_forward_width,
                "parameters": self.matched.parameters,
                "corpus": corpus_label(self.corpus),
                "vocabulary_size": self.corpus.vocabulary_size,
                "num_unknown": self.corpus.num_unknown,
                "num_bytes": {split: sizes.num_bytes for split, sizes in self.corpus.splits.items()},
                "config_hash": self.config_hash,
                **code_of_training(self.mixers),
            },
        }

    def row_settings(self, evaluation: EvaluationSettings | None = None) -> dict[str, Any]:
        options = {EVALUATION_OPTIONS: evaluation.options} if evaluation is not None else {}
        dropout = self.settings.model.dropout
        axes = {"dropout": dropout} if dropout else {}
        return {**recipe_settings(self.settings), **axes, MIXER_OPTIONS: mixer_options(self.mixers), **options}

    def devices(self) -> list[torch.device]:
        if self.group is None or self.device.type == "cpu":
            return [self.device]
        return [torch.device(self.device.type, index) for index in range(self.group.size)]

    def protocol(self) -> dict[str, Any]:
        return protocol_of(None)

    def announce(self, *, done: bool) -> None:
        log.info(self.matched.statement(self.mixer))
        if done or not self.rerun:
            log.info("finished before, not trained again (rerun=true does): %s", self.folder)

    def begin(self) -> dict[str, Any]:
        """Remove the files of an earlier training; a finished one keeps its environment."""
        if not self.rerun:
            return first_environment(self.folder)
        if checkpoint.is_final(self.checkpoints):
            checkpoint.remove_all(self.checkpoints)
            for name in ("environment.json", f"environment-{HASH}.json"):
                for path in self.folder.glob(name):
                    path.unlink()
        for path in (self.folder / "results").glob(f"*-{HASH}.jsonl"):
            path.unlink()
        return super().begin()

    def load_data(self) -> None:
        self._loaded = batches_of(self, self.group), _validation(self, self.num_devices)

    def trial_batch(self) -> Batch:
        return batches_of(self)(0)

    def batches(self, step: int) -> Batch:
        # Among several processes the whole batch is needed only after a divergence.
        return self.share(step) if self.group is None else batches_of(self)(step)

    def share(self, step: int) -> Batch:
        assert self._loaded is not None
        return self._loaded[0](step)

    def measure(self, state: TrainState) -> dict[str, Any]:
        assert self._loaded is not None
        return self._loaded[1](state)

    def is_due(self, step: int) -> bool:
        return step % self.validation_interval == 0

    def new_end(self, state: TrainState, row: dict[str, Any]) -> int | None:
        """End where `patience_validations` have gone by since the lowest loss."""
        patience = self.train.patience_validations
        if patience is None or state.step - state.best_step < patience * self.validation_interval:
            return None
        return shortened(self.train, self.num_steps, state.step)

    def mirror(self, is_resumed: bool) -> WandbMirror:
        settings = self.settings
        return WandbMirror(
            settings.logger,
            root=beside(settings.outputs_dir),
            run_id=f"{settings.experiment}-{self.folder.name}",
            folder=self.folder,
            name=self.folder.name,
            group=settings.experiment,
            job_type="train",
            tags=[settings.mixer.name, settings.model.name, self.corpus.name],
            config=self.config(),
            resume=is_resumed,
        )

    def rows(self) -> Iterator[Measurement]:
        """A failed training has a row that says so, and sets `failure`."""
        if not self.rerun:
            # Of a finished training the file is missing.
            final = self.checkpoints / "final"
            counters = checkpoint.load_counters(final)
            log.info(f"{self.results}: made again from {final}, without peak memory and the first step's time")
            yield from _measurements(self, counters, stopwatch=None)
            return
        # Under torchrun one line is enough.
        stop = StopRequest(announced=self.group is None)
        make_ready(self.device)
        try:
            trained = attempt(partial(self.train_model, stop))
        except DivergedError as error:
            self.failure = error
            yield _failed("diverged", str(error))
            return
        finally:
            # The split that lies on the device.
            self._loaded = None
        if isinstance(trained, OutOfMemory):
            self.failure = UserError(
                f"out of memory at train.batch_size={self.train.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            )
            yield _failed("out_of_memory", trained.reason)
            return
        state, stopwatch = trained
        yield from _measurements(self, state.counters(), stopwatch)
        checkpoint.save_final(self.checkpoints, state, self.record())
        if self.seed < SELECTION_SEED:
            _write_sample(self, state.model)
        if stop.signal is not None:
            # The signal came during the last step: only the evaluations stop.
            self.failure = stop.interruption(
                f"trained to the end, saved in {self.checkpoints}; the same command evaluates it"
            )


def _write_sample(run: Run, model: LanguageModel) -> None:
    tokens_N = run.corpus.tokens["validation"]
    try:
        written = attempt(lambda: write_sample(run.folder, model, run.record(), tokens_N))
        reason = written.reason if isinstance(written, OutOfMemory) else ""
    # A user's mixer may raise anything at other lengths.
    except Exception as error:
        reason = one_line(error)
    if reason:
        log.warning(f"{run.folder}: no sample of its text, {reason}")


def trained_on(run: Run) -> int:
    if not checkpoint.is_final(run.checkpoints):
        return 1
    return checkpoint.load_counters(run.checkpoints / "final").get("num_devices", 1)


def batches_of(run: Run, group: Group | None = None) -> Callable[[int], Batch]:
    """Return the batch of each step, or this rank's rows of it."""
    rank, num_ranks = (group.rank, group.size) if group is not None else (0, 1)
    train_N, shape = run.corpus.tokens["train"], (run.seq_len, run.train.batch_size)
    batches = Batches(train_N, *shape, run.seed, run.device, rank, num_ranks, release=run.corpus.release)
    return lambda step: text_batch(batches, step, run.settings.model.dropout)


def _validation(run: Run, num_devices: int) -> Callable[[TrainState], dict[str, Any]]:
    """Measure the validation split on one device, with the rows of its training."""
    tokens_N, part = run.corpus.first_characters("validation", run.train.validation_characters)
    lengths = run.corpus.lengths("validation", run.corpus.count(tokens_N[1:]))
    tokens_N = tokens_N.to(run.device)
    shape = run.seq_len, run.train.batch_size // num_devices
    number, num_rows = evaluation_shape(len(tokens_N), *shape)

    def measure(state: TrainState) -> dict[str, Any]:
        batches = watched(evaluation_batches(tokens_N, *shape), number, num_rows * run.seq_len, "validation")
        nats_T, count_T = split_nats(state.model, batches, run.precision)
        nats = float(nats_T.sum() / count_T.sum())
        scores = {"nats_per_character": lengths.nats_per_character(nats), "perplexity": perplexity(nats)}
        return {**scores, "bits_per_byte": lengths.bits_per_byte(nats), **part}

    return measure


def _failed(status: str, reason: str) -> Measurement:
    assert status in FAILED, "what looks for a failed training looks for these"
    return Measurement(metric="tokens_per_second", value=None, unit="token/s", status=status, reason=reason)


def _measurements(run: Run, counters: Mapping[str, Any], stopwatch: Stopwatch | None) -> Iterator[Measurement]:
    """Measure speed and memory if the training had the device alone, budget and best loss.

    Args:
        counters: of the final state.
        stopwatch: of this sitting; None if the training ended earlier.
    """
    if not counters.get("shared_device", True):
        yield speed_row(run.folder / "metrics.jsonl", counters["step"], run.train.batch_size * run.seq_len)
        yield Measurement(metric="train_seconds", value=counters["seconds"], unit="s", num_samples=counters["step"])
        if stopwatch is not None and stopwatch.first_step_seconds is not None:
            yield Measurement(metric="first_step_seconds", value=stopwatch.first_step_seconds, unit="s")
        peak = peak_memory_mib(run.device) if stopwatch is not None else None
        if peak is not None:
            yield Measurement(metric="peak_memory_mib", value=peak, unit="MiB")
    yield from budget(run.matched)
    if counters["best_nats"] is not None:
        _, part = run.corpus.first_characters("validation", run.train.validation_characters)
        axes = {"split": "validation", "checkpoint": "best", **part}
        yield Measurement(metric="nats_per_character", value=counters["best_nats"], unit="nat", settings=axes)


def budget(matched: Matched) -> Iterator[Measurement]:
    flops, unknown = matched.flops_per_token, matched.flops_per_token is None
    status, reason = ("unsupported", UNCOUNTED) if unknown else ("ok", "")
    yield Measurement(metric="forward_flops_per_token", value=flops, unit="FLOP", status=status, reason=reason)
    if matched.state_bytes is not None:
        yield Measurement(metric="state_bytes", value=matched.state_bytes, unit="B")


def epoch_steps(corpus: Corpus, settings: RunSettings) -> int:
    num_blocks = (len(corpus.tokens["train"]) - 1) // settings.seq_len
    return max(1, num_blocks // settings.train.batch_size)


def matched_model(
    settings: RunSettings, model: ModelSettings, device: torch.device, precision: str, corpus: Corpus
) -> Matched:
    return match_mixer(
        settings.mixer,
        model,
        device_type=device.type,
        precision=precision,
        match=settings.match,
        seq_len=settings.seq_len,
        vocabulary_size=corpus.vocabulary_size,
    )


def code_of_training(mixers: Sequence[MixerSettings]) -> dict[str, Any]:
    return code_of([class_named(mixer) for mixer in mixers], TRAINED)


def hashed_model(model: ModelSettings, matched: Matched | None) -> dict[str, Any]:
    """The settings of a model that change its numbers, and the number of branches if it is not two per layer."""
    settings = {key: value for key, value in asdict(model).items() if key not in ("name", "parameters")}
    num_branches = matched.num_branches if matched is not None else None
    settings["dropout"] = model.dropout or None
    return {**settings, "num_branches": None if num_branches == 2 * model.num_layers else num_branches}


def mixer_options(mixers: Sequence[MixerSettings]) -> Any:
    """The options of the mixer without its kernel; a list by layer if layers differ."""
    options = [{name: value for name, value in mixer.options.items() if name != "backend"} for mixer in mixers]
    return options[0] if all(other == options[0] for other in options) else options


def recipe_settings(settings: RunSettings, lacking: Collection[str] = ()) -> dict[str, Any]:
    """Settings of rows on the recipe: its name, and the parts that the mixer has no setting for, `lacking` those that
    were asked for otherwise."""
    parts = sorted({*lacking, *not_applicable(settings.mixer, settings.recipe)})
    named = {"recipe": settings.recipe.name} if settings.recipe is not None else {}
    return {**named, **({"not_applicable": parts} if parts else {})}


def corpus_label(corpus: Corpus) -> str:
    """Equal labels mean equal text."""
    return f"{corpus.name}@{corpus.fingerprint}"
