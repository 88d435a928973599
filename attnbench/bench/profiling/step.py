"""The training step of a language model under the profiler, as it trains and with its modules labelled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnbench.bench.base import (
    Conditions,
    Missing,
    attempted,
    error_row,
    peak_row,
    time_rows,
)
from attnbench.bench.operators.gate import mixer_error
from attnbench.bench.operators.language_models import Candidate, candidate_of
from attnbench.bench.operators.roofline import Work as Cost
from attnbench.bench.profiling.parts import Origin, break_down, by_operator, origins_by_region, replayed
from attnbench.bench.profiling.recording import Line, Recording, record
from attnbench.bench.profiling.regions import labelled, labelled_nats, weight_parts
from attnbench.bench.profiling.rows import breakdown_rows, operator_rows
from attnbench.bench.profiling.traces import Work, write_trace
from attnbench.evals.lib.rows import without_numbers
from attnbench.evals.lib.step_cost import Repetition
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.timing import PeakMemory, Times, time_repeats
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

Build = Callable[[], LanguageModel]


@dataclass(slots=True, kw_only=True, frozen=True)
class StepCase:
    """The training step that is profiled, and how often."""

    mixer: str
    length: int
    batch_size: int
    model: ModelSettings
    vocabulary_size: int
    num_steps: int
    """Steps under the profiler."""
    num_lines: int
    repetition: Repetition


@dataclass(slots=True, kw_only=True, frozen=True)
class ProfiledStep:
    """One form of the step, measured."""

    times: Times
    """Milliseconds without the profiler."""
    peak_mib: float | None
    placed: list[tuple[Work, Origin]]
    """The work of `num_steps` steps."""
    lines: list[Line]
    """Operators or kernels of one step."""


def forms(device_type: str) -> tuple[str, ...]:
    """The step that trains, and, where its modules cannot be seen, the one where they can."""
    return (CAPTURED, EAGER) if device_type == "cuda" else (EAGER,)


def profile_step(case: StepCase, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
    """All rows of a mixer at a length, form after form."""
    cell = cell | {"backend": ""}
    candidate = attempted(lambda: _candidate(case, conditions))
    if isinstance(candidate, Missing):
        yield from without_numbers(UNITS, cell, *candidate)
        return
    cell = cell | {"backend": candidate.mixer.options["backend"]}
    checked = attempted(lambda: (_error(candidate), candidate.matched.flops_per_token))
    if isinstance(checked, Missing):
        yield from without_numbers(UNITS, cell, *checked)
        return
    error, flops_per_token = checked
    assert flops_per_token is not None, "a mixer of attnbench's own"
    # The bytes of a step are not counted: at these sizes it is its operations that take the time.
    floor_ms = Cost(round(3 * flops_per_token * case.length * case.batch_size), 0).floor_ms(conditions.ceilings)
    for form in forms(conditions.device.type):
        settings = cell | {"form": form}
        measure = _captured if form == CAPTURED else _eager
        profiled = attempted(lambda measure=measure: measure(case, candidate.build, conditions))
        if isinstance(profiled, Missing):
            yield from without_numbers(UNITS, settings, *profiled)
            continue
        yield error_row(error, settings)
        yield from time_rows("step", profiled.times, settings, floor_ms)
        yield peak_row(PEAK, profiled.peak_mib, settings)
        yield from breakdown_rows(break_down(profiled.placed, case.num_steps, profiled.times.median_ms), settings)
        yield from operator_rows(profiled.lines, settings, case.num_lines)


def _candidate(case: StepCase, conditions: Conditions) -> Candidate:
    return candidate_of(
        case.mixer,
        conditions,
        size=case.model,
        vocabulary_size=case.vocabulary_size,
        length=case.length,
        use="train",
    )


def _error(candidate: Candidate) -> float:
    conditions = candidate.conditions
    width = candidate.size.head_width
    return mixer_error(candidate.mixer, width, conditions.device, conditions.precision)


def _captured(case: StepCase, build: Build, conditions: Conditions) -> ProfiledStep:
    """The step that trains on a GPU: compiled, and replayed as a CUDA graph.

    Before it records the graph it takes a few steps as they are. Two of these are profiled: there the trace shows what
    launched each kernel. The replays' times are what is reported.
    """
    memory = PeakMemory(conditions.device)
    state = _fresh(build)
    step = _stepping(case, conditions, stepper(state, TRAINING, conditions.precision, compiled=True, captured=True))
    step()
    num_before = CapturedCall.NUM_WARMUP - 1
    before = record(step, conditions.device, num_calls=num_before, detailed=True)
    step()
    times = time_repeats(step, conditions.device, **asdict(case.repetition))
    peak_mib = memory.mib()
    replays = record(step, conditions.device, num_calls=case.num_steps, detailed=False)
    weights, num_tokens = weight_parts(state.model), case.batch_size * case.length
    recorded = [(work, by_operator(work, weights, num_tokens)) for work in before.reading.work]
    placed = replayed(recorded, num_before, replays.reading.work, case.num_steps)
    _keep(case, conditions, "compiled", before)
    _keep(case, conditions, CAPTURED, replays)
    return ProfiledStep(times=times, peak_mib=peak_mib, placed=placed, lines=kernel_lines(placed, case.num_steps))


def _eager(case: StepCase, build: Build, conditions: Conditions) -> ProfiledStep:
    """The same step, neither compiled nor captured: on a CPU the one that trains. Modules are labelled."""
    memory = PeakMemory(conditions.device)
    state = _fresh(build)

    def take(batch: Batch, rate: torch.Tensor) -> StepReport:
        return train_step(state, batch, rate, TRAINING, conditions.precision, labelled_nats)

    step = _stepping(case, conditions, take)
    times = time_repeats(step, conditions.device, **asdict(case.repetition))
    peak_mib = memory.mib()
    with labelled(state.model):
        step()
        plain = record(step, conditions.device, num_calls=case.num_steps, detailed=False)
        detailed = record(step, conditions.device, num_calls=1, detailed=True)
    _keep(case, conditions, EAGER, plain)
    return ProfiledStep(times=times, peak_mib=peak_mib, placed=origins_by_region(plain.reading), lines=detailed.lines)


def _fresh(build: Build) -> TrainState:
    state = TrainState.fresh(build())
    state.model.train()
    return state


def _stepping(
    case: StepCase, conditions: Conditions, step: Callable[[Batch, torch.Tensor], StepReport]
) -> Callable[[], StepReport]:
    """The step with another batch at every call."""
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


def _keep(case: StepCase, conditions: Conditions, form: str, recording: Recording) -> None:
    if conditions.folder is not None:
        write_trace(recording.trace, conditions.folder / "traces" / f"{case.mixer}-T{case.length}-{form}.json.gz")


def kernel_lines(placed: Sequence[tuple[Work, Origin]], num_steps: int) -> list[Line]:
    """Kernels of one step by name and part, the longest first; calls are those of one step, rounded."""
    groups: dict[tuple[str, str], list[float]] = {}
    for work, origin in placed:
        groups.setdefault((work.name, origin.part), []).append(work.microseconds)
    lines = [
        Line(name=name, part=part, calls=round(len(times) / num_steps), milliseconds=sum(times) / num_steps / 1e3)
        for (name, part), times in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.milliseconds)
