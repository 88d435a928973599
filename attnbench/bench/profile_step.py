"""The training step of a language model under the profiler, as it trains and with its modules labelled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnbench.bench.base import Subject, error_row, timed
from attnbench.bench.gate import mixer_error
from attnbench.bench.operator import Missing, tried
from attnbench.bench.parts import Place, break_down, by_operator, placed_by_region, replayed
from attnbench.bench.passes import Repetition
from attnbench.bench.profile_rows import breakdown_rows, operator_rows, peak_row
from attnbench.bench.recording import Line, Recording, record
from attnbench.bench.regions import labelled, labelled_nats, weight_parts
from attnbench.bench.roofline import Work as Cost
from attnbench.bench.traces import Work, write_trace
from attnbench.evals.lib.rows import without_numbers
from attnbench.machine.cuda_graph import CapturedCall
from attnbench.machine.timing import PeakMemory, Times, time_repeats
from attnbench.model.language_model import LanguageModel, build_model, resolve_mixer
from attnbench.model.matching import match_model
from attnbench.results.rows import Measurement
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRECISIONS, MixerSettings, ModelSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Batch, StepReport, stepper, train_step

CAPTURED, EAGER = "captured", "eager"
PEAK = "peak_memory_mib"
UNITS = {"step_milliseconds": "ms", PEAK: "MiB", "part_share": "1"}
RATE = 1e-4
NUM_BATCHES = 4
"""Of random characters, which steps take in turn."""


@dataclass(slots=True, kw_only=True, frozen=True)
class StepCase:
    """What is profiled, and how often."""

    mixer: str
    length: int
    batch_size: int
    model: ModelSettings
    vocabulary_size: int
    num_steps: int
    """Under the profiler."""
    num_lines: int
    repetition: Repetition


@dataclass(slots=True, kw_only=True, frozen=True)
class Prepared:
    """What is trained."""

    error: float
    """Of a layer, as the gate found it."""
    build: Callable[[], LanguageModel]
    flops: int
    """Of a training step."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Profiled:
    """One form of the step, measured."""

    times: Times
    """Without the profiler."""
    peak_mib: float | None
    placed: list[tuple[Work, Place]]
    """The work of `num_steps` steps."""
    lines: list[Line]
    """Of one step."""


def forms(device_type: str) -> tuple[str, ...]:
    """The step that trains, and, where modules are not to be seen in that, the one where they are."""
    return (CAPTURED, EAGER) if device_type == "cuda" else (EAGER,)


