"""The training step of a language model under the profiler."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnbench.bench.base import (
    Conditions,
    Missing,
    attempted,
    error_row,
    rows_or_reason,
    time_rows,
)
from attnbench.bench.operators.gate import mixer_error
from attnbench.bench.operators.language_models import candidate_of
from attnbench.bench.operators.roofline import Work
from attnbench.bench.profiling.parts import idle_row, labelled, labelled_nats, part_rows
from attnbench.bench.profiling.recording import operator_rows, record
from attnbench.evals.lib.rows import peak_row, without_numbers
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.timing import PeakMemory
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement
from attnbench.settings.schema import ModelSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.step import Batch, StepReport, stepper, train_step

CAPTURED, EAGER = "captured", "eager"
PEAK = "peak_memory_mib"
UNITS = {"step_milliseconds": "ms", PEAK: "MiB", "part_share": "1"}
RATE = 1e-4
TRAINING = TrainSettings(num_steps=1)
NUM_BATCHES = 4
"""Batches of random characters, which steps take in turn."""


@dataclass(slots=True, kw_only=True, frozen=True)
class StepCase:
    mixer: str
    length: int
    batch_size: int
    model: ModelSettings
    vocabulary_size: int
    num_steps: int
    """Steps under the profiler."""
    num_lines: int
    repetition: Timed


def profile_step(case: StepCase, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
    cell = cell | {"backend": ""}
    size = {"size": case.model, "vocabulary_size": case.vocabulary_size, "length": case.length}
    candidate = attempted(lambda: candidate_of(case.mixer, conditions, **size, use="train"))
    if isinstance(candidate, Missing):
        yield from without_numbers(UNITS, cell, *candidate)
        return
    cell = cell | {"backend": candidate.mixer.options["backend"]}
    held = (candidate.mixer, case.model.head_width, conditions.device, conditions.precision)
    checked = attempted(lambda: (mixer_error(*held), candidate.matched.flops_per_token))
    if isinstance(checked, Missing):
        yield from without_numbers(UNITS, cell, *checked)
        return
    error, flops_per_token = checked
    assert flops_per_token is not None, "a mixer of attnbench's own"
    # Bytes are not counted: at these sizes operations take the time.
    floor_ms = Work(round(3 * flops_per_token * case.length * case.batch_size), 0).floor_ms(conditions.ceilings)
    # The step that trains and, on CUDA, also the one whose modules can be seen.
    for form in (CAPTURED, EAGER) if conditions.device.type == "cuda" else (EAGER,):
        settings = cell | {"form": form}
        measured = partial(_measure, case, form, candidate.build, conditions, settings, error, floor_ms)
        yield from rows_or_reason(UNITS, settings, measured)


def _measure(
    case: StepCase,
    form: str,
    build: Callable[[], LanguageModel],
    conditions: Conditions,
    settings: dict[str, Any],
    error: float,
    floor_ms: float,
) -> Iterator[Measurement]:
    """Time and profile a step. The captured one is compiled and replayed as a CUDA graph, of which kernels alone are
    seen; the eager one has labelled modules, and on a CPU it is the one that trains."""
    memory, state = PeakMemory(conditions.device), TrainState.fresh(build())
    state.model.train()
    if form == CAPTURED:
        take = stepper(state, TRAINING, conditions.precision, compiled=True, captured=True)
    else:
        take = partial(_eager, state, conditions.precision)
    step = _stepping(case, conditions, take)
    for _ in range(CapturedCall.NUM_WARMUP + 1 if form == CAPTURED else 0):
        # The last one is recorded.
        step()
    times = case.repetition.times(step, conditions.device)
    yield error_row(error, settings)
    yield from time_rows("step", times, settings, floor_ms)
    yield peak_row(PEAK, memory.mib(), settings)
    trace = f"{case.mixer}-T{case.length}-{form}"
    if form == CAPTURED:
        replays = record(step, conditions.device, num_calls=case.num_steps, detailed=False)
        replays.write_trace(conditions.folder, trace)
        yield idle_row(replays.milliseconds / case.num_steps, times.median_ms, settings)
        yield from operator_rows(replays.kernels(), settings, case.num_lines)
        return
    with labelled(state.model):
        step()
        plain = record(step, conditions.device, num_calls=case.num_steps, detailed=False)
        detailed = record(step, conditions.device, num_calls=1, detailed=True)
    plain.write_trace(conditions.folder, trace)
    yield from part_rows(plain, case.num_steps, times.median_ms, settings)
    yield from operator_rows(detailed.lines(), settings, case.num_lines)


def _eager(state: TrainState, precision: str, batch: Batch, rate: torch.Tensor) -> StepReport:
    return train_step(state, batch, rate, TRAINING, precision, labelled_nats)


def _stepping(
    case: StepCase, conditions: Conditions, step: Callable[[Batch, torch.Tensor], StepReport]
) -> Callable[[], StepReport]:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BATCHES, 2, case.batch_size, case.length)
    tokens = torch.randint(case.vocabulary_size, shape, generator=generator).to(conditions.device)
    batches, rate = [Batch(*pair.unbind()) for pair in tokens], torch.tensor(RATE, device=conditions.device)
    num_taken = 0

    def take() -> StepReport:
        nonlocal num_taken
        num_taken += 1
        return step(batches[num_taken % NUM_BATCHES], rate)

    return take
