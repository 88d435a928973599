"""One run from settings to rows: prepared, trained or resumed, evaluated; and the folder that it leaves behind.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
  config.yaml environment.json train.log metrics.jsonl checkpoint/ results/<evaluation>-<hash>.jsonl failed.txt
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from attnbench import checkpoint
from attnbench.checkpoint import TrainState
from attnbench.data import Batches, evaluation_batches
from attnbench.errors import UserError
from attnbench.evals.base import CheckpointEvaluation
from attnbench.hooks import Checkpoints, DivergedError, Estimate, Logging, Stopwatch, Validation
from attnbench.metrics import MetricsLog, WandbMirror, read_metrics
from attnbench.prepare import ROOT, Run, config_hash, identity, prepare, resolved_config
from attnbench.progress import ProgressBar
from attnbench.registry import build
from attnbench.results import Measurement, ResultsWriter, is_complete
from attnbench.runtime import StopRequest, environment, environment_id, keep_freed_memory, peak_memory_mib, start_afresh
from attnbench.settings import EvaluationSettings, RunSettings
from attnbench.train import Batch, learning_rates, train

log = logging.getLogger(__name__)


def run(settings: RunSettings) -> Path:
    """Trains, unless a finished run of the same settings is there, evaluates, and returns the run's folder.

    Raises:
        UserError: a corpus that cannot be read, a training that diverged, a damaged checkpoint.
        Interrupted: a signal asked to stop, and the state is kept.
    """
    prepared = prepare(settings)
    try:
        prepared.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"outputs_dir={settings.outputs_dir}: cannot hold {error.filename} ({error.strerror})"
        ) from error
    with ExitStack() as stack:
        _keep_log(prepared.folder / "train.log", stack)
        log.info(prepared.matched.statement(settings.mixer.name))
        try:
            if settings.rerun and checkpoint.is_final(prepared.checkpoints):
                _clear(prepared)
            if checkpoint.is_final(prepared.checkpoints):
                log.info("finished before, not trained again (rerun=true does): %s", prepared.folder)
            else:
                _train(prepared)
            for evaluation in settings.evaluations:
                evaluate(prepared, evaluation)
        except Exception as error:
            # The folder tells what became of the run, whoever looks at it later.
            (prepared.folder / "failed.txt").write_text(f"{type(error).__name__}: {error}\n", "utf-8", "replace")
            raise
    (prepared.folder / "failed.txt").unlink(missing_ok=True)
    return prepared.folder


def _keep_log(path: Path, stack: ExitStack) -> None:
    """What is said on the terminal also goes to the run's train.log, with the time."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("attnbench")
    stack.callback(logger.setLevel, logger.level)
    # Called from Python, where nobody has asked for these lines on the terminal, the file has them all the same.
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    logger.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(logger.removeHandler, handler)


def _train(prepared: Run) -> None:
    """Trains from the last kept state to the end, and writes the training's own rows."""
    settings, train_settings = prepared.settings, prepared.settings.train
    start_afresh(prepared.device)
    if prepared.device.type == "cpu":
        keep_freed_memory()
    _write_config(prepared)
    stamp = _stamp(prepared)
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
            _write_training_rows(prepared, stamp, [_diverged(str(error))])
            raise
        except torch.OutOfMemoryError as error:
            _write_training_rows(prepared, stamp, [_out_of_memory(error)])
            raise UserError(
                f"out of memory at train.batch_size={train_settings.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            ) from None
    _write_training_rows(prepared, stamp, list(_training_measurements(prepared, state, stopwatch)))
    checkpoint.save_final(prepared.checkpoints, state, prepared.record())
    if stop.signal is not None:
        # It came during the last step, when there was nothing left to stop but what follows.
        raise stop.interruption(f"trained to the end, saved in {prepared.checkpoints}; the same command evaluates it")


def _hooks(
    prepared: Run, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
) -> list[Any]:
    """Log first, so that a validation's line follows its step's; the checkpoint last, so that it holds both."""
    settings, train_settings = prepared.settings, prepared.settings.train
    metrics_log = MetricsLog(prepared.folder / "metrics.jsonl", resume_step=state.step if is_resumed else None)
    stack.callback(metrics_log.close)
    mirror = _mirror(prepared, is_resumed)
    # What an exception ends has failed, in wandb too.
    stack.push(lambda kind, *_: mirror.close(exit_code=0 if kind is None else 1))
    log.info(mirror.notice)
    if is_resumed:
        mirror.replay(read_metrics(prepared.folder / "metrics.jsonl"))
    tokens_per_step = train_settings.batch_size * settings.seq_len
    if is_resumed:
        log.info(f"resumes at step {state.step} of {prepared.num_steps}: {prepared.folder}")
    bar = ProgressBar(prepared.num_steps, tokens_per_step, state.step, settings.mixer.name)
    stack.callback(bar.close)
    record = prepared.record()
    logging = Logging(
        log=metrics_log,
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
    estimate = Estimate(num_steps=prepared.num_steps, start_step=state.step)
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
        config=resolved_config(prepared),
        resume=is_resumed,
    )


def _write_config(prepared: Run) -> None:
    prepared.folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(resolved_config(prepared), sort_keys=False, allow_unicode=True)
    (prepared.folder / "config.yaml").write_text(text, encoding="utf-8")


def _stamp(prepared: Run) -> dict[str, Any]:
    """The environment as it is now, kept in the run's folder.

    environment.json is that of the first sitting. A later one, or an evaluation made later, on another commit or
    machine has a file of its own, so that every row's `environment` can be looked up.
    """
    stamp = environment(prepared.device, ROOT)
    text, first = json.dumps(stamp, indent=2) + "\n", prepared.folder / "environment.json"
    is_first = not first.exists() or first.read_text(encoding="utf-8") == text
    path = first if is_first else prepared.folder / f"environment-{environment_id(stamp)}.json"
    path.write_text(text, encoding="utf-8")
    return stamp


def _clear(prepared: Run) -> None:
    """Removes what a former run of the same settings left, so that nothing of it can be mistaken for the new one's."""
    for path in (prepared.checkpoints, prepared.folder / "results"):
        shutil.rmtree(path, ignore_errors=True)
    for path in prepared.folder.glob("environment*.json"):
        path.unlink()


def _write_training_rows(prepared: Run, stamp: dict[str, Any], measurements: list[Measurement]) -> None:
    path = prepared.folder / "results" / f"training-{prepared.config_hash}.jsonl"
    with ResultsWriter(path, identity(prepared, stamp, "training", prepared.config_hash)) as writer:
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


def evaluate(prepared: Run, evaluation: EvaluationSettings) -> Path:
    """Runs one evaluation on a finished training, unless its complete results are there; returns their file."""
    hashed = config_hash([prepared.config_hash, evaluation.target, evaluation.options])
    path = prepared.folder / "results" / f"{evaluation.name}-{hashed}.jsonl"
    if is_complete(path):
        return path
    built = build(evaluation.target, evaluation.options, CheckpointEvaluation, prepared.settings.trusted)
    log.info(f"evaluating {evaluation.name} of {prepared.settings.mixer.name}")
    with ResultsWriter(path, identity(prepared, _stamp(prepared), evaluation.name, hashed)) as writer:
        for measurement in built.run(prepared):
            writer.write(measurement)
    return path
