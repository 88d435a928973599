"""Matching of models: solves the feed-forward width for softmax's parameters or FLOPs, or a setting of the mixer for
Gated DeltaNet's state."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnbench.machine.precision import dtype_of
from attnbench.mixers.base import Mixer, State, state_bytes
from attnbench.model.building import build_layer, build_meta, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.hybrid import layers_of
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, ModelSettings

# Rotary positions have no parameters and no counted operations, and need an even width.
REFERENCE = MixerSettings(
    name="softmax", target="attnbench.mixers.softmax.Softmax", options={"backend": "torch", "rotary_theta": None}
)
STATE_REFERENCE = MixerSettings(
    name="gated_deltanet", target="attnbench.mixers.gated_deltanet.GatedDeltaNet", options={"backend": "torch"}
)
TOLERANCE = 0.01
STATE_TOLERANCE = 0.1
"""A state's size changes in steps of heads and channels."""
UNCOUNTED = "an unknown number of operations"


@dataclass(slots=True, kw_only=True)
class Matched:
    mixers: list[MixerSettings]
    """One a layer, with the options that match=state chose."""
    model: ModelSettings
    match: str
    parameters: int
    reference_parameters: int
    num_branches: int
    """See `LanguageModel.num_branches`."""
    flops_per_token: float | None
    """Forward FLOPs at `seq_len`; None if a mixer does not count its own."""
    reference_flops_per_token: float
    state_bytes: int | None
    """State of one sequence of `seq_len`, all layers, caches in the dtype of `precision`; None if a backend only
    trains."""
    seq_len: int
    precision: str
    state_mismatch: float | None
    """Remaining mismatch of match=state as a share of the reference's memory; None for another match."""
    state_settings: list[str]
    """Settings chosen by match=state, ["value_expansion 2"], each once."""

    def statement(self, mixer: str) -> str:
        parameters = self.parameters / self.reference_parameters - 1
        state = "no decoding state"
        if self.state_bytes is not None:
            state = f"{self.state_bytes:,} state bytes a sequence of {self.seq_len:,} in {self.precision}"
        flops, memory = UNCOUNTED, ""
        if self.flops_per_token is not None:
            difference = self.flops_per_token / self.reference_flops_per_token - 1
            flops = f"{self.flops_per_token / 1e6:.2f} forward MFLOPs a token ({difference:+.2%})"
        if self.state_mismatch is not None:
            chosen = "; ".join(self.state_settings)
            memory = f", its memory {self.state_mismatch:+.2%} of {STATE_REFERENCE.name}'s by {chosen}"
        unsolved = (
            ""
            if self.match != "none" or self.model.feed_forward_width
            else " (no feed-forward whose width could be solved)"
        )
        return (
            f"match={self.match}{unsolved}: {mixer} has {self.parameters:,} parameters "
            f"({parameters:+.2%} of plain softmax's) and {flops}, "
            f"feed_forward_width {self.model.feed_forward_width}, {self.model.num_layers} layers, "
            f"{state}{memory}"
        )


def match_mixer(mixer: MixerSettings, model: ModelSettings, *, device_type: str, precision: str, **how: Any) -> Matched:
    """Resolve a mixer's or hybrid's backends and match its model; see `match_model`."""
    resolved = resolve_mixer(mixer, model, device_type=device_type, precision=precision)
    return match_model(layers_of(resolved, model.num_layers), model, precision=precision, **how)


def match_model(
    mixers: Sequence[MixerSettings],
    model: ModelSettings,
    *,
    match: str,
    seq_len: int,
    vocabulary_size: int,
    num_logits: int | None = None,
    precision: str = "float32",
) -> Matched:
    """Solve `feed_forward_width` within 1 % (in steps of 8 if possible), or mixers' states.

    Everything else is equal across mixers. A model without feed-forward has no width to solve and stays unmatched. With
    match=state each layer's mixer gets the setting whose memory is nearest Gated DeltaNet's in this model; see
    `Mixer.state_choices`.

    Args:
        mixers: one a layer, backends resolved.
        match: "params", "flops" (at `seq_len`), "state" or "none".
        num_logits: positions of a sequence at which logits are read; None: all.
        precision: of the training, for `state_bytes`.
    """
    # Softmax's counts do not depend on heads; one head fits every width.
    alike = replace(model, head_width=model.dim)
    softmax = build_meta([REFERENCE] * model.num_layers, alike, vocabulary_size=vocabulary_size)
    reference = _size(softmax, model.feed_forward_width, seq_len, num_logits)
    assert reference.flops_per_token is not None, "softmax counts its operations"
    target = reference.flops_per_token if match == "flops" else reference.parameters
    width = model.feed_forward_width
    layers, mismatch, values = list(mixers), None, []
    if match == "state":
        layers, mismatch, values = _match_states(mixers, model)
    chosen = build_meta(layers, model, vocabulary_size=vocabulary_size)

    def measure(width: int) -> float:
        size = _size(chosen, width, seq_len, num_logits)
        if match != "flops":
            return size.parameters
        if size.flops_per_token is None:
            names = ", ".join(dict.fromkeys(mixer.name for mixer in mixers))
            raise UserError(f"match=flops: the model of {names} has {UNCOUNTED}; match=params or none")
        return size.flops_per_token

    if match in ("params", "flops") and width:
        width = solve_width(measure, target, match)
    size = _size(chosen, width, seq_len, num_logits)
    return Matched(
        mixers=layers,
        model=replace(model, feed_forward_width=width),
        match=match if match == "state" or model.feed_forward_width else "none",
        parameters=size.parameters,
        reference_parameters=reference.parameters,
        num_branches=chosen.num_branches,
        flops_per_token=size.flops_per_token,
        reference_flops_per_token=reference.flops_per_token,
        state_bytes=_state_bytes(chosen, seq_len, precision),
        seq_len=seq_len,
        precision=precision,
        state_mismatch=mismatch,
        state_settings=values,
    )


