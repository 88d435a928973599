"""Matching of models across mixers: the feed-forward width or the number of layers solved so that parameters or FLOPs
are softmax's, or a setting of the mixer so that its state is Gated DeltaNet's."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnbench.machine.precision import dtype_of
from attnbench.mixers.base import Mixer, State, state_bytes
from attnbench.model.building import build_layer, build_meta, resolve_mixer
from attnbench.model.language_model import LanguageModel
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.hybrid import layers_of
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, ModelSettings

# Without rotary positions, which have neither parameters nor counted operations and need an even width.
REFERENCE = MixerSettings(
    name="softmax", target="attnbench.mixers.softmax.Softmax", options={"backend": "torch", "rotary_theta": None}
)
STATE_REFERENCE = MixerSettings(
    name="gated_deltanet", target="attnbench.mixers.gated_deltanet.GatedDeltaNet", options={"backend": "torch"}
)
TOLERANCE = 0.01
STATE_TOLERANCE = 0.1
"""Larger than TOLERANCE, as a state's size goes in steps of heads and channels."""
LAYERS_TOLERANCE = 0.1
"""Larger than TOLERANCE, as a model's size goes in steps of a layer."""
UNCOUNTED = "an unknown number of operations"


@dataclass(slots=True, kw_only=True)
class Matched:
    """Settings of a model after matching, and its counts."""

    mixers: list[MixerSettings]
    """One a layer, with the options that match=state has changed."""
    model: ModelSettings
    match: str
    parameters: int
    reference_parameters: int
    num_branches: int
    """See `LanguageModel.num_branches`."""
    flops_per_token: float | None
    """Forward FLOPs at the run's sequence length; None where a mixer does not know its own."""
    reference_flops_per_token: float
    state_bytes: int | None
    """State bytes of one sequence at the run's length, all layers together, caches in the compute dtype of `precision`;
    None where the backend only trains."""
    seq_len: int
    precision: str
    state_mismatch: float | None
    """Mismatch that match=state leaves, as a share of the reference's memory; None for another match."""
    state_settings: list[str]
    """Settings that match=state has chosen, ["value_expansion 2"], each choice once; empty for another match."""

    def statement(self, mixer: str) -> str:
        """Return one line to print before training."""
        parameters = self.parameters / self.reference_parameters - 1
        state = "no state" if self.state_bytes is None else f"{self.state_bytes:,} state bytes"
        unsolved = (
            ""
            if self.match != "none" or self.model.feed_forward_width
            else " (no feed-forward whose width could be solved)"
        )
        return (
            f"match={self.match}{unsolved}: {mixer} has {self.parameters:,} parameters "
            f"({parameters:+.2%} of plain softmax's) and {self._flops_statement()}, "
            f"feed_forward_width {self.model.feed_forward_width}, {self.model.num_layers} layers, "
            f"{state} a sequence of {self.seq_len:,} in {self.precision}{self._memory_statement()}"
        )

    def _flops_statement(self) -> str:
        if self.flops_per_token is None:
            return UNCOUNTED
        difference = self.flops_per_token / self.reference_flops_per_token - 1
        return f"{self.flops_per_token / 1e6:.2f} forward MFLOPs a token ({difference:+.2%})"

    def _memory_statement(self) -> str:
        if self.state_mismatch is None:
            return ""
        chosen = "; ".join(self.state_settings)
        return f", its memory {self.state_mismatch:+.2%} of {STATE_REFERENCE.name}'s by {chosen}"


def match_mixer(mixer: MixerSettings, model: ModelSettings, *, device_type: str, precision: str, **how: Any) -> Matched:
    """Resolve a mixer's kernel and match the model that has it in every layer, or a hybrid's; see `match_model`."""
    resolved = resolve_mixer(mixer, model, device_type=device_type, precision=precision)
    return match_model(layers_of(resolved, model.num_layers), model, precision=precision, **how)


