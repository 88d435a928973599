"""Checks of the doctor: every backend of every mixer, and every operator, on this very device and compiler.

Planning is separate from running: a function `..._checks` lists what there is to look at, refusals filled in, and
`run` fills in one check. Nearly all of that time is compiling on a GPU, a kernel for each width, precision and layout.
So `compiled_ahead` shares the checks out to worker processes, as many as there are cores. A worker calls `compile_for`:
it runs the backend of a check, without the slow definition, and so leaves the kernels in the compilers' caches on disk.
The doctor's process takes the checks in their order, each as soon as its kernels are compiled, finds them in the cache,
and holds the backend against the definition by itself, one check after the other, as it does on a CPU without workers.
First training steps are compiled by the workers too, before all else, and are timed when every worker has ended.
"""

import os
import tempfile
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnbench.correctness.operators import IN_TF32, OPERATORS, operator_errors
from attnbench.evals.lib.step_cost import load_compiler
from attnbench.machine.device import interpreted, start_afresh, synchronize
from attnbench.machine.precision import resolve_precision
from attnbench.machine.processes import run_in_processes
from attnbench.mixers.base import Mixer
from attnbench.mixers.contract import PROMISES, breach
from attnbench.mixers.definition import (
    LENGTHS,
    MODEL,
    TOLERANCES,
    USUAL,
    Case,
    Computed,
    by_backend,
    by_definition,
    compare,
    exact,
    in_pieces,
    limits,
    relative_error,
    worst,
)
from attnbench.model.language_model import build_model, resolve_mixer
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.registry import is_own, resolve
from attnbench.settings.schema import MixerSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Batch, stepper

CASES = (
    Case(name="heads of 16 channels", head_width=16, lengths=(65, 133)),
    Case(name="heads of 32 channels", head_width=32, lengths=(65, 133)),
    Case(name="heads of 128 channels", head_width=128, lengths=(65, 133)),
    Case(
        name="keys of 256 channels",
        head_width=256,
        lengths=(133,),
        precisions=("bfloat16",),
        options={"value_expansion": 0.5},
    ),
    Case(name="so long that few heads go over their chunks side by side", lengths=(577,)),
    Case(name="values of 48 channels", lengths=(133,), options={"value_expansion": 0.75}),
    Case(name="a convolution of four taps", lengths=(133,), options={"conv_size": 4}),
    Case(name="query and key normed", lengths=(133,), options={"qk_norm": True}),
    Case(name="one head of keys for two", lengths=(133,), options={"num_key_value_heads": 1}),
    Case(name="a window of 50 positions", lengths=(65, 133), options={"window": 50}),
    Case(
        name="a window of 50 positions, one head of keys, normed",
        lengths=(133,),
        options={"window": 50, "num_key_value_heads": 1, "qk_norm": True},
    ),
    Case(name="a window of 530 positions", lengths=(577,), options={"window": 530}),
    Case(name="products in TF32", lengths=(133,), precisions=("tf32",)),
)
"""Cases in which other kernels run, or the same compiled otherwise: right at the usual one, they may be wrong here."""

LENGTH_IN_PIECES = 133

SMALL_STEP = replace(MODEL, name="small", num_layers=2, feed_forward_width=256)
"""Model whose first training step is timed."""
VOCABULARY_SIZE, BATCH_SIZE, LENGTH = 256, 8, 256

WORKER_MIB = 2048
"""Device memory for each worker, most of it what CUDA itself takes."""


class Error(NamedTuple):
    """One relative error, and how large it may be."""

    metric: str
    value: float
    allowed: float
    settings: dict[str, Any]
    """Settings of its row beyond the check's: length, parameter."""

    @property
    def is_within(self) -> bool:
        """True for an error that is allowed, which a NaN never is."""
        return self.value <= self.allowed


@dataclass(slots=True, kw_only=True)
class Check:
    """One line of the doctor: a backend, operator, promise or first step, in one precision."""

    kind: str
    """training | operator | decoding | promise | first step."""
    name: str
    mixer: MixerSettings
    """Mixer with the backend that is checked; an operator stands as one whose backend is triton."""
    precision: str
    is_chosen: bool = True
    """True for what runs here unless something else is named, as `auto` does."""
    case: Case = USUAL
    refusal: str = ""
    """Reason why it cannot run here; empty if it can."""
    failure: str = ""
    """Words of what it raised or of how a promise is broken; empty if it ran through."""
    errors: list[Error] = field(default_factory=list)
    seconds: float | None = None
    """Time of a first step."""

    @property
    def backend(self) -> str:
        return self.mixer.options["backend"]

    @property
    def is_wrong(self) -> bool:
        """True for what failed or has an error that is not allowed."""
        return bool(self.failure) or not all(error.is_within for error in self.errors)

    def wrong_lengths(self) -> dict[int, list[Error]]:
        """Return all errors at each length that has one which is not allowed."""
        by_length: dict[int, list[Error]] = {}
        for error in self.errors:
            by_length.setdefault(error.settings["sequence_length"], []).append(error)
        return {length: errors for length, errors in by_length.items() if not all(error.is_within for error in errors)}


