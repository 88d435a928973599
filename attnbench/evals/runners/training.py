"""One language model: trained or resumed, and evaluated from its checkpoints, in a folder of its own.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from attnbench.data.batches import Batches, evaluation_batches, first_characters, num_evaluation_batches
from attnbench.evals.base import CheckpointEvaluation
from attnbench.evals.lib.rows import until_out_of_memory
from attnbench.machine.device import keep_freed_memory, peak_memory_mib, start_afresh
from attnbench.machine.locks import device_lock
from attnbench.machine.signals import StopRequest
from attnbench.mixers.contract import check_causality
from attnbench.results.folder import first_environment, recording, stamp_environment, write_config
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.rows import HASH, Measurement, ResultsWriter, is_complete
from attnbench.settings.errors import UserError, memory_reason
from attnbench.settings.registry import build
from attnbench.settings.schema import EvaluationSettings, RunSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.divergence import located
from attnbench.training.hooks import Checkpoints, DivergedError, Estimate, Logging, Stopwatch, Validation, make_up
from attnbench.training.loop import Batch, train
from attnbench.training.metrics import MetricsLog, stream_metrics
from attnbench.training.prepare import Run, identity, prepare, resolved_config, row_settings
from attnbench.training.progress import ProgressBar, watched
from attnbench.training.wandb import WandbMirror, beside

log = logging.getLogger(__name__)


def run_training(settings: RunSettings, *, shares_device: bool = False, waits: bool = False) -> Run:
    """Trains, unless a finished run of the same settings is there, and evaluates the checkpoints.

    Args:
        settings: their evaluations are CheckpointEvaluations.
        shares_device: others run on the device at the same time; then no speed is reported.
        waits: where another process trains this very run, for its end; otherwise that is an error. One that is only
            evaluated is waited for in any case.

    Raises:
        UserError: a corpus that cannot be read, a training that diverged, a damaged checkpoint.
        Interrupted: a signal asked to stop, and the state is kept.
    """
    prepared = prepare(settings)
    waits = waits or checkpoint.is_final(prepared.checkpoints)
    with recording(prepared.folder, waits=waits), device_lock(prepared.device, shared=shares_device):
        log.info(prepared.matched.statement(settings.mixer.name))
        if settings.rerun and checkpoint.is_final(prepared.checkpoints):
            _clear(prepared)
        if checkpoint.is_final(prepared.checkpoints):
            log.info("finished before, not trained again (rerun=true does): %s", prepared.folder)
            if not is_complete(training_results(prepared)):
                _write_rows_again(prepared)
        else:
            # Rows that are there nevertheless are of a training that failed.
            _remove_results(prepared)
            _train(prepared, shares_device)
        for evaluation in settings.evaluations:
            evaluate(prepared, evaluation)
    return prepared


def results_of(prepared: Run, evaluation: EvaluationSettings) -> Path:
    """The results file of a checkpoint evaluation of this run."""
    code = code_of([evaluation.target], ["evals"])
    hashed = hash_with_code([prepared.config_hash, evaluation.target, evaluation.options], code)
    return prepared.folder / "results" / f"{evaluation.name}-{hashed}.jsonl"


def evaluate(prepared: Run, evaluation: EvaluationSettings) -> None:
    """Runs one evaluation on a finished training, unless its complete results are there."""
    path = results_of(prepared, evaluation)
    if not prepared.settings.rerun and is_complete(path):
        return
    built = build(evaluation.target, evaluation.options, CheckpointEvaluation)
    log.info(f"evaluating {evaluation.name} of {prepared.settings.mixer.name}")
    instead = partial(built.failed, prepared, "out_of_memory")
    rows = until_out_of_memory(iter(built.run(prepared)), instead)
    _write_rows(prepared, stamp_environment(prepared.folder, prepared.device), path, rows, evaluation)


def training_results(prepared: Run) -> Path:
    """The results file of the training itself."""
    return prepared.folder / "results" / f"training-{prepared.config_hash}.jsonl"


def _train(prepared: Run, shares_device: bool) -> None:
    """Trains from the last kept state to the end, and writes the training's own rows."""
    settings, train_settings = prepared.settings, prepared.settings.train
    start_afresh(prepared.device)
    if prepared.device.type == "cpu":
        keep_freed_memory()
    write_config(prepared.folder, resolved_config(prepared))
    stamp = stamp_environment(prepared.folder, prepared.device)
    model = prepared.new_model()
    resumed = checkpoint.load_last(prepared.checkpoints, model)
    if resumed is None:
        check_causality(
            prepared.mixers,
            [block.mixer for block in model.layers],
            prepared.matched.model.dim,
            settings.seq_len,
            prepared.precision,
        )
    state = resumed or TrainState.fresh(model)
    state.shared_device |= shares_device
    batches = Batches(
        prepared.corpus.tokens["train"], settings.seq_len, train_settings.batch_size, settings.seed, prepared.device
    )

    def batch_of(step: int) -> Batch:
        return Batch(*batches.train_batch(step))

    stopwatch, stop = Stopwatch(state, prepared.device), StopRequest()
    with ExitStack() as stack:
        stack.enter_context(stop.listening())
        hooks = _hooks(prepared, state, stopwatch, stop, stack, is_resumed=resumed is not None)
        stopwatch.restart()
        try:
            make_up(state, hooks)
            train(
                state,
                batch_of,
                train_settings,
                precision=prepared.precision,
                num_steps=prepared.num_steps,
                hooks=hooks,
                compiled=prepared.compile,
                captured=prepared.compile and prepared.device.type == "cuda",
            )
        except DivergedError as error:
            place = prepared.checkpoints
            error = located(error, state, batch_of, train_settings, prepared.precision, place)
            _write_failure(prepared, stamp, "diverged", str(error))
            raise error from None
        except (MemoryError, RuntimeError) as error:
            reason = memory_reason(error)
            if reason is None:
                raise
            _write_failure(prepared, stamp, "out_of_memory", reason)
            raise UserError(
                f"out of memory at train.batch_size={train_settings.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            ) from None
    rows = _measurements(prepared, state.counters(), stopwatch)
    _write_rows(prepared, stamp, training_results(prepared), rows)
    checkpoint.save_final(prepared.checkpoints, state, prepared.record())
    if stop.signal is not None:
        # It came during the last step, when there was nothing left to stop but what follows.
        raise stop.interruption(f"trained to the end, saved in {prepared.checkpoints}; the same command evaluates it")


def _hooks(
    prepared: Run, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
) -> list[Any]:
    """Log first, so that a validation's line follows its step's; the checkpoint last, so that it holds both."""
    settings, train_settings = prepared.settings, prepared.settings.train
    metrics_log = MetricsLog(
        prepared.folder / "metrics.jsonl", state.step if is_resumed else None, state.num_metrics_rows
    )
    stack.callback(metrics_log.close)
    mirror = _mirror(prepared, is_resumed)
    # What an exception ends has failed, in wandb too.
    stack.push(lambda kind, *_: mirror.close(exit_code=0 if kind is None else 1))
    log.info(mirror.notice)
    if is_resumed:
        mirror.replay(stream_metrics(prepared.folder / "metrics.jsonl"))
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
        settings=train_settings,
        num_steps=prepared.num_steps,
        tokens_per_step=tokens_per_step,
    )
    tokens_N, part = _validation_tokens(prepared)
    tokens_N = tokens_N.to(prepared.device)
    shape = settings.seq_len, train_settings.batch_size
    validation = Validation(
        batches=lambda: watched(
            evaluation_batches(tokens_N, *shape),
            num_evaluation_batches(len(tokens_N), *shape),
            tokens_per_step,
            "validation",
        ),
        folder=prepared.checkpoints,
        record=record,
        part=part,
        logging=logging,
        stopwatch=stopwatch,
        stop=stop,
        interval=prepared.validation_interval,
        num_steps=prepared.num_steps,
    )
    checkpoints = Checkpoints(
        folder=prepared.checkpoints,
        record=record,
        log=metrics_log,
        stopwatch=stopwatch,
        stop=stop,
        interval_seconds=train_settings.checkpoint_interval_seconds,
        validation_interval=prepared.validation_interval,
        num_steps=prepared.num_steps,
    )
    estimate = Estimate(num_steps=prepared.num_steps, start_step=state.step)
    return [logging, *([estimate] if prepared.device.type == "cpu" else []), validation, checkpoints]


