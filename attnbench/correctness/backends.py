"""Every backend of every mixer on this very device and compiler, held against the mixer's definition."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import util
from typing import Any, NamedTuple

import torch

from attnbench.correctness.operators import Check
from attnbench.evals.lib.step_cost import load_compiler
from attnbench.machine.device import resolve_precision, start_afresh, synchronize
from attnbench.mixers import fla_support
from attnbench.mixers.base import Mixer
from attnbench.mixers.definition import (
    ALLOWED,
    LENGTHS,
    MODEL,
    OTHER_SHAPES,
    TOLERANCES,
    USUAL,
    Deviation,
    Outcome,
    Shape,
    by_backend,
    by_definition,
    compare,
    exact,
    example,
    in_pieces,
    relative_error,
    worst,
)
from attnbench.model.language_model import build_model, resolve_mixer
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, TrainSettings
from attnbench.training.checkpoint import TrainState
from attnbench.training.loop import Batch, stepper

SMALL_STEP = replace(MODEL, name="small", num_layers=2, feed_forward_width=256)
"""The model whose first training step is timed."""
VOCABULARY_SIZE, BATCH_SIZE, LENGTH = 256, 8, 256

LENGTH_IN_PIECES = 133


class Choice(NamedTuple):
    """What `auto` is for a mixer here, or why it is nothing."""

    backend: str | None
    reason: str


@dataclass(slots=True, kw_only=True)
class Finding:
    """One backend of a mixer in one precision."""

    mixer: MixerSettings
    """With this backend."""
    precision: str
    is_chosen: bool
    """Whether `auto` is this backend, in this precision."""
    shape: Shape = USUAL
    refusal: str = ""
    """Why it cannot run here, as who names it is told; empty if it can."""
    failure: str = ""
    """What it raised; empty if it ran through."""
    deviations: dict[int, Deviation] = field(default_factory=dict)
    """By length."""

    @property
    def backend(self) -> str:
        return self.mixer.options["backend"]

    @property
    def wrong_lengths(self) -> list[int]:
        """Where it is further from the definition than its precision allows."""
        slack = self.shape.slack
        return [length for length, own in self.deviations.items() if not own.is_within(ALLOWED[self.precision] * slack)]

    @property
    def verdict(self) -> str:
        """refused | wrong | right; what raises is wrong."""
        if self.refusal:
            return "refused"
        return "wrong" if self.failure or self.wrong_lengths else "right"


def build_mixer(settings: MixerSettings, device: torch.device, shape: Shape = USUAL) -> Mixer:
    """A mixer with the initial weights of a model's first layer, float32.

    Args:
        settings: with the backend that shall run.
        shape: its options in place of the settings' own.
    """
    built = build_model([shape.of(settings)], shape.model, vocabulary_size=1, seed=0, device=device)
    mixer = built.layers[0].mixer
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(exact(parameter))
    return mixer


def choice(settings: MixerSettings, precision: str, device: torch.device) -> Choice:
    """What `auto` resolves to, and the mixer's rule."""
    try:
        resolved = _resolved(settings, "auto", precision, device)
    except UserError as refusal:
        return Choice(None, str(refusal))
    return Choice(resolved.options["backend"], resolve(settings.target, Mixer).auto_rule)


def examine(settings: MixerSettings, device: torch.device, lengths: Sequence[int] = LENGTHS) -> Iterator[Finding]:
    """Every backend of a mixer in every precision, each as soon as it is known."""
    expected: dict[int, Outcome] = {}
    shape = replace(USUAL, lengths=lengths)
    for backend in resolve(settings.target, Mixer).backends:
        for precision in TOLERANCES:
            chosen = choice(settings, precision, device).backend
            own = with_backend(settings, backend)
            finding = Finding(mixer=own, precision=precision, is_chosen=backend == chosen, shape=shape)
            try:
                _resolved(settings, backend, precision, device, shape)
            except UserError as refusal:
                finding.refusal = str(refusal)
            else:
                _hold_against_definition(finding, expected, device)
            yield finding


