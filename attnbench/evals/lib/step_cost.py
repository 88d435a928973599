"""Cost of one training step: time, memory and arithmetic."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from attnbench.data.batches import Batches
from attnbench.evals.base import Subject
from attnbench.machine.device import keep_freed_memory, synchronize
from attnbench.machine.memory import available_mib, memory_capped
from attnbench.machine.precision import dtype_of
from attnbench.machine.timing import OutOfMemory, PeakMemory, Times, attempt, time_repeats
from attnbench.model.language_model import LanguageModel
from attnbench.settings.options import Options, option
from attnbench.settings.schema import ModelSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.learning_rate import learning_rates
from attnbench.training.loop import text_batch
from attnbench.training.step import StepReport, stepper


class Timed(Options):
    """Settings of evaluations and benches that repeat a call."""

    warmup: int = option(5, "calls before those that count", minimum=1)
    repeats: int = option(20, "calls that count, at most", minimum=1)
    max_seconds: float = option(
        20, "for the repeats of one call: fewer where they would take longer, at least three", above=0
    )

    def times(self, function: Callable[[], object], device: torch.device, **more: Any) -> Times:
        how = {"warmup": self.warmup, "repeats": self.repeats, "max_seconds": self.max_seconds}
        return time_repeats(function, device, **how, **more)


@dataclass(slots=True, kw_only=True, frozen=True)
class StepCost:
    parameters: int
    flops: int | None
    """FLOPs of a training step by the mixer's formula: three forward passes over the batch."""
    first_step_seconds: float
    times: Times
    peak_mib: float | None
    """Weights and optimizer included; None if the system does not tell."""


def settle(subject: Subject) -> None:
    """Prepare allocator, libraries and their workspaces before the first `measure_step`."""
    if subject.device.type == "cpu":
        keep_freed_memory()
        batches = Batches(subject.corpus.tokens["train"], 16, 1, subject.seed, subject.device)
        _stepping(subject, TrainState.fresh(subject.new_model()), batches, 1)()
        return
    # cuBLAS has a workspace for each calling thread, and the backward pass has its own thread.
    dtype = dtype_of(subject.precision)
    x_NN = torch.ones(256, 256, device=subject.device, dtype=dtype, requires_grad=True)
    (x_NN @ x_NN).sum().backward()


def measure_step(
    subject: Subject,
    *,
    length: int,
    batch_size: int,
    repetition: Timed,
    model: ModelSettings | None = None,
    finds_compiled: bool = False,
) -> StepCost | OutOfMemory:
    """Train a new model for the timed steps, after `settle`, on the subject's corpus cut to this length. Raises
    UserError if the mixer cannot be matched at size `model`.

    `finds_compiled` uses the compiler's caches, after which the seconds of the first step mean nothing.
    """
    build = subject.builder(model)
    # Around the attempt: an exception would leave the compiler's folder behind.
    on_cpu = subject.device.type == "cpu"
    with _cold_compiler(subject.compile and not finds_compiled), memory_capped(available_mib() if on_cpu else None):
        return attempt(lambda: _measure(subject, build, length, batch_size, repetition))


def lacks_text(subject: Subject, length: int, batch_size: int) -> str | None:
    there, needed = len(subject.corpus.tokens["train"]), length * batch_size + 1
    units = subject.corpus.tokenizer.units
    return None if there >= needed else f"the train split has {there} {units} and a batch needs {needed}"


def _measure(
    subject: Subject, build: Callable[[], LanguageModel], length: int, batch_size: int, repetition: Timed
) -> StepCost:
    if subject.compile:
        load_compiler(subject.device)
    memory = PeakMemory(subject.device)
    model = build()
    batches = Batches(subject.corpus.tokens["train"], length, batch_size, subject.seed, subject.device)
    state = TrainState.fresh(model)
    step = _stepping(subject, state, batches, 1 + repetition.warmup + repetition.repeats)
    synchronize(subject.device)
    started = time.perf_counter()
    step()
    synchronize(subject.device)
    first_step_seconds = time.perf_counter() - started
    times = repetition.times(step, subject.device)
    flops = model.forward_flops(length)
    return StepCost(
        parameters=model.num_parameters(),
        flops=None if flops is None else 3 * flops * batch_size,
        first_step_seconds=first_step_seconds,
        times=times,
        peak_mib=memory.mib(),
    )


def _stepping(subject: Subject, state: TrainState, batches: Batches, num_steps: int) -> Callable[[], StepReport]:
    rates = learning_rates(subject.train, num_steps).to(subject.device)
    captured = subject.compile and subject.device.type == "cuda"
    step = stepper(state, subject.train, subject.precision, compiled=subject.compile, captured=captured)
    state.model.train()

    def next_step() -> StepReport:
        report = step(text_batch(batches, state.step, state.model.dropout), rates[state.step])
        state.step += 1
        return report

    return next_step


def _cold_compiler(is_compiled: bool) -> AbstractContextManager[None]:
    """Hide earlier compilations, so that the first step has the whole cost."""
    if not is_compiled:
        return nullcontext()
    # Torch has no public name for it.
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def load_compiler(device: torch.device) -> None:
    compiled = torch.compile(lambda x: x.sin().sum())
    compiled(torch.zeros(8, device=device, requires_grad=True)).backward()