def _validation_tokens(prepared: Run) -> tuple[Tensor, dict[str, int]]:
    """Tokens that validations read, and what their rows say of it."""
    return first_characters(prepared.corpus.tokens["validation"], prepared.settings.train.validation_characters)


def _mirror(prepared: Run, is_resumed: bool) -> WandbMirror:
    settings = prepared.settings
    return WandbMirror(
        settings.logger,
        root=beside(settings.outputs_dir),
        run_id=f"{settings.experiment}-{prepared.folder.name}",
        name=prepared.folder.name,
        group=settings.experiment,
        job_type="train",
        tags=[settings.mixer.name, settings.model.name, prepared.corpus.name],
        config=resolved_config(prepared),
        resume=is_resumed,
    )


def _clear(prepared: Run) -> None:
    """Removes what a former run of the same settings left, so that nothing of it can be mistaken for the new one's."""
    checkpoint.remove_all(prepared.checkpoints)
    _remove_results(prepared)
    for name in ("environment.json", f"environment-{HASH}.json"):
        for path in prepared.folder.glob(name):
            path.unlink()


def _remove_results(prepared: Run) -> None:
    for path in (prepared.folder / "results").glob(f"*-{HASH}.jsonl"):
        path.unlink()


def _write_rows(
    prepared: Run,
    stamp: dict[str, Any],
    path: Path,
    measurements: Iterable[Measurement],
    evaluation: EvaluationSettings | None = None,
) -> None:
    """Those of an evaluation, or of the training itself."""
    with ResultsWriter(path, identity(prepared, stamp, path), row_settings(prepared, evaluation)) as writer:
        for measurement in measurements:
            writer.write(measurement)


