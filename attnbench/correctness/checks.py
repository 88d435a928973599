"""Checks of the doctor: every backend of every mixer, every operator, every promise of a mixer from outside
attnbench.

`..._checks` list the checks of this device, with refusals; running.py runs them.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from attnbench.correctness.operators import IN_TF32, OPERATORS
from attnbench.machine.device import interpreted
from attnbench.machine.precision import resolve_precision
from attnbench.mixers.base import Mixer
from attnbench.mixers.causality import input_of, woken
from attnbench.mixers.contract import PROMISES
from attnbench.mixers.definition import LENGTHS, USUAL, Case, exact
from attnbench.model.building import build_model, resolve_mixer
from attnbench.settings.errors import UserError
from attnbench.settings.registry import class_named, is_own, resolve
from attnbench.settings.schema import MixerSettings

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
    Case(name="rotary positions", lengths=(133,), options={"rotary_theta": 10000.0}),
    Case(
        name="outputs normed and gated by a sigmoid",
        lengths=(133,),
        options={"output_norm": True, "output_gate": "sigmoid"},
    ),
    Case(name="one head of keys for two", lengths=(133,), options={"num_key_value_heads": 1}),
    Case(name="a window of 50 positions", lengths=(65, 133), options={"window": 50}),
    Case(
        name="a window of 64 positions, one head of keys, normed",
        lengths=(133,),
        options={"window": 64, "num_key_value_heads": 1, "qk_norm": True},
    ),
    Case(name="a window of 530 positions", lengths=(577,), options={"window": 530}),
    Case(name="products in TF32", lengths=(133,), precisions=("tf32",)),
)
"""Cases with other kernels, or kernels compiled differently, than the usual case."""

LENGTH_IN_PIECES = 133


class Error(NamedTuple):
    metric: str
    value: float
    allowed: float
    settings: dict[str, Any]
    """Further settings of its row: length, parameter."""

    @property
    def is_within(self) -> bool:
        """NaN is never within a limit."""
        return self.value <= self.allowed


@dataclass(slots=True, kw_only=True)
class Check:
    kind: str
    """training | operator | decoding | promise."""
    name: str
    mixer: MixerSettings
    """Mixer with the checked backend, or an operator as a mixer with backend triton."""
    precision: str
    is_chosen: bool = True
    """True for the backend of `auto` here, and if no setting chooses."""
    case: Case = USUAL
    refusal: str = ""
    """Reason why it cannot run here, or ""."""
    failure: str = ""
    """Exception or broken promise in words, or ""."""
    where: str = ""
    """File:line in the user's mixer that raised, or ""."""
    errors: list[Error] = field(default_factory=list)

    @property
    def backend(self) -> str:
        return self.mixer.options["backend"]

    @property
    def is_wrong(self) -> bool:
        return bool(self.failure) or not all(error.is_within for error in self.errors)

    def wrong_lengths(self) -> dict[int, list[Error]]:
        by_length: dict[int, list[Error]] = {}
        for error in self.errors:
            by_length.setdefault(error.settings["sequence_length"], []).append(error)
        return {length: errors for length, errors in by_length.items() if not all(error.is_within for error in errors)}


def build_mixer(settings: MixerSettings, device: torch.device, case: Case = USUAL) -> Mixer:
    """Build a mixer with the float32 initial weights of a model's first layer; one from outside attnbench that outputs
    zero gets other weights. Options of `case` replace those of the settings, whose backend is resolved."""
    model = build_model([case.of(settings)], case.model, vocabulary_size=1, seed=0, device=device)
    mixer = model.layers[0].mixer
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(exact(parameter))
    if is_own(class_named(settings)):
        return mixer
    with torch.no_grad():
        # By the definition, as some kernels only take half precision.
        return mixer if mixer.reference(input_of(mixer, LENGTHS[1], case.model.dim)).any() else woken(mixer)


def with_backend(settings: MixerSettings, backend: str) -> MixerSettings:
    return replace(settings, options={**settings.options, "backend": backend})


def resolved(
    settings: MixerSettings, backend: str, precision: str, device: torch.device, case: Case = USUAL
) -> MixerSettings:
    resolve_precision(precision, device.type)
    named = case.of(with_backend(settings, backend))
    chosen = resolve_mixer(named, case.model, device_type=device.type, precision=precision)
    return with_backend(settings, chosen.options["backend"])


def _chosen(settings: MixerSettings, precision: str, device: torch.device, case: Case = USUAL) -> MixerSettings | None:
    with suppress(UserError):
        return resolved(settings, "auto", precision, device, case)
    return None


def training_checks(settings: MixerSettings, device: torch.device, lengths: Sequence[int] = LENGTHS) -> Iterator[Check]:
    case = replace(USUAL, lengths=lengths)
    for backend in resolve(settings.target, Mixer).backends:
        for precision in case.precisions:
            check = Check(
                kind="training",
                name=settings.name,
                mixer=with_backend(settings, backend),
                precision=precision,
                is_chosen=_chosen(settings, precision, device) == with_backend(settings, backend),
                case=case,
            )
            try:
                resolved(settings, backend, precision, device)
            except UserError as refusal:
                check.refusal = str(refusal)
            yield check


def case_checks(settings: MixerSettings, case: Case, device: torch.device) -> Iterator[Check]:
    """List the backend of `auto` in a case, unless the mixer lacks its options, has them anyway, or has no backend."""
    is_repeated = bool(case.options) and case.options.items() <= settings.options.items()
    if not is_repeated and case.options.keys() <= settings.options.keys():
        for precision in case.precisions:
            mixer = _chosen(settings, precision, device, case)
            if mixer is not None:
                yield Check(kind="training", name=settings.name, mixer=mixer, precision=precision, case=case)


def operator_checks(device: torch.device) -> Iterator[Check]:
    """Operators are left out if layers use torch's own form here."""
    if device.type != "cuda" and not interpreted():
        return
    for name in OPERATORS:
        settings = MixerSettings(name=name, target="attnbench.ops.kernels", options={"backend": "triton"})
        # The interpreter multiplies bfloat16 wrongly, and has no TF32.
        for precision in ("float32",) if interpreted() else ("float32", "bfloat16", "tf32"):
            if precision != "tf32" or name in IN_TF32:
                yield Check(kind="operator", name=name, mixer=settings, precision=precision)


def decoding_checks(settings: MixerSettings, device: torch.device) -> Iterator[Check]:
    """Every backend with a state in every precision: a prompt in pieces, then decoding."""
    trains_only = resolve(settings.target, Mixer).trains_only
    for check in training_checks(settings, device, (LENGTH_IN_PIECES,)):
        if not check.refusal and check.backend not in trains_only:
            yield replace(check, kind="decoding", name=f"{settings.name}, {check.backend}")


def promise_checks(settings: MixerSettings, device: torch.device) -> Iterator[Check]:
    mixer = resolved(settings, "auto", "float32", device)
    only_trains = mixer.options["backend"] in resolve(settings.target, Mixer).trains_only
    for promise in PROMISES:
        if not (promise.needs_state and only_trains):
            yield Check(kind="promise", name=promise.words, mixer=mixer, precision="float32")