def profile_step(case: StepCase, cell: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
    """All rows of a mixer at a length, form after form."""
    cell = cell | {"backend": ""}
    mixer = tried(lambda: _resolved(case, subject))
    if isinstance(mixer, Missing):
        yield from without_numbers(UNITS, cell, *mixer)
        return
    cell = cell | {"backend": mixer.options["backend"]}
    prepared = tried(lambda: _prepared(mixer, case, subject))
    if isinstance(prepared, Missing):
        yield from without_numbers(UNITS, cell, *prepared)
        return
    for form in forms(subject.device.type):
        settings = cell | {"form": form}
        measure = _captured if form == CAPTURED else _eager
        found = tried(lambda measure=measure: measure(case, prepared.build, subject))
        if isinstance(found, Missing):
            yield from without_numbers(UNITS, settings, *found)
            continue
        # The bytes of a step are not counted: at these sizes it is its operations that take the time.
        yield error_row(prepared.error, settings)
        yield from timed("step", found.times, settings, Cost(prepared.flops, 0).floor_ms(subject.ceilings))
        yield peak_row(PEAK, found.peak_mib, settings)
        yield from breakdown_rows(break_down(found.placed, case.num_steps, found.times.median_ms), settings)
        yield from operator_rows(found.lines, settings, case.num_lines)


def _resolved(case: StepCase, subject: Subject) -> MixerSettings:
    """The mixer with the backend that runs here."""
    if subject.precision not in PRECISIONS:
        raise UserError(f"precision={subject.precision}: models train in {', '.join(PRECISIONS)}")
    (mixer,) = subject.mixers([case.mixer])
    return resolve_mixer(
        mixer, case.model, device_type=subject.device.type, precision=subject.precision, trusted=subject.trusted
    )


def _prepared(mixer: MixerSettings, case: StepCase, subject: Subject) -> Prepared:
    """A model whose parameters are softmax's, its mixer held against the definition."""
    error = mixer_error(mixer, case.model.head_width, subject.device, subject.precision, subject.trusted)
    matched = match_model(
        [mixer] * case.model.num_layers,
        case.model,
        match="params",
        seq_len=case.length,
        vocabulary_size=case.vocabulary_size,
        precision=subject.precision,
        trusted=subject.trusted,
    )

    def build() -> LanguageModel:
        return build_model(
            matched.mixers,
            matched.model,
            vocabulary_size=case.vocabulary_size,
            seed=0,
            device=subject.device,
            trusted=subject.trusted,
        )

    return Prepared(error=error, build=build, flops=round(3 * matched.flops_per_token * case.length * case.batch_size))


def _captured(case: StepCase, build: Callable[[], LanguageModel], subject: Subject) -> Profiled:
    """The step that trains on a GPU: compiled, and replayed as a CUDA graph.

    Before it records the graph it takes a few steps as they are. Two of these are profiled: there the trace tells what
    launched each kernel. The replays' times are what is reported.
    """
    memory = PeakMemory(subject.device)
    state = _fresh(build)
    step = _stepping(case, subject, stepper(state, _training(), subject.precision, compiled=True, captured=True))
    step()
    num_before = CapturedCall.NUM_WARMUP - 1
    before = record(step, subject.device, num_calls=num_before, detailed=True)
    step()
    times = _timed(case, subject, step)
    peak_mib = memory.mib()
    replays = record(step, subject.device, num_calls=case.num_steps, detailed=False)
    weights, num_tokens = weight_parts(state.model), case.batch_size * case.length
    recorded = [(work, by_operator(work, weights, num_tokens)) for work in before.reading.work]
    placed = replayed(recorded, num_before, replays.reading.work, case.num_steps)
    _keep(case, subject, "compiled", before)
    _keep(case, subject, CAPTURED, replays)
    return Profiled(times=times, peak_mib=peak_mib, placed=placed, lines=kernel_lines(placed, case.num_steps))


def _eager(case: StepCase, build: Callable[[], LanguageModel], subject: Subject) -> Profiled:
    """The same step, neither compiled nor captured: on a CPU the one that trains. Modules are labelled."""
    memory = PeakMemory(subject.device)
    state, settings = _fresh(build), _training()

    def take(batch: Batch, rate: torch.Tensor) -> StepReport:
        return train_step(state, batch, rate, settings, subject.precision, labelled_nats)

    step = _stepping(case, subject, take)
    times = _timed(case, subject, step)
    peak_mib = memory.mib()
    with labelled(state.model):
        step()
        plain = record(step, subject.device, num_calls=case.num_steps, detailed=False)
        detailed = record(step, subject.device, num_calls=1, detailed=True)
    _keep(case, subject, EAGER, plain)
    placed = placed_by_region(plain.reading)
    return Profiled(times=times, peak_mib=peak_mib, placed=placed, lines=detailed.lines)


def _fresh(build: Callable[[], LanguageModel]) -> TrainState:
    state = TrainState.fresh(build())
    state.model.train()
    return state


def _training() -> TrainSettings:
    return TrainSettings(num_steps=1)


def _stepping(
    case: StepCase, subject: Subject, step: Callable[[Batch, torch.Tensor], StepReport]
) -> Callable[[], StepReport]:
    """The step with another batch at every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BATCHES, 2, case.batch_size, case.length)
    tokens = torch.randint(case.vocabulary_size, shape, generator=generator).to(subject.device)
    batches, rate = [Batch(*pair.unbind()) for pair in tokens], torch.tensor(RATE, device=subject.device)
    num_taken = 0

    def take() -> StepReport:
        nonlocal num_taken
        num_taken += 1
        return step(batches[num_taken % NUM_BATCHES], rate)

    return take


def _timed(case: StepCase, subject: Subject, step: Callable[[], StepReport]) -> Times:
    return time_repeats(
        step,
        subject.device,
        warmup=case.repetition.warmup,
        repeats=case.repetition.repeats,
        max_seconds=case.repetition.max_seconds,
    )


def _keep(case: StepCase, subject: Subject, form: str, recording: Recording) -> None:
    if subject.folder is not None:
        write_trace(recording.trace, subject.folder / "traces" / f"{case.mixer}-T{case.length}-{form}.json.gz")


def kernel_lines(placed: Sequence[tuple[Work, Place]], num_steps: int) -> list[Line]:
    """Kernels of one step by name and part, the longest first; calls are those of one step, rounded."""
    groups: dict[tuple[str, str], list[float]] = {}
    for work, place in placed:
        groups.setdefault((work.name, place.part), []).append(work.microseconds)
    lines = [
        Line(name=name, part=part, calls=round(len(times) / num_steps), milliseconds=sum(times) / num_steps / 1e3)
        for (name, part), times in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.milliseconds)