def match_model(
    mixers: Sequence[MixerSettings],
    model: ModelSettings,
    *,
    match: str,
    match_by: str = "feed_forward",
    seq_len: int,
    vocabulary_size: int,
    num_logits: int | None = None,
    precision: str = "float32",
) -> Matched:
    """Solve `feed_forward_width`, in steps of 8 where that comes within 1 %, of 1 otherwise; or `num_layers`; or the
    mixers' states.

    Width and head width of the model stay alike across mixers, and so does its depth unless it is what is solved, to
    within 10 %. A model without feed-forward has no width to
    solve: it is matched by nothing, and says so. With match=state the feed-forward stays as it is, and each layer's
    mixer gets the legal value of its setting at which its memory is nearest that of Gated DeltaNet in this model;
    see `Mixer.state_choices`.

    Args:
        mixers: one a layer, backends resolved.
        match: "params", "flops" (at `seq_len`), "state" or "none".
        match_by: "feed_forward", its width, or "layers", their number, all of one mixer; for "params" and "flops".
        num_logits: positions of a sequence at which logits are read, and FLOPs counted; None: all.
        precision: of the training; the caches of a state have its dtype. Changes `state_bytes` alone.

    Raises:
        UserError: no width comes within 1 %, or no number of layers or state within 10 %, with how near one can come; a
            state that grows; layers to be solved that differ, or where nothing is to be matched by them.
    """

    def built(width: int, layers: Sequence[MixerSettings], model: ModelSettings = model) -> LanguageModel:
        settings = replace(model, feed_forward_width=width, num_layers=len(layers))
        return build_meta(layers, settings, vocabulary_size=vocabulary_size)

    def flops(candidate: LanguageModel) -> float | None:
        of_sequence = candidate.forward_flops(seq_len, num_logits)
        return None if of_sequence is None else of_sequence / seq_len

    def counted_flops(candidate: LanguageModel) -> float:
        if (found := flops(candidate)) is None:
            names = ", ".join(dict.fromkeys(mixer.name for mixer in mixers))
            raise UserError(f"match=flops: the model of {names} has {UNCOUNTED}; match=params or none")
        return found

    if match_by == "layers" and match not in ("params", "flops"):
        raise UserError(f"match_by=layers: match={match} leaves the number of layers as it is; match=params or flops")
    if match_by == "layers" and any(mixer != mixers[0] for mixer in mixers):
        raise UserError(
            "match_by=layers: the layers' mixers differ, and which to add nobody says; match_by=feed_forward"
        )
    # Softmax's counts are the same in however many heads; one fills the width where those of a mixer do not.
    one_head = replace(model, head_width=model.dim)
    reference = built(model.feed_forward_width, [REFERENCE] * model.num_layers, one_head)
    width, mismatch, layers, values = model.feed_forward_width, None, list(mixers), []
    if match == "state":
        layers, mismatch, values = _match_states(mixers, model)
    measure = counted_flops if match == "flops" else LanguageModel.num_parameters
    if match_by == "layers":
        number = solve_layers(lambda number: measure(built(width, layers[:1] * number)), measure(reference), match)
        layers = layers[:1] * number
    elif match in ("params", "flops") and width:
        width = solve_width(lambda candidate: measure(built(candidate, mixers)), measure(reference), match)
    chosen = built(width, layers)
    return Matched(
        mixers=layers,
        model=replace(model, feed_forward_width=width, num_layers=len(layers)),
        match=match if match == "state" or match_by == "layers" or model.feed_forward_width else "none",
        parameters=chosen.num_parameters(),
        reference_parameters=reference.num_parameters(),
        num_branches=chosen.num_branches,
        flops_per_token=flops(chosen),
        reference_flops_per_token=counted_flops(reference),
        state_bytes=_state_bytes(chosen, seq_len, precision),
        seq_len=seq_len,
        precision=precision,
        state_mismatch=mismatch,
        state_settings=values,
    )


def solve_width(measure: Callable[[int], float], target: float, match: str, reference: str = "softmax") -> int:
    """Return the width whose measure is nearest the target; the measure is linear in the width.

    Args:
        match, reference: the way of matching and the mixer of the target, for messages.

    Raises:
        UserError: no width comes within 1 %, or the measure does not depend on it.
    """
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


def solve_layers(measure: Callable[[int], float], target: float, match: str) -> int:
    """Return the number of layers whose measure is nearest the target; the measure is linear in it.

    Raises:
        UserError: none comes within 10 %.
    """
    smallest = measure(1)
    number = max(1, 1 + round((target - smallest) / (measure(2) - smallest)))
    mismatch = measure(number) / target - 1
    if abs(mismatch) > LAYERS_TOLERANCE:
        raise UserError(
            f"match_by=layers: the nearest this mixer comes to {REFERENCE.name}'s {target:,.0f} by match={match} is "
            f"{measure(number):,.0f} ({mismatch:+.1%}, num_layers {number}), over the 10 % allowed; give a model of "
            "more layers, or match_by=feed_forward"
        )
    return number


def _match_states(
    mixers: Sequence[MixerSettings], model: ModelSettings
) -> tuple[list[MixerSettings], float, list[str]]:
    """Return each layer's mixer with the memory nearest the reference's, the mismatch over all layers, the choices."""
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
    """Return the settings with the memory nearest the target, that memory in bytes, and the value that it takes."""
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
    # As they stand where that is as near, so that a run that match=state does not change keeps its identity.
    return settings if memory({}) == reached else _changed(settings, change), reached, value


def _changed(settings: MixerSettings, change: dict[str, Any]) -> MixerSettings:
    return replace(settings, options={**settings.options, **change})


def _memory_bytes(settings: MixerSettings, model: ModelSettings, layer: int) -> int:
    """Return the bytes that match=state counts in one layer; memories are float32 whatever the model computes in."""
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
