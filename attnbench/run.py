"""One run from settings to rows: prepared, trained or resumed, evaluated; and the folder that it leaves behind.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
  config.yaml environment.json metrics.jsonl checkpoint/ results/<evaluation>-<hash>.jsonl failed.txt
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from attnbench import checkpoint
from attnbench.checkpoint import ModelRecord, TrainState
from attnbench.data import Batches, Corpus, evaluation_batches, load_corpus
from attnbench.errors import UserError
from attnbench.evals.base import Evaluation
from attnbench.hooks import Checkpoints, DivergedError, Estimate, Logging, Stopwatch, Validation
from attnbench.matching import Matched, match_model
from attnbench.metrics import MetricsLog, WandbMirror, read_metrics
from attnbench.model import LanguageModel, build_model, resolve_mixer
from attnbench.progress import ProgressBar
from attnbench.registry import build
from attnbench.results import Identity, Measurement, ResultsWriter, is_complete
from attnbench.runtime import (
    StopRequest,
    environment,
    environment_id,
    peak_memory_mib,
    resolve_device,
    resolve_precision,
)
from attnbench.settings import EvaluationSettings, MixerSettings, RunSettings
from attnbench.train import Batch, learning_rates, train

ROOT = Path(__file__).resolve().parents[1]
NOT_HASHED = ("log_interval_steps", "checkpoint_interval_seconds", "num_epochs", "num_steps", "precision", "compile")


@dataclass(slots=True, kw_only=True)
class Run:
    """A run with everything resolved that its settings leave open."""

    settings: RunSettings
    device: torch.device
    precision: str
    compile: bool
    corpus: Corpus
    mixers: list[MixerSettings]
    matched: Matched
    num_steps: int
    validation_interval: int
    config_hash: str
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    def record(self) -> ModelRecord:
        """What a checkpoint says of itself."""
        return ModelRecord(
            mixers=self.mixers,
            model=self.matched.model,
            vocabulary=list(self.corpus.vocabulary),
            vocabulary_size=self.corpus.vocabulary_size,
            corpus=corpus_label(self.corpus),
            seq_len=self.settings.seq_len,
            precision=self.precision,
        )

    def new_model(self, **changes: Any) -> LanguageModel:
        """A model with initial weights; `changes` to its ModelSettings."""
        model = replace(self.matched.model, **changes)
        return build_model(
            self.mixers[:1] * model.num_layers,
            model,
            vocabulary_size=self.corpus.vocabulary_size,
            seed=self.settings.seed,
            device=self.device,
            trusted=self.settings.trusted,
        )


def run(settings: RunSettings) -> Path:
    """Trains, unless a finished run of the same settings is there, evaluates, and returns the run's folder.

    Raises:
        UserError: a corpus that cannot be read, a training that diverged, a damaged checkpoint.
        Interrupted: a signal asked to stop, and the state is kept.
    """
    prepared = prepare(settings)
    print_line(prepared.matched.statement(settings.mixer.name))
    try:
        if checkpoint.is_final(prepared.checkpoints) and not settings.rerun:
            print_line(f"finished before, not trained again (rerun=true does): {prepared.folder}")
        else:
            _train(prepared)
        for evaluation in settings.evaluations:
            evaluate(prepared, evaluation)
    except Exception as error:
        # The folder tells what became of the run, whoever looks at it later.
        prepared.folder.mkdir(parents=True, exist_ok=True)
        (prepared.folder / "failed.txt").write_text(f"{type(error).__name__}: {error}\n")
        raise
    (prepared.folder / "failed.txt").unlink(missing_ok=True)
    return prepared.folder


def prepare(settings: RunSettings) -> Run:
    """Loads the corpus, resolves device, precision, backend, matching and identity; writes nothing."""
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.train.precision, device.type)
    corpus = load_corpus(settings.data, settings.seq_len, ROOT)
    mixer = resolve_mixer(
        settings.mixer, settings.model, device_type=device.type, precision=precision, trusted=settings.trusted
    )
    mixers = [mixer] * settings.model.num_layers
    matched = match_model(
        mixers,
        settings.model,
        match=settings.match,
        seq_len=settings.seq_len,
        vocabulary_size=corpus.vocabulary_size,
        trusted=settings.trusted,
    )
    num_blocks = (len(corpus.tokens["train"]) - 1) // settings.seq_len
    steps_per_epoch = max(1, num_blocks // settings.train.batch_size)
    num_steps = settings.train.num_steps or steps_per_epoch * (settings.train.num_epochs or 1)
    prepared = Run(
        settings=settings,
        device=device,
        precision=precision,
        compile=settings.train.compile if settings.train.compile is not None else device.type == "cuda",
        corpus=corpus,
        mixers=mixers,
        matched=matched,
        num_steps=num_steps,
        validation_interval=settings.train.validation_interval_steps or min(steps_per_epoch, num_steps),
        config_hash="",
        folder=Path(),
    )
    prepared.config_hash = config_hash(_identity_of_training(prepared))
    name = f"{settings.mixer.name}-{settings.model.name}-T{settings.seq_len}-seed{settings.seed}-{prepared.config_hash}"
    prepared.folder = Path(settings.outputs_dir) / settings.experiment / name
    return prepared


def _identity_of_training(prepared: Run) -> dict[str, Any]:
    """Everything that can change the numbers of this training, and nothing else."""
    model = {key: value for key, value in asdict(prepared.matched.model).items() if key not in ("name", "parameters")}
    training = {key: value for key, value in asdict(prepared.settings.train).items() if key not in NOT_HASHED}
    return {
        "mixers": [{"target": mixer.target, **mixer.options} for mixer in prepared.mixers],
        "model": model,
        "data": {"fingerprint": prepared.corpus.fingerprint, "vocabulary_size": prepared.corpus.vocabulary_size},
        "train": {**training, "num_steps": prepared.num_steps, "compile": prepared.compile},
        "precision": prepared.precision,
        "device": prepared.device.type,
        "seq_len": prepared.settings.seq_len,
        "seed": prepared.settings.seed,
    }


def config_hash(identity: Any) -> str:
    """Eight hex digits. Neutral values (null, false) are left out, so that a new option changes no old hash."""

    def without_neutral(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_neutral(item) for key, item in value.items() if item is not None and item is not False}
        return [without_neutral(item) for item in value] if isinstance(value, list) else value

    return hashlib.sha256(json.dumps(without_neutral(identity), sort_keys=True).encode()).hexdigest()[:8]


def _train(prepared: Run) -> None:
    """Trains from the last kept state to the end, and writes the training's own rows."""
    settings, train_settings = prepared.settings, prepared.settings.train
    if settings.rerun:
        _clear(prepared)
    _write_config(prepared)
    model = prepared.new_model()
    resumed = checkpoint.load_last(prepared.checkpoints, model)
    state = resumed or TrainState.fresh(model)
    if prepared.compile:
        model.compile()
    batches = Batches(
        prepared.corpus.tokens["train"], settings.seq_len, train_settings.batch_size, settings.seed, prepared.device
    )
    stopwatch, stop = Stopwatch(state, prepared.device), StopRequest()
    with ExitStack() as stack:
        stack.enter_context(stop.listening())
        hooks = _hooks(prepared, state, stopwatch, stop, stack, is_resumed=resumed is not None)
        stopwatch.restart()
        try:
            train(
                state,
                lambda step: Batch(*batches.train_batch(step)),
                train_settings,
                precision=prepared.precision,
                num_steps=prepared.num_steps,
                hooks=hooks,
            )
        except DivergedError as error:
            _write_training_rows(prepared, [_diverged(str(error))])
            raise
        except torch.OutOfMemoryError as error:
            _write_training_rows(prepared, [_out_of_memory(error)])
            raise UserError(
                f"out of memory at train.batch_size={train_settings.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            ) from None
    _write_training_rows(prepared, list(_training_measurements(prepared, state, stopwatch)))
    checkpoint.save_final(prepared.checkpoints, state, prepared.record())


def _hooks(
    prepared: Run, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
) -> list[Any]:
    """Log first, so that a validation's line follows its step's; the checkpoint last, so that it holds both."""
    settings, train_settings = prepared.settings, prepared.settings.train
    log = MetricsLog(prepared.folder / "metrics.jsonl", resume_step=state.step if is_resumed else None)
    stack.callback(log.close)
    mirror = _mirror(prepared, is_resumed)
    stack.callback(mirror.close)
    print_line(mirror.notice)
    if is_resumed:
        mirror.replay(read_metrics(prepared.folder / "metrics.jsonl"))
    tokens_per_step = train_settings.batch_size * settings.seq_len
    if is_resumed:
        print_line(f"resumes at step {state.step} of {prepared.num_steps}: {prepared.folder}")
    bar = ProgressBar(prepared.num_steps, tokens_per_step, state.step, settings.mixer.name)
    stack.callback(bar.close)
    record = prepared.record()
    logging = Logging(
        log=log,
        mirror=mirror,
        bar=bar,
        stopwatch=stopwatch,
        rates=learning_rates(train_settings, prepared.num_steps),
        tokens_per_step=tokens_per_step,
        interval=train_settings.log_interval_steps,
    )
    validation_tokens_N = prepared.corpus.tokens["validation"].to(prepared.device)
    validation = Validation(
        batches=lambda: evaluation_batches(validation_tokens_N, settings.seq_len, train_settings.batch_size),
        logging=logging,
        stopwatch=stopwatch,
        folder=prepared.checkpoints,
        record=record,
        interval=prepared.validation_interval,
        num_steps=prepared.num_steps,
    )
    checkpoints = Checkpoints(
        folder=prepared.checkpoints,
        record=record,
        stopwatch=stopwatch,
        stop=stop,
        interval_seconds=train_settings.checkpoint_interval_seconds,
        validation_interval=prepared.validation_interval,
        num_steps=prepared.num_steps,
    )
    estimate = Estimate(num_steps=prepared.num_steps, start_step=state.step, print_line=print_line)
    return [logging, *([estimate] if prepared.device.type == "cpu" else []), validation, checkpoints]


def _mirror(prepared: Run, is_resumed: bool) -> WandbMirror:
    settings = prepared.settings
    return WandbMirror(
        settings.logger,
        root=ROOT,
        run_id=f"{settings.experiment}-{prepared.folder.name}",
        name=prepared.folder.name,
        group=settings.experiment,
        job_type="train",
        tags=[settings.mixer.name, settings.model.name, prepared.corpus.name],
        config=_config(prepared),
        resume=is_resumed,
    )


def _config(prepared: Run) -> dict[str, Any]:
    """The settings as given, and what they were resolved to."""
    given = asdict(prepared.settings)
    del given["trusted"], given["rerun"]
    return {
        **given,
        "resolved": {
            "backend": prepared.mixers[0].options["backend"],
            "precision": prepared.precision,
            "compile": prepared.compile,
            "device": str(prepared.device),
            "num_steps": prepared.num_steps,
            "feed_forward_width": prepared.matched.model.feed_forward_width,
            "parameters": prepared.matched.parameters,
            "corpus": corpus_label(prepared.corpus),
            "vocabulary_size": prepared.corpus.vocabulary_size,
            "num_unknown": prepared.corpus.num_unknown,
            "config_hash": prepared.config_hash,
        },
    }


def _write_config(prepared: Run) -> None:
    prepared.folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(_config(prepared), sort_keys=False, allow_unicode=True)
    (prepared.folder / "config.yaml").write_text(text, encoding="utf-8")
    stamp = json.dumps(environment(prepared.device, ROOT), indent=2)
    (prepared.folder / "environment.json").write_text(stamp + "\n", encoding="utf-8")


def _clear(prepared: Run) -> None:
    """Removes what a former run of the same settings left, so that nothing of it can be mistaken for the new one's."""
    for path in (prepared.checkpoints, prepared.folder / "results"):
        shutil.rmtree(path, ignore_errors=True)


def identity(prepared: Run, evaluation: str, hashed: str) -> Identity:
    """The columns that all rows of one results file share."""
    stamp = json.loads((prepared.folder / "environment.json").read_text(encoding="utf-8"))
    return Identity(
        experiment=prepared.settings.experiment,
        run=prepared.folder.name,
        mixer=prepared.mixers[0].target.rpartition(".")[2],
        variant=prepared.settings.mixer.name,
        backend=prepared.mixers[0].options["backend"],
        model=prepared.matched.model.name,
        parameters=prepared.matched.parameters,
        seq_len=prepared.settings.seq_len,
        evaluation=evaluation,
        seed=prepared.settings.seed,
        precision=prepared.precision,
        device=stamp["device"],
        num_devices=1,
        environment=environment_id(stamp),
        commit=f"{stamp['commit']}{'-dirty' if stamp['dirty'] else ''}",
        corpus=corpus_label(prepared.corpus),
        config_hash=hashed,
    )


def corpus_label(corpus: Corpus) -> str:
    """Name and content, as every row has it: equal labels, equal text."""
    return f"{corpus.name}@{corpus.fingerprint}"


def _write_training_rows(prepared: Run, measurements: list[Measurement]) -> None:
    path = prepared.folder / "results" / f"training-{prepared.config_hash}.jsonl"
    with ResultsWriter(path, identity(prepared, "training", prepared.config_hash)) as writer:
        for measurement in measurements:
            writer.write(measurement)


def _training_measurements(prepared: Run, state: TrainState, stopwatch: Stopwatch) -> Iterator[Measurement]:
    """What the training itself showed: its speed without each sitting's first step, its time, its memory."""
    tokens_per_step = prepared.settings.train.batch_size * prepared.settings.seq_len
    if state.warm_steps:
        speed = state.warm_steps * tokens_per_step / state.warm_seconds
        yield Measurement(
            metric="tokens_per_second", value=speed, unit="token/s", num_samples=state.warm_steps * tokens_per_step
        )
    yield Measurement(metric="train_seconds", value=state.seconds, unit="s", num_samples=state.step)
    if stopwatch.first_step_seconds is not None:
        yield Measurement(metric="first_step_seconds", value=stopwatch.first_step_seconds, unit="s")
    peak = peak_memory_mib(prepared.device)
    if peak is not None:
        yield Measurement(metric="peak_memory_mib", value=peak, unit="MiB")
    yield Measurement(metric="forward_flops_per_token", value=prepared.matched.flops_per_token, unit="FLOP")


def _diverged(reason: str) -> Measurement:
    return Measurement(metric="tokens_per_second", value=None, unit="token/s", status="diverged", reason=reason)


def _out_of_memory(error: torch.OutOfMemoryError) -> Measurement:
    reason = str(error).splitlines()[0]
    return Measurement(metric="tokens_per_second", value=None, unit="token/s", status="out_of_memory", reason=reason)


class _TrainedSubject:
    """A finished run as evaluations see it; see `evals.base.Subject`."""

    def __init__(self, prepared: Run) -> None:
        self.prepared = prepared
        self.mixer, self.seed = prepared.settings.mixer.name, prepared.settings.seed
        self.seq_len, self.device = prepared.settings.seq_len, prepared.device
        self.precision, self.corpus = prepared.precision, prepared.corpus

    def new_model(self, **changes: Any) -> LanguageModel:
        return self.prepared.new_model(**changes)

    def trained_model(self, checkpoint_name: str = "final") -> LanguageModel:
        folder = self.prepared.checkpoints / "final"
        if checkpoint_name == "best":
            folder = checkpoint.best_folder(self.prepared.checkpoints) or folder
        model, _ = checkpoint.load_model(folder, device=self.device, trusted=self.prepared.settings.trusted)
        return model


def evaluate(prepared: Run, evaluation: EvaluationSettings) -> Path:
    """Runs one evaluation on a finished training, unless its complete results are there; returns their file."""
    hashed = config_hash([prepared.config_hash, evaluation.target, evaluation.options])
    path = prepared.folder / "results" / f"{evaluation.name}-{hashed}.jsonl"
    if is_complete(path):
        return path
    built = build(evaluation.target, evaluation.options, Evaluation, prepared.settings.trusted)
    print_line(f"evaluating {evaluation.name} of {prepared.settings.mixer.name}")
    with ResultsWriter(path, identity(prepared, evaluation.name, hashed)) as writer:
        for measurement in built.run(_TrainedSubject(prepared)):
            writer.write(measurement)
    return path


def print_line(text: str) -> None:
    """A line to standard error, where the progress bar is too; standard output is for results."""
    print(text, file=sys.stderr, flush=True)