def build_mixer(settings: MixerSettings, device: torch.device, case: Case = USUAL) -> Mixer:
    """Build a mixer with the initial weights of a model's first layer, float32.

    Args:
        settings: with the backend that shall run.
        case: its options replace the settings' own.
    """
    model = build_model([case.of(settings)], case.model, vocabulary_size=1, seed=0, device=device)
    mixer = model.layers[0].mixer
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(exact(parameter))
    return mixer


def with_backend(settings: MixerSettings, backend: str) -> MixerSettings:
    """Return the same mixer with another backend."""
    return replace(settings, options={**settings.options, "backend": backend})


def resolved_backend(
    settings: MixerSettings,
    precision: str,
    device: torch.device,
    case: Case = USUAL,
) -> str:
    """Return the backend that the settings name, `auto` resolved.

    Raises:
        UserError: it cannot run here.
    """
    resolve_precision(precision, device.type)
    resolved = resolve_mixer(case.of(settings), case.model, device_type=device.type, precision=precision)
    return resolved.options["backend"]


def _auto(settings: MixerSettings, precision: str, device: torch.device) -> str | None:
    try:
        return resolved_backend(with_backend(settings, "auto"), precision, device)
    except UserError:
        return None


def training_checks(settings: MixerSettings, device: torch.device, lengths: Sequence[int] = LENGTHS) -> Iterator[Check]:
    """List every backend of a mixer in every precision."""
    case = replace(USUAL, lengths=lengths)
    for backend in resolve(settings.target, Mixer).backends:
        for precision in case.precisions:
            check = Check(
                kind="training",
                name=settings.name,
                mixer=with_backend(settings, backend),
                precision=precision,
                is_chosen=backend == _auto(settings, precision, device),
                case=case,
            )
            try:
                resolved_backend(check.mixer, precision, device, case)
            except UserError as refusal:
                check.refusal = str(refusal)
            yield check


def case_checks(settings: MixerSettings, case: Case, device: torch.device) -> Iterator[Check]:
    """List what `auto` chooses in a case, in the precisions of it; nothing where the mixer has no such option, is the
    same by its yaml anyway, or `auto` chooses nothing."""
    is_repeated = bool(case.options) and case.options.items() <= settings.options.items()
    if is_repeated or not case.options.keys() <= settings.options.keys():
        return
    for precision in case.precisions:
        try:
            backend = resolved_backend(with_backend(settings, "auto"), precision, device, case)
        except UserError:
            continue
        mixer = with_backend(settings, backend)
        yield Check(kind="training", name=settings.name, mixer=mixer, precision=precision, case=case)


def operator_checks(device: torch.device, names: Collection[str] = tuple(OPERATORS)) -> Iterator[Check]:
    """List each operator in every precision it has here; none where layers take torch's own form of them."""
    if device.type != "cuda" and not interpreted():
        return
    for name in names:
        settings = MixerSettings(name=name, target="attnbench.kernels", options={"backend": "triton"})
        # The interpreter multiplies bfloat16 wrongly, and has no TF32.
        for precision in ("float32",) if interpreted() else ("float32", "bfloat16", "tf32"):
            if precision != "tf32" or name in IN_TF32:
                yield Check(kind="operator", name=name, mixer=settings, precision=precision)


def decoding_checks(settings: MixerSettings, device: torch.device) -> Iterator[Check]:
    """List every backend that runs here and takes a state, in every precision: read in pieces, then decoded."""
    trains_only = resolve(settings.target, Mixer).trains_only
    for check in training_checks(settings, device, (LENGTH_IN_PIECES,)):
        if not check.refusal and check.backend not in trains_only:
            yield replace(check, kind="decoding", name=f"{settings.name}, {check.backend}")


def promise_checks(settings: MixerSettings, device: torch.device) -> Iterator[Check]:
    """List the promises of a mixer from outside attnbench, with the backend that `auto` is in float32.

    Raises:
        UserError: it is none.
    """
    if is_own(settings.target):
        return
    backend = resolved_backend(with_backend(settings, "auto"), "float32", device)
    mixer = with_backend(settings, backend)
    only_trains = backend in resolve(settings.target, Mixer).trains_only
    for promise in PROMISES:
        if not (promise.needs_state and only_trains):
            yield Check(kind="promise", name=promise.words, mixer=mixer, precision="float32")


def first_step_check(settings: MixerSettings, precision: str, device: torch.device) -> Iterator[Check]:
    """List the first training step with the backend that `auto` is; nothing where it is none."""
    backend = _auto(settings, precision, device)
    if backend is not None:
        mixer = with_backend(settings, backend)
        yield Check(kind="first step", name=settings.name, mixer=mixer, precision=precision)