class Size(NamedTuple):
    parameters: int
    flops_per_token: float | None
    """None if a mixer does not count its operations."""


def _size(model: LanguageModel, width: int, seq_len: int, num_logits: int | None) -> Size:
    """Count a model as if its feed-forwards had this width, in which all their weights are linear."""
    of_feed_forwards = [block.feed_forward for block in model.layers if block.feed_forward is not None]
    weights = sum(parameter.numel() for part in of_feed_forwards for parameter in part.parameters())
    added = weights * width // max(1, model.feed_forward_width) - weights
    flops = model.forward_flops(seq_len, num_logits)
    return Size(model.num_parameters() + added, None if flops is None else (flops + 2 * added * seq_len) / seq_len)


def solve_width(measure: Callable[[int], float], target: float, match: str, reference: str = "softmax") -> int:
    """Return the width whose measure, linear in it, is nearest the target. Messages name `match` and `reference`."""
    smallest = measure(1)
    slope = measure(2) - smallest
    if slope == 0:
        raise UserError(
            f"match={match}: the mixer replaces the feed-forward, so there is no width to solve; match=none"
        )
    exact = max(1.0, 1 + (target - smallest) / slope)
    for step in (8, 1):
        width = max(1, round(exact / step)) * step
        mismatch = measure(width) / target - 1
        if abs(mismatch) <= TOLERANCE:
            return width
    raise UserError(
        f"match={match}: the nearest this mixer comes to {reference}'s {target:,.0f} is {measure(width):,.0f} "
        f"({mismatch:+.1%}, feed_forward_width {width}), over the 1 % allowed; make the mixer smaller or set match=none"
    )


def _match_states(
    mixers: Sequence[MixerSettings], model: ModelSettings
) -> tuple[list[MixerSettings], float, list[str]]:
    matched, reached, wanted = [], 0, 0
    values: dict[str, None] = {}
    for layer, settings in enumerate(mixers):
        target = _memory_bytes(STATE_REFERENCE, model, layer)
        settings, memory, value = _solve_state(settings, target, model, layer)
        matched.append(settings)
        values[value] = None
        reached, wanted = reached + memory, wanted + target
    return matched, reached / wanted - 1, list(values)


def _solve_state(
    settings: MixerSettings, target: int, model: ModelSettings, layer: int
) -> tuple[MixerSettings, int, str]:
    cls = resolve(settings.target, Mixer)
    if cls.state_grows:
        raise UserError(f"match=state: the state of {settings.name} grows with the length; match=params, flops or none")
    choices = cls.state_choices(settings.options, dim=model.dim, head_width=model.head_width)
    if not choices:
        raise UserError(f"match=state: {cls.__name__} names no setting that decides its state; match=params or none")

    def memory(change: dict[str, Any]) -> int:
        return _memory_bytes(_changed(settings, change), model, layer)

    index = bisect_left(choices, target, key=memory)
    change = min(choices[max(0, index - 1) : index + 1], key=lambda change: abs(memory(change) - target))
    reached, value = memory(change), ", ".join(f"{name} {value}" for name, value in change.items())
    if abs(reached / target - 1) > STATE_TOLERANCE:
        raise UserError(
            f"match=state: the nearest {settings.name} comes to {STATE_REFERENCE.name}'s {target:,} bytes a layer is "
            f"{reached:,} ({reached / target - 1:+.1%}, {value}), over the 10 % allowed; change its other settings or "
            "set match=none"
        )
    # Unchanged if that is as near, so that the run keeps its identity.
    return settings if memory({}) == reached else _changed(settings, change), reached, value


def _changed(settings: MixerSettings, change: dict[str, Any]) -> MixerSettings:
    return replace(settings, options={**settings.options, **change})


def _memory_bytes(settings: MixerSettings, model: ModelSettings, layer: int) -> int:
    """Return the bytes that match=state counts in one layer, in float32."""
    with torch.device("meta"):
        mixer = build_layer(settings, model, layer)
        state: State = mixer.init_state(1, 1, torch.float32)
    return state_bytes(getattr(state, name) for name in mixer.state_memory)


def _state_bytes(model: LanguageModel, seq_len: int, precision: str) -> int | None:
    if model.backend_without_state:
        return None
    try:
        with torch.device("meta"):
            return sum(state_bytes(state) for state in model.init_state(1, seq_len, dtype_of(precision)))
    except (NotImplementedError, TypeError) as error:
        raise UserError(
            f"init_state of a mixer fails ({one_line(error)}); one that shall only be trained says so with "
            'trains_only = frozenset({"torch"})'
        ) from error
