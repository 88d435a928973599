"""The feed-forward width solved so that a mixer's model has what softmax's has: parameters, or FLOPs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from attnbench.errors import UserError
from attnbench.model import LanguageModel, build_meta
from attnbench.settings import MixerSettings, ModelSettings

REFERENCE = MixerSettings(name="softmax", target="attnbench.mixers.softmax.Softmax", options={"backend": "torch"})
TOLERANCE = 0.01


@dataclass(slots=True, kw_only=True)
class Matched:
    """A model's settings after matching, and what was reached."""

    model: ModelSettings
    match: str
    parameters: int
    reference_parameters: int
    flops_per_token: float
    """Forward, at the run's sequence length."""
    reference_flops_per_token: float

    def statement(self, mixer: str) -> str:
        """One line to print before training."""
        parameters = self.parameters / self.reference_parameters - 1
        flops = self.flops_per_token / self.reference_flops_per_token - 1
        return (
            f"match={self.match}: {mixer} has {self.parameters:,} parameters ({parameters:+.2%} of softmax's) and "
            f"{self.flops_per_token / 1e6:.2f} forward MFLOPs a token ({flops:+.2%}), "
            f"feed_forward_width {self.model.feed_forward_width}"
        )


def match_model(
    mixers: Sequence[MixerSettings],
    model: ModelSettings,
    *,
    match: str,
    seq_len: int,
    vocabulary_size: int,
    trusted: Collection[str] = (),
) -> Matched:
    """Solves `feed_forward_width`, in steps of 8 where that comes within 1 %, of 1 otherwise.

    Width, depth and head width stay alike across mixers. A model without feed-forward has nothing to solve.

    Args:
        mixers: one a layer, backends resolved.
        match: "params", "flops" (at `seq_len`) or "none".

    Raises:
        UserError: no width comes within 1 %, with how near one can come.
    """

    def built(width: int, layers: Sequence[MixerSettings]) -> LanguageModel:
        settings = replace(model, feed_forward_width=width)
        return build_meta(layers, settings, vocabulary_size=vocabulary_size, trusted=trusted)

    def flops(candidate: LanguageModel) -> float:
        return candidate.forward_flops(seq_len) / seq_len

    reference = built(model.feed_forward_width, [REFERENCE] * model.num_layers)
    width = model.feed_forward_width
    if match != "none" and width:
        measure = flops if match == "flops" else LanguageModel.num_parameters
        width = _solve(lambda candidate: measure(built(candidate, mixers)), measure(reference), match)
    chosen = built(width, mixers)
    return Matched(
        model=replace(model, feed_forward_width=width),
        match=match if model.feed_forward_width else "none",
        parameters=chosen.num_parameters(),
        reference_parameters=reference.num_parameters(),
        flops_per_token=flops(chosen),
        reference_flops_per_token=flops(reference),
    )


def _solve(measure: Callable[[int], float], target: float, match: str) -> int:
    """The width whose measure is nearest the target; the measure is linear in the width."""
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
        f"match={match}: the nearest this mixer comes to softmax's {target:,.0f} is {measure(width):,.0f} "
        f"({mismatch:+.1%}, feed_forward_width {width}), over the 1 % allowed; make the mixer smaller or set match=none"
    )
