"""One training, to its end or to a stop that keeps its state; a language model's as a job.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbench.data.batches import Batches, evaluation_batches, first_characters, num_evaluation_batches
from attnbench.machine.device import keep_freed_memory, peak_memory_mib, start_afresh
from attnbench.machine.signals import StopRequest
from attnbench.mixers.contract import check_causality
from attnbench.model.language_model import LanguageModel
from attnbench.model.matching import Matched
from attnbench.results.folder import first_environment
from attnbench.results.job import Job
from attnbench.results.rows import HASH, TRAINING, Measurement
from attnbench.settings.errors import UserError, memory_reason
from attnbench.settings.schema import MixerSettings, TrainSettings
from attnbench.training import checkpoint
from attnbench.training.checkpoint import ModelRecord, TrainState
from attnbench.training.divergence import located
from attnbench.training.hooks import (
    Checkpoints,
    DivergedError,
    Estimate,
    Logging,
    Stopwatch,
    Validating,
    Validation,
    make_up,
)
from attnbench.training.log import MetricsLog, ProgressBar, stream_metrics, watched
from attnbench.training.loop import Batch, train
from attnbench.training.prepare import Run, resolved_config, row_settings
from attnbench.training.wandb import WandbMirror, beside

log = logging.getLogger(__name__)


def make_ready(device: torch.device) -> None:
    """Make the device ready for a training: called before anything of it is built, generated or timed."""
    start_afresh(device)
    if device.type == "cpu":
        keep_freed_memory()


@dataclass(slots=True, kw_only=True)
class Training:
    """What one training is made of, a language model's or a probe's."""

    name: str
    """In front of its progress."""
    folder: Path
    """Of the job: metrics.jsonl and checkpoint/."""
    device: torch.device
    mixers: Sequence[MixerSettings]
    build: Callable[[], LanguageModel]
    batches: Callable[[int], Batch]
    """The batch of each step."""
    seq_len: int
    settings: TrainSettings
    precision: str
    num_steps: int
    record: ModelRecord
    validation: Callable[[TrainState, dict[str, Any]], Validating]
    """Makes the hook that looks at validation data, of the state and what every such hook is given."""
    validation_interval: int
    mirror: Callable[[bool], WandbMirror] | None = None
    """Opens the run in wandb, resumed or not; None: it has none."""
    compiled: bool = False
    captured: bool = False
    estimated: bool = False
    """Says after a few steps how long it will take."""

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoint"

    def run(self, stop: StopRequest, *, shares_device: bool = False) -> tuple[TrainState, Stopwatch]:
        """Train from the last kept state to the end, on a device that `make_ready` was called for.

        Args:
            shares_device: others run on the device at the same time; the state remembers it.

        Raises:
            DivergedError: with the step, the layer and the last good checkpoint.
            Interrupted: a signal asked to stop, and the state is kept.
            UserError: a damaged checkpoint, or a mixer from outside attnbench that sees the future.
        """
        model = self.build()
        resumed = checkpoint.load_last(self.checkpoints, model)
        if resumed is None:
            layers = [block.mixer for block in model.layers]
            check_causality(self.mixers, layers, self.record.model.dim, self.seq_len, self.precision)
        state = resumed or TrainState.fresh(model)
        state.shared_device |= shares_device
        stopwatch = Stopwatch(state, self.device)
        with ExitStack() as stack:
            stack.enter_context(stop.listening())
            hooks = self._hooks(state, stopwatch, stop, stack, is_resumed=resumed is not None)
            stopwatch.restart()
            try:
                make_up(state, hooks)
                train(
                    state,
                    self.batches,
                    self.settings,
                    precision=self.precision,
                    num_steps=self.num_steps,
                    hooks=hooks,
                    compiled=self.compiled,
                    captured=self.captured,
                )
            except DivergedError as error:
                raise located(error, state, self.batches, self.settings, self.precision, self.checkpoints) from None
        return state, stopwatch

    def _hooks(
        self, state: TrainState, stopwatch: Stopwatch, stop: StopRequest, stack: ExitStack, *, is_resumed: bool
    ) -> list[Any]:
        """Log first, so that a validation's line follows its step's; the checkpoint last, so that it holds both."""
        path = self.folder / "metrics.jsonl"
        metrics_log = MetricsLog(path, state.step if is_resumed else None, state.num_metrics_rows)
        stack.callback(metrics_log.close)
        mirror = self.mirror(is_resumed) if self.mirror is not None else None
        if mirror is not None:
            # What an exception ends has failed, in wandb too.
            stack.push(lambda kind, *_: mirror.close(exit_code=0 if kind is None else 1))
            log.info(mirror.notice)
            if is_resumed:
                mirror.replay(stream_metrics(path))
        if is_resumed:
            log.info(f"resumes at step {state.step} of {self.num_steps}: {self.folder}")
        tokens_per_step = self.settings.batch_size * self.seq_len
        bar = ProgressBar(self.num_steps, tokens_per_step, state.step, self.name)
        stack.callback(bar.close)
        logging = Logging(
            log=metrics_log,
            mirror=mirror,
            bar=bar,
            stopwatch=stopwatch,
            settings=self.settings,
            num_steps=self.num_steps,
            tokens_per_step=tokens_per_step,
        )
        common = {"stopwatch": stopwatch, "stop": stop, "num_steps": self.num_steps}
        checkpoints = Checkpoints(
            folder=self.checkpoints,
            record=self.record,
            log=metrics_log,
            interval_seconds=self.settings.checkpoint_interval_seconds,
            validation_interval=self.validation_interval,
            **common,
        )
        estimate = [Estimate(num_steps=self.num_steps, start_step=state.step)] if self.estimated else []
        return [logging, *estimate, self.validation(state, {"logging": logging, **common}), checkpoints]


class TrainingJob(Job):
    """One language model, trained or resumed in a folder that the evaluations of its checkpoints share."""

    evaluation = TRAINING

    def __init__(self, run: Run) -> None:
        self.run = run
        settings = run.settings
        self.label = f"training {settings.mixer.name}"
        self.experiment, self.config_hash = settings.experiment, run.config_hash
        self.folder, self.device = run.folder, run.device

    @property
    def rerun(self) -> bool:
        """Rows that are there without a finished training are of one that failed."""
        return self.run.settings.rerun or not checkpoint.is_final(self.run.checkpoints)

    @property
    def matched(self) -> Matched:
        return self.run.matched

    def columns(self) -> dict[str, Any]:
        return self.run.columns()

    def row_settings(self) -> dict[str, Any]:
        return row_settings(self.run)

    def config(self) -> dict[str, Any]:
        return resolved_config(self.run)

    def announce(self, *, done: bool) -> None:
        """Says what matching has reached, and what a finished training is."""
        log.info(self.run.matched.statement(self.run.mixer))
        if done or not self.rerun:
            log.info("finished before, not trained again (rerun=true does): %s", self.folder)

    def begin(self) -> dict[str, Any]:
        """Removes what an earlier training of the same settings left; of one that is finished keeps its environment."""
        if not self.rerun:
            return first_environment(self.folder)
        if checkpoint.is_final(self.run.checkpoints):
            checkpoint.remove_all(self.run.checkpoints)
            for name in ("environment.json", f"environment-{HASH}.json"):
                for path in self.folder.glob(name):
                    path.unlink()
        for path in (self.folder / "results").glob(f"*-{HASH}.jsonl"):
            path.unlink()
        return super().begin()

    def trial(self, max_sequences: int | None) -> Training:
        """The training with so many sequences a batch, for its first steps."""
        return training_of(self.run, max_sequences)

    def rows(self) -> Iterator[Measurement]:
        """What the training showed; one that failed has a row that says so, and is the job's `failure`."""
        run = self.run
        if not self.rerun:
            # Of a finished training the file is missing or was cut off.
            final = run.checkpoints / "final"
            counters = checkpoint.load_counters(final)
            log.info(f"{self.results}: made again from {final}, without peak memory and the first step's time")
            yield from _measurements(run, counters, stopwatch=None)
            return
        stop = StopRequest()
        make_ready(self.device)
        try:
            state, stopwatch = training_of(run).run(stop, shares_device=self.shares_device)
        except DivergedError as error:
            self.failure = error
            yield from _failed("diverged", str(error))
            return
        except (MemoryError, RuntimeError) as error:
            reason = memory_reason(error)
            if reason is None:
                raise
            self.failure = UserError(
                f"out of memory at train.batch_size={run.train.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            )
            yield from _failed("out_of_memory", reason)
            return
        yield from _measurements(run, state.counters(), stopwatch)
        checkpoint.save_final(run.checkpoints, state, run.record())
        if stop.signal is not None:
            # It came during the last step, when there was nothing left to stop but what follows.
            self.failure = stop.interruption(
                f"trained to the end, saved in {run.checkpoints}; the same command evaluates it"
            )


def training_of(run: Run, max_sequences: int | None = None) -> Training:
    """The training of a language model.

    Args:
        max_sequences: of a batch, for a trial; None: as many as the settings say.
    """
    settings, train_settings = run.settings, run.settings.train
    batch_size = min(train_settings.batch_size, max_sequences or train_settings.batch_size)
    batches = Batches(run.corpus.tokens["train"], settings.seq_len, batch_size, settings.seed, run.device)
    return Training(
        name=run.mixer,
        folder=run.folder,
        device=run.device,
        mixers=run.mixers,
        build=run.new_model,
        batches=lambda step: Batch(*batches.train_batch(step)),
        seq_len=settings.seq_len,
        settings=train_settings,
        precision=run.precision,
        num_steps=run.num_steps,
        record=run.record(),
        validation=lambda state, common: _validation(run, common),
        validation_interval=run.validation_interval,
        mirror=lambda is_resumed: _mirror(run, is_resumed),
        compiled=run.compile,
        captured=run.compile and run.device.type == "cuda",
        estimated=run.device.type == "cpu",
    )


def _validation(run: Run, common: dict[str, Any]) -> Validation:
    tokens_N, part = _validation_tokens(run)
    tokens_N = tokens_N.to(run.device)
    shape = run.seq_len, run.train.batch_size
    return Validation(
        batches=lambda: watched(
            evaluation_batches(tokens_N, *shape),
            num_evaluation_batches(len(tokens_N), *shape),
            run.train.batch_size * run.seq_len,
            "validation",
        ),
        folder=run.checkpoints,
        record=run.record(),
        part=part,
        interval=run.validation_interval,
        **common,
    )


def _validation_tokens(run: Run) -> tuple[Tensor, dict[str, int]]:
    """Tokens that validations read, and what their rows say of a part."""
    return first_characters(run.corpus.tokens["validation"], run.train.validation_characters)


def _mirror(run: Run, is_resumed: bool) -> WandbMirror:
    settings = run.settings
    return WandbMirror(
        settings.logger,
        root=beside(settings.outputs_dir),
        run_id=f"{settings.experiment}-{run.folder.name}",
        name=run.folder.name,
        group=settings.experiment,
        job_type="train",
        tags=[settings.mixer.name, settings.model.name, run.corpus.name],
        config=resolved_config(run),
        resume=is_resumed,
    )


def _failed(status: str, reason: str) -> Iterator[Measurement]:
    yield Measurement(metric="tokens_per_second", value=None, unit="token/s", status=status, reason=reason)


def _measurements(run: Run, counters: Mapping[str, Any], stopwatch: Stopwatch | None) -> Iterator[Measurement]:
    """The training's own numbers: its best loss and, where it had the device alone, its speed and memory.

    Args:
        counters: of the state at its end; one of a version that did not say who had the device gives no speed.
        stopwatch: of the sitting that ends here; None long after it.
    """
    if not counters.get("shared_device", True):
        yield from _speed(run, counters)
        if stopwatch is not None and stopwatch.first_step_seconds is not None:
            yield Measurement(metric="first_step_seconds", value=stopwatch.first_step_seconds, unit="s")
        # A process that trains one after the other keeps what libraries and graphs of former ones hold.
        peak = peak_memory_mib(run.device) if stopwatch is not None else None
        if peak is not None:
            yield Measurement(metric="peak_memory_mib", value=peak, unit="MiB")
    yield Measurement(metric="forward_flops_per_token", value=run.matched.flops_per_token, unit="FLOP")
    if run.matched.state_bytes is not None:
        yield Measurement(metric="state_bytes", value=run.matched.state_bytes, unit="B")
    if counters["best_nats"] is not None:
        axes = {"split": "validation", "checkpoint": "best", **_validation_tokens(run)[1]}
        yield Measurement(metric="nats_per_character", value=counters["best_nats"], unit="nat", settings=axes)


def _speed(run: Run, counters: Mapping[str, Any]) -> Iterator[Measurement]:
    """Without each sitting's first step, which compiles."""
    num_tokens = counters["warm_steps"] * run.train.batch_size * run.seq_len
    if num_tokens:
        speed = num_tokens / counters["warm_seconds"]
        yield Measurement(metric="tokens_per_second", value=speed, unit="token/s", num_samples=num_tokens)
    yield Measurement(metric="train_seconds", value=counters["seconds"], unit="s", num_samples=counters["step"])