def examine_shapes(
    settings: MixerSettings, device: torch.device, shapes: Sequence[Shape] = OTHER_SHAPES
) -> Iterator[Finding]:
    """What `auto` chooses at other shapes, in the precisions of each; where it chooses nothing there is no finding."""
    for shape in shapes:
        is_repeated = bool(shape.options) and shape.options.items() <= settings.options.items()
        if is_repeated or not shape.options.keys() <= settings.options.keys():
            continue
        expected: dict[int, Outcome] = {}
        for precision in shape.precisions:
            try:
                resolve_precision(precision, device.type)
                resolved = _resolved(settings, "auto", precision, device, shape)
            except UserError:
                continue
            own = with_backend(settings, resolved.options["backend"])
            finding = Finding(mixer=own, precision=precision, is_chosen=True, shape=shape)
            _hold_against_definition(finding, expected, device)
            yield finding


def examine_pieces(settings: MixerSettings, device: torch.device) -> Iterator[tuple[MixerSettings, Check]]:
    """Every backend that runs here and takes a state, in every precision: what is read in pieces and then decoded."""
    kind = resolve(settings.target, Mixer)
    for backend in (backend for backend in kind.backends if backend not in kind.trains_only):
        own = with_backend(settings, backend)
        for precision in TOLERANCES:
            try:
                _resolved(settings, backend, precision, device)
            except UserError:
                # Its reason stands in the lines of `examine`.
                continue
            is_chosen = backend == choice(settings, precision, device).backend
            check = Check(name=f"{settings.name}, {backend}", precision=precision, is_chosen=is_chosen)
            # As in an examination of training.
            try:
                mixer = build_mixer(own, device)
                wide, (x_BTD, _) = copy.deepcopy(mixer).double(), example(LENGTH_IN_PIECES, MODEL.dim, device)
                with torch.no_grad():
                    expected_BTD = wide.reference(x_BTD.double())
                pieces = in_pieces(mixer, LENGTH_IN_PIECES, precision)
                # Each by itself: a few wrong steps do not show in the whole.
                parts = expected_BTD.split([piece.shape[1] for piece in pieces], dim=1)
                check.output = worst(relative_error(own, other) for own, other in zip(pieces, parts, strict=True))
            except Exception as error:
                check.failure = one_line(error)
            yield own, check


def _hold_against_definition(
    finding: Finding,
    expected: dict[int, Outcome],
    device: torch.device,
) -> None:
    """Fills in the deviations, or the failure that ended it.

    Args:
        expected: by length, what the definition gives; what is missing is added.
    """
    # Whatever a kernel or its compiler raises is what is looked for here: it is told, and the others still run.
    try:
        mixer = build_mixer(finding.mixer, device, finding.shape)
        for length in finding.shape.lengths:
            if length not in expected:
                expected[length] = by_definition(mixer, length, finding.shape)
            actual = by_backend(mixer, length, finding.precision, finding.shape)
            finding.deviations[length] = compare(actual, expected[length], finding.shape)
    except Exception as error:
        finding.failure = one_line(error)


def first_step_seconds(settings: MixerSettings, device: torch.device) -> float:
    """Of a small model, from its weights to the end of its first training step, as train.py takes it on this device:
    compiled on CUDA, with what the compilers have kept from earlier times.

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


@contextmanager
def guards_lifted() -> Iterator[None]:
    """Inside, the gated kernels of flash-linear-attention run where attnbench and the library itself refuse them.

    Only to show what the guards are for. attnbench's is `refuse_miscompiled_gates`; the library's stands in its
    backward pass and asks a flag of its own module whether Triton is new enough.

    Raises:
        UserError: the library is not there, or has no such flag.
    """
    if util.find_spec("fla") is None:
        raise UserError("lift_guards=true: flash-linear-attention, whose guard this is, is not installed")
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]

    if not hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        raise UserError("lift_guards=true: this flash-linear-attention has no guard of the kind that version 0.6 has")
    replaced: list[tuple[Any, str, Any]] = [
        (fla_support, "refuse_miscompiled_gates", lambda *_: None),
        (chunk_o, "TRITON_ABOVE_3_7_1", True),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


def with_backend(settings: MixerSettings, backend: str) -> MixerSettings:
    """The same mixer with another backend."""
    return replace(settings, options={**settings.options, "backend": backend})


def _resolved(
    settings: MixerSettings,
    backend: str,
    precision: str,
    device: torch.device,
    shape: Shape = USUAL,
) -> MixerSettings:
    own = shape.of(with_backend(settings, backend))
    return resolve_mixer(own, shape.model, device_type=device.type, precision=precision)