def _write_rows_again(prepared: Run) -> None:
    """The rows of a finished training whose file is missing or was cut off, from its checkpoint and its environment.

    Raises:
        UserError: one of them is missing or damaged.
    """
    final, path = prepared.checkpoints / "final", training_results(prepared)
    counters, stamp = checkpoint.load_counters(final), first_environment(prepared.folder)
    log.info(f"{path}: made again from {final}, without the memory and the first step's time, which it does not keep")
    _write_rows(prepared, stamp, path, _measurements(prepared, counters, stopwatch=None))


def _write_failure(prepared: Run, stamp: dict[str, Any], status: str, reason: str) -> None:
    """Rows without numbers, of the training and of the evaluations that would have followed it."""
    speed = Measurement(metric="tokens_per_second", value=None, unit="token/s", status=status, reason=reason)
    _write_rows(prepared, stamp, training_results(prepared), [speed])
    for evaluation in prepared.settings.evaluations:
        built = build(evaluation.target, evaluation.options, CheckpointEvaluation)
        rows = built.failed(prepared, status, reason)
        _write_rows(prepared, stamp, results_of(prepared, evaluation), rows, evaluation)


def _measurements(prepared: Run, counters: Mapping[str, Any], stopwatch: Stopwatch | None) -> Iterator[Measurement]:
    """What the training itself showed: its best loss and, where it had the device alone, its speed and memory.

    Args:
        counters: of the state at its end; one of a version that did not say who had the device gives no speed.
        stopwatch: of the sitting that ends here; None long after it.
    """
    if not counters.get("shared_device", True):
        yield from _speed(prepared, counters)
        if stopwatch is not None and stopwatch.first_step_seconds is not None:
            yield Measurement(metric="first_step_seconds", value=stopwatch.first_step_seconds, unit="s")
        # A process that trains one after the other keeps what libraries and graphs of former ones hold.
        peak = peak_memory_mib(prepared.device) if stopwatch is not None else None
        if peak is not None:
            yield Measurement(metric="peak_memory_mib", value=peak, unit="MiB")
    yield Measurement(metric="forward_flops_per_token", value=prepared.matched.flops_per_token, unit="FLOP")
    if prepared.matched.state_bytes is not None:
        yield Measurement(metric="state_bytes", value=prepared.matched.state_bytes, unit="B")
    if counters["best_nats"] is not None:
        axes = {"split": "validation", "checkpoint": "best", **_validation_tokens(prepared)[1]}
        yield Measurement(metric="nats_per_character", value=counters["best_nats"], unit="nat", settings=axes)


def _speed(prepared: Run, counters: Mapping[str, Any]) -> Iterator[Measurement]:
    """Without each sitting's first step, which compiles."""
    num_tokens = counters["warm_steps"] * prepared.settings.train.batch_size * prepared.settings.seq_len
    if num_tokens:
        speed = num_tokens / counters["warm_seconds"]
        yield Measurement(metric="tokens_per_second", value=speed, unit="token/s", num_samples=num_tokens)
    yield Measurement(metric="train_seconds", value=counters["seconds"], unit="s", num_samples=counters["step"])