def run(check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]) -> None:
    """Fill in a check's errors or its failure; one that is refused stays as it is.

    Args:
        expected: results of definitions by mixer, case and length; missing ones are added.
    """
    # Whatever a kernel or its compiler raises is what is looked for here: it is reported, and the others still run.
    try:
        if check.refusal:
            return
        if check.kind == "training":
            _hold_against_definition(check, device, expected)
        elif check.kind == "decoding":
            _hold_decoding(check, device, expected)
        elif check.kind == "operator":
            errors = operator_errors(check.name, check.precision, device)
            allowed = TOLERANCES[check.precision]
            check.errors = [Error(f"{part}_error", value, allowed, {}) for part, value in errors.items()]
        elif check.kind == "promise":
            (promise,) = (promise for promise in PROMISES if promise.words == check.name)
            check.failure = breach(promise, partial(build_mixer, check.mixer, device), USUAL)
        else:
            check.seconds = first_step_seconds(check.mixer, device)
    except Exception as error:
        check.failure = one_line(error)


def _hold_against_definition(
    check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]
) -> None:
    mixer = build_mixer(check.mixer, device, check.case)
    allowed = limits(TOLERANCES[check.precision] * check.case.slack)
    for length in check.case.lengths:
        key = (check.mixer.name, check.case.name, length)
        if key not in expected:
            expected[key] = by_definition(mixer, length, check.case)
        deviation = compare(by_backend(mixer, length, check.precision, check.case), expected[key], check.case)
        for part, limit in allowed.items():
            settings = {"sequence_length": length}
            if part == "parameter_gradient":
                settings |= {"parameter": deviation.parameter}
            check.errors.append(Error(f"{part}_error", getattr(deviation, part), limit, settings))


def _hold_decoding(check: Check, device: torch.device, expected: dict[tuple[str, str, int], Computed]) -> None:
    mixer, key = build_mixer(check.mixer, device), (check.mixer.name, "", LENGTH_IN_PIECES)
    if key not in expected:
        expected[key] = by_definition(mixer, LENGTH_IN_PIECES)
    pieces = in_pieces(mixer, LENGTH_IN_PIECES, check.precision)
    # Each by itself: a few wrong steps do not show in the whole.
    parts = expected[key].output_BTD.split([piece.shape[1] for piece in pieces], dim=1)
    largest = worst(relative_error(piece, part) for piece, part in zip(pieces, parts, strict=True))
    check.errors = [Error("output_error", largest, TOLERANCES[check.precision], {})]


def first_step_seconds(settings: MixerSettings, device: torch.device) -> float:
    """Measure a small model from its weights to the end of its first training step, as train.py takes it on this
    device: compiled on CUDA, with what the compilers have kept.

    Args:
        settings: with the backend that shall run.
    """
    precision, is_compiled = resolve_precision("auto", device.type), device.type == "cuda"
    if is_compiled:
        load_compiler(device)
    start_afresh(device)
    model = build_model(
        [settings] * SMALL_STEP.num_layers,
        SMALL_STEP,
        vocabulary_size=VOCABULARY_SIZE,
        seed=0,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY_SIZE, (2, BATCH_SIZE, LENGTH), generator=generator).to(device)
    rate = torch.tensor(1e-3, device=device)
    step = stepper(TrainState.fresh(model), TrainSettings(num_steps=1), precision, compiled=is_compiled)
    synchronize(device)
    started = time.perf_counter()
    step(Batch(*tokens.unbind()), rate)
    synchronize(device)
    return time.perf_counter() - started


def compiled_ahead(checks: Sequence[Check], device: torch.device) -> Generator[Check, None, None]:
    """Yield the checks in their order, each as soon as workers have compiled for it; first steps, which are timed,
    at the end and when all workers have ended. Without a GPU or a second core: all of them at once.

    A worker's error is not looked at: the check meets it again.
    """
    timed = [check for check in checks if check.kind == "first step"]
    others = [check for check in checks if check.kind != "first step"]
    workers = num_workers(device)
    if workers < 2:
        yield from [*others, *timed]
        return
    items = [(index, check, device) for index, check in enumerate([*timed, *others])]
    compiled = set()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_in_processes(
            compile_for, items, num_workers=workers, log=Path(folder) / "workers.log", num_threads=1
        )
        with closing(outcomes):
            for index, check, _ in items[len(timed) :]:
                while index not in compiled:
                    compiled.add(next(outcomes).item[0])
                yield check
            for _ in outcomes:
                pass
    yield from timed


def num_workers(device: torch.device) -> int:
    """Return how many processes may compile at a time: a core and WORKER_MIB of the GPU for each; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free_mib = torch.cuda.mem_get_info(device)[0] // 2**20
    return min(len(os.sched_getaffinity(0)), free_mib // WORKER_MIB)


def compile_for(item: tuple[int, Check, torch.device]) -> None:
    """Run the backend of a check, so that its kernels lie compiled in the caches on disk."""
    _, check, device = item
    if check.refusal or check.kind == "promise":
        return
    if check.kind in ("operator", "first step"):
        run(check, device, {})
        return
    mixer = build_mixer(check.mixer, device, check.case)
    if check.kind == "decoding":
        in_pieces(mixer, LENGTH_IN_PIECES, check.precision)
        return
    for length in check.case.lengths:
        by_backend(mixer, length, check.precision, check.case)
