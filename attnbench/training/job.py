"""A language model's training as a job, which plans and commands run.

outputs/<experiment>/<variant>-<model>-T<seq_len>-seed<n>-<hash>/
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.data.batches import Batches, evaluation_batches, evaluation_shape
from attnbench.machine.device import peak_memory_mib
from attnbench.machine.group import Group
from attnbench.machine.signals import StopRequest
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.model.language_model import LanguageModel
from attnbench.model.loss import perplexity, split_nats
from attnbench.model.matching import UNCOUNTED, Matched
from attnbench.model.stored import ModelRecord
from attnbench.results.folder import first_environment
from attnbench.results.protocol import protocol_of
from attnbench.results.rows import HASH, TRAINING, Measurement
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.schema import SELECTION_SEED
from attnbench.training import checkpoint
from attnbench.training.checkpoint import TrainState
from attnbench.training.hooks import DivergedError, Stopwatch
from attnbench.training.learning_rate import shortened
from attnbench.training.log import watched
from attnbench.training.loop import text_batch
from attnbench.training.prepare import Run, resolved_config, row_settings
from attnbench.training.run import TrainedJob, make_ready
from attnbench.training.sample import write_sample
from attnbench.training.speed import speed_row
from attnbench.training.step import Batch
from attnbench.training.wandb import WandbMirror, beside

log = logging.getLogger(__name__)

FAILED = ("diverged", "out_of_memory")
"""Status of the single row of a failed training."""


class TrainingJob(TrainedJob):
    """One language model, trained or resumed in a folder that the evaluations of its checkpoints share."""

    evaluation = TRAINING

    def __init__(self, run: Run, group: Group | None = None) -> None:
        self.run, self.group = run, group
        settings = run.settings
        self.label = self.task_label = f"training {settings.mixer.name}"
        self.experiment, self.config_hash = settings.experiment, run.config_hash
        self.folder, self.device, self.matched = run.folder, run.device, run.matched
        self.name, self.train, self.num_steps = run.mixer, run.train, run.num_steps
        self.checkpoint_interval, self.estimated = run.validation_interval, run.device.type == "cpu"
        self.compiled, self.captured = run.compile, is_captured(run)
        self._loaded = None

    @property
    def rerun(self) -> bool:
        """Rows without a final checkpoint: the training failed."""
        return self.run.settings.rerun or not checkpoint.is_final(self.run.checkpoints)

    def columns(self) -> dict[str, Any]:
        # Rows made from a final checkpoint describe its training.
        num_devices = self.num_devices if self.rerun else trained_on(self.run)
        return {**self.run.columns(), "num_devices": num_devices}

    def devices(self) -> list[torch.device]:
        if self.group is None or self.device.type == "cpu":
            return [self.device]
        return [torch.device(self.device.type, index) for index in range(self.group.size)]

    def row_settings(self) -> dict[str, Any]:
        return row_settings(self.run)

    def protocol(self) -> dict[str, Any]:
        return protocol_of(None)

    def config(self) -> dict[str, Any]:
        return resolved_config(self.run)

    def announce(self, *, done: bool) -> None:
        """Log the matching, and that a training is finished."""
        log.info(self.run.matched.statement(self.run.mixer))
        if done or not self.rerun:
            log.info("finished before, not trained again (rerun=true does): %s", self.folder)

    def begin(self) -> dict[str, Any]:
        """Remove the files of an earlier training; a finished one keeps its environment."""
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

    def record(self) -> ModelRecord:
        return self.run.record()

    def build(self) -> LanguageModel:
        return self.run.new_model()

    def load_data(self) -> None:
        self._loaded = batches_of(self.run, self.group), _validation(self.run, self.num_devices)

    def trial_batch(self) -> Batch:
        return batches_of(self.run)(0)

    def batches(self, step: int) -> Batch:
        # Among several processes the whole batch is needed only after a divergence.
        return self.share(step) if self.group is None else batches_of(self.run)(step)

    def share(self, step: int) -> Batch:
        assert self._loaded is not None
        return self._loaded[0](step)

    def measure(self, state: TrainState) -> dict[str, Any]:
        assert self._loaded is not None
        return self._loaded[1](state)

    def is_due(self, step: int) -> bool:
        return step % self.run.validation_interval == 0

    def new_end(self, state: TrainState, row: dict[str, Any]) -> int | None:
        """Return the last step where `patience_validations` have gone by since the lowest loss."""
        run, patience = self.run, self.train.patience_validations
        if patience is None or state.step - state.best_step < patience * run.validation_interval:
            return None
        return shortened(run.train, run.num_steps, state.step)

    def mirror(self, is_resumed: bool) -> WandbMirror:
        run, settings = self.run, self.run.settings
        return WandbMirror(
            settings.logger,
            root=beside(settings.outputs_dir),
            run_id=f"{settings.experiment}-{run.folder.name}",
            folder=run.folder,
            name=run.folder.name,
            group=settings.experiment,
            job_type="train",
            tags=[settings.mixer.name, settings.model.name, run.corpus.name],
            config=resolved_config(run),
            resume=is_resumed,
        )

    def rows(self) -> Iterator[Measurement]:
        """Train and yield its measurements; a failed training has a row that says so, and sets `failure`."""
        run = self.run
        if not self.rerun:
            # Of a finished training the file is missing.
            final = run.checkpoints / "final"
            counters = checkpoint.load_counters(final)
            log.info(f"{self.results}: made again from {final}, without peak memory and the first step's time")
            yield from _measurements(run, counters, stopwatch=None)
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
                f"out of memory at train.batch_size={run.train.batch_size}: a smaller train.micro_batch_size "
                "divides a step without changing its result"
            )
            yield _failed("out_of_memory", trained.reason)
            return
        state, stopwatch = trained
        yield from _measurements(run, state.counters(), stopwatch)
        checkpoint.save_final(run.checkpoints, state, run.record())
        if run.seed < SELECTION_SEED:
            self._write_sample(state.model)
        if stop.signal is not None:
            # The signal came during the last step: only the evaluations stop.
            self.failure = stop.interruption(
                f"trained to the end, saved in {run.checkpoints}; the same command evaluates it"
            )

    def _write_sample(self, model: LanguageModel) -> None:
        run, tokens_N = self.run, self.run.corpus.tokens["validation"]
        try:
            written = attempt(lambda: write_sample(run.folder, model, run.record(), tokens_N))
            reason = written.reason if isinstance(written, OutOfMemory) else ""
        # A user's mixer may raise anything at other lengths.
        except Exception as error:
            reason = one_line(error)
        if reason:
            log.warning(f"{run.folder}: no sample of its text, {reason}")


def trained_on(run: Run) -> int:
    """Return the number of devices of a finished training, otherwise 1."""
    if not checkpoint.is_final(run.checkpoints):
        return 1
    return checkpoint.load_counters(run.checkpoints / "final").get("num_devices", 1)


def batches_of(run: Run, group: Group | None = None) -> Callable[[int], Batch]:
    """Return the batch of each step, or this rank's rows of it."""
    rank, num_ranks = (group.rank, group.size) if group is not None else (0, 1)
    train_N, shape = run.corpus.tokens["train"], (run.seq_len, run.train.batch_size)
    batches = Batches(train_N, *shape, run.seed, run.device, rank, num_ranks, release=run.corpus.release)
    return lambda step: text_batch(batches, step, run.settings.model.dropout)


def is_captured(run: Run) -> bool:
    """Tell if the step, with the reduction over GPUs, is replayed as a CUDA graph."""
    return run.compile and run.device.type == "cuda"


def _validation(run: Run, num_devices: int) -> Callable[[TrainState], dict[str, Any]]:
    """Return the measurement of the validation split by one device, with the rows of its training."""
    tokens_N, part = _validation_tokens(run)
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


def _validation_tokens(run: Run) -> tuple[Tensor, dict[str, int]]:
    return run.corpus.first_characters("validation", run.train.validation_characters)


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
        axes = {"split": "validation", "checkpoint": "best", **_validation_tokens(run)[1]}
        yield Measurement(metric="nats_per_character", value=counters["best_nats"], unit="nat", settings=axes)


def budget(matched: Matched) -> Iterator[Measurement]:
    """Measure the cost of a model."""
    flops, unknown = matched.flops_per_token, matched.flops_per_token is None
    status, reason = ("unsupported", UNCOUNTED) if unknown else ("ok", "")
    yield Measurement(metric="forward_flops_per_token", value=flops, unit="FLOP", status=status, reason=reason)
    if matched.state_bytes is not None:
        yield Measurement(metric="state_bytes", value=matched.state_bytes, unit="B")
