"""Decide a published claim from rows: the finding of each contrast, and one of nine words."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnbench.results.rows import ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ClaimSettings, ContrastSettings, ControlSettings, PlanSettings
from attnbench.verdict.contrasts import (
    ENOUGH,
    FAILS,
    HOLDS,
    LEVEL,
    OPPOSITE,
    Found,
    best_of,
    difference,
    existence,
    num_solved,
    order,
    value,
)
from attnbench.verdict.power import MAX_SEEDS
from attnbench.verdict.ranking import holm
from attnbench.verdict.seeds import Figure, figures

REPRODUCED, IN_ORDER = "reproduced", "reproduced in order, not in size"
SMALLER, NOT_REPRODUCED = "reproduced at a smaller size", "not reproduced"
CONTRADICTED, NOT_REACHED, UNDECIDED = "contradicted", "not reached", "undecided"
DISPUTED, NOT_RUN = "disputed source", "not run"

WORDS = {
    REPRODUCED: "the controls hold, and so does every contrast, in the source's setting",
    IN_ORDER: "every contrast holds but for a value, which is not the source's",
    SMALLER: "every contrast holds, in a setting that is smaller than the source's",
    NOT_REPRODUCED: "the controls hold, and what the source learns was learned by none or one of ten seeds or more",
    CONTRADICTED: "the opposite is significant, or two seeds learn what the source says is not learned",
    NOT_REACHED: "a control failed: the setting does not work, and says nothing about the claim",
    UNDECIDED: "the controls hold, and more seeds are needed",
    DISPUTED: "the source's versions, or two sources, contradict each other; the figures stand alone",
    NOT_RUN: "it has no scores here",
}
"""All words of a decision, and what they mean."""

IN_ORDER_SHARE = 0.8
"""Share of a claim's orders that must be significant, if all have the claimed sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlScores:
    name: str
    rate: float
    scores: list[float | None]
    """By search seed, chance-scaled if the control is; None: diverged."""
    threshold: float
    scaled: bool
    least: int

    @property
    def num_held(self) -> int:
        return num_solved([score for score in self.scores if score is not None], self.threshold)

    @property
    def is_held(self) -> bool:
        return self.num_held >= self.least

    @property
    def text(self) -> str:
        shown = ", ".join("diverged" if score is None else f"{score:.3f}" for score in self.scores)
        scaled = " (chance-scaled)" if self.scaled else ""
        asked = f"{self.num_held} of {len(self.scores)} reach {self.threshold:g}, {self.least} asked"
        return f"control {self.name} at rate {self.rate:g}: validation accuracy{scaled} {shown}; {asked}"


def control_scores(
    control: ControlSettings, name: str, rate: float, scores: Sequence[float | None], chance: float
) -> ControlScores:
    chance = chance if control.scaled else 0.0
    return ControlScores(
        name=name,
        rate=rate,
        scores=[None if score is None else _scaled(score, chance) for score in scores],
        threshold=control.threshold,
        scaled=control.scaled,
        least=control.least,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    label: str
    """The figure in words: "share of seeds of softmax with accuracy >= 0.95"."""
    found: Found
    adjusted: float | None
    """Holm's p-value."""
    limits: tuple[float, ...]
    """Values to compare with, for a picture."""

    @property
    def short(self) -> str:
        return f"{self.found.value:.3g} [{self.found.low:.3g}, {self.found.high:.3g}]"

    @property
    def text(self) -> str:
        adjusted = f", adjusted p = {self.adjusted:.2g}" if self.adjusted is not None else ""
        return f"{self.label}: {self.short} ({self.found.words}{adjusted}): {self.found.outcome}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    plan: PlanSettings
    """The finding."""
    word: str
    reason: str = ""
    tested: Sequence[Tested] = ()
    """Empty unless the claim was scored and its controls hold."""
    controls: Sequence[ControlScores] = ()
    samples: int | None = None
    """Sequences of one training."""
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Scores that the contrasts compare, one for each seed, by the name of the figure."""

    @property
    def claim(self) -> ClaimSettings:
        assert self.plan.claim is not None
        return self.plan.claim

    @property
    def line(self) -> str:
        return f"{self.plan.name}: {self.word}: {self.reason}"

    @property
    def score_texts(self) -> list[str]:
        return [
            f"{name}: mean {sum(it) / len(it):.3f}, by seed {', '.join(f'{score:.3f}' for score in it)}"
            for name, it in self.scores.items()
        ]


def decide(
    plan: PlanSettings, controls: Sequence[ControlScores], rows: Iterable[ResultRow], samples: int | None = None
) -> Decision:
    """Decide the claim of a finding, whose runs are finished unless a control failed."""
    decision = Decision(plan=plan, word=NOT_RUN, controls=controls, samples=samples)
    failed = [control.text for control in controls if not control.is_held]
    if failed:
        return replace(decision, word=NOT_REACHED, reason="; ".join(failed))
    scored = figures(rows)
    try:
        short = _short_of_trained_range(decision.claim, scored)
        if short:
            return replace(decision, word=NOT_REACHED, reason=short)
        found = [_found(contrast, scored) for contrast in decision.claim.contrasts]
    except _MissingError as error:
        return replace(decision, reason=str(error))
    tested = _judged(decision.claim.contrasts, found)
    word, reason = _word(decision.claim, tested)
    scores = {
        f"{name}, {it.metric.replace('_', ' ')}{_at(it)}": _scores(it, name, scored)
        for it in decision.claim.contrasts
        for name in it.variants
    }
    return replace(decision, word=word, reason=reason, tested=tested, scores=scores)


class _MissingError(Exception): ...


def _short_of_trained_range(claim: ClaimSettings, scored: Sequence[Figure]) -> str:
    """Name a variant of which fewer than two seeds have learned the trained lengths."""
    if claim.trained_range is None:
        return ""
    axes = {name for it in scored if it.metric == "selection" for name in it.settings} - {"split"}
    for contrast in claim.contrasts:
        if not contrast.claimed:
            continue
        settings = {name: it for name, it in contrast.settings.items() if name in axes}
        figure = _figure(replace(contrast, metric="selection", settings=settings), contrast.variants[0], scored)
        # A diverged seed has no value.
        count = num_solved([*figure.values.values()], claim.trained_range)
        if count < ENOUGH:
            highest = f"; the highest is {max(figure.values.values()):.3f}" if figure.values else ""
            return (
                f"{contrast.variants[0]}: accuracy on validation data of trained lengths is {claim.trained_range:g} or "
                f"more at {count} of {sum(figure.statuses.values())} seeds, {ENOUGH} asked{highest}"
            )
    return ""


def _found(contrast: ContrastSettings, scored: Sequence[Figure]) -> Found:
    first, *others = (_scores(contrast, name, scored) for name in contrast.variants)
    threshold = contrast.threshold or 0.0
    if contrast.kind == "existence":
        return existence(first, threshold, claimed=contrast.claimed)
    if contrast.kind == "difference":
        return difference(first, others[0], threshold)
    if contrast.kind == "best_of":
        return best_of(first, threshold, contrast.best)
    if contrast.kind == "value":
        return value(first, contrast.published or 0.0, contrast.margin or 0.0)
    return order(first, others[0])


def _judged(contrasts: Sequence[ContrastSettings], found: Sequence[Found]) -> list[Tested]:
    """Judge p-values by Holm's procedure over the claim."""
    with_p = [index for index, it in enumerate(found) if it.p_value is not None]
    claimed = dict(zip(with_p, holm([found[index].p_value or 0.0 for index in with_p], LEVEL).adjusted, strict=True))
    opposite = [found[index].opposite_p_value or 0.0 for index in with_p]
    against = dict(zip(with_p, holm(opposite, LEVEL).adjusted, strict=True))
    outcomes = [
        HOLDS if claimed.get(index, 1.0) <= LEVEL else OPPOSITE if against.get(index, 1.0) <= LEVEL else it.outcome
        for index, it in enumerate(found)
    ]
    orders = [index for index, contrast in enumerate(contrasts) if contrast.kind == "order"]
    significant = sum(outcomes[index] == HOLDS for index in orders)
    if all(found[index].value > 0 for index in orders) and significant >= IN_ORDER_SHARE * len(orders):
        outcomes = [HOLDS if index in orders else outcome for index, outcome in enumerate(outcomes)]
    return [
        Tested(
            label=_label(contrast),
            found=replace(it, outcome=outcomes[index]),
            adjusted=claimed.get(index),
            limits=_limits(contrast),
        )
        for index, (contrast, it) in enumerate(zip(contrasts, found, strict=True))
    ]


def _word(claim: ClaimSettings, tested: Sequence[Tested]) -> tuple[str, str]:
    if claim.disputed is not None:
        return DISPUTED, claim.disputed
    values = {index for index, contrast in enumerate(claim.contrasts) if contrast.kind == "value"}

    def texts(*outcomes: str, values_too: bool = True) -> list[str]:
        chosen = (it for index, it in enumerate(tested) if values_too or index not in values)
        return [it.text for it in chosen if it.found.outcome in outcomes]

    if contrary := texts(OPPOSITE):
        return CONTRADICTED, "; ".join(contrary)
    # With values alone there is no order that could hold.
    if failed := texts(FAILS, values_too=len(values) == len(tested)):
        smaller = " in a setting smaller than the source's" if claim.tier == "reduced" else ""
        where = f" {claim.where}" if claim.where is not None else smaller
        return NOT_REPRODUCED, f"{NOT_REPRODUCED}{where}: {'; '.join(failed)}"
    if open_ones := [it for it in tested if it.found.outcome == UNDECIDED]:
        needed = [it.found.seeds_needed for it in open_ones]
        most = max((number for number in needed if number is not None), default=0)
        seeds = f"more than {MAX_SEEDS}" if None in needed else f"{most}"
        return UNDECIDED, f"{seeds} seeds needed: {'; '.join(it.text for it in open_ones)}"
    if off := texts(FAILS):
        return IN_ORDER, "; ".join(off)
    return SMALLER if claim.tier == "reduced" else REPRODUCED, "every contrast holds"


def _figure(contrast: ContrastSettings, variant: str, scored: Sequence[Figure]) -> Figure:
    known = [
        it
        for it in scored
        if contrast.evaluation in (None, it.evaluation)
        and variant in it.names
        and it.metric == contrast.metric
        and contrast.settings.items() <= it.settings.items()
    ]
    if not known:
        raise _MissingError(f"{variant} has no {contrast.metric} at {contrast.settings}")
    if len(known) > 1:
        at = "; ".join(json.dumps(it.settings) for it in known)
        raise UserError(f"settings={contrast.settings}: {contrast.metric} of {variant} was measured at each of {at}")
    return known[0]


def _scores(contrast: ContrastSettings, variant: str, scored: Sequence[Figure]) -> list[float]:
    figure = _figure(contrast, variant, scored)
    seeds = sorted({seed for it in scored if it.evaluation == figure.evaluation for seed in it.values})
    missing = [seed for seed in seeds if seed not in figure.values]
    if missing:
        why = f" ({figure.obstacle})" if figure.obstacle else ""
        raise _MissingError(f"{variant} has no {contrast.metric} of {len(missing)} of {len(seeds)} seeds{why}")
    if contrast.scaled and "chance" not in figure.settings:
        raise UserError(f"scaled=true: rows of {contrast.metric} of {variant} name no chance")
    chance = float(figure.settings["chance"]) if contrast.scaled else 0.0
    return [_scaled(figure.values[seed], chance) for seed in seeds]


def _scaled(score: float, chance: float) -> float:
    return (score - chance) / (1 - chance)


def _label(contrast: ContrastSettings) -> str:
    first, metric = contrast.variants[0], contrast.metric.replace("_", " ")
    last = contrast.variants[-1]
    at = _at(contrast)
    solves = f"with {metric} >= {contrast.threshold}{at}"
    return {
        "existence": f"share of seeds of {first} {solves}{'' if contrast.claimed else ' (claimed: none)'}",
        "difference": f"share of seeds of {first} less that of {last} {solves}",
        "best_of": f"probability that the best of {contrast.best} seeds of {first} is one {solves}",
        "value": f"mean {metric} of {first}{at}",
        "order": f"mean {metric} of {first} less {last}{at}",
    }[contrast.kind]


def _at(contrast: ContrastSettings) -> str:
    settings = (f", {name.removeprefix('num_').replace('_', ' ')} {it}" for name, it in contrast.settings.items())
    return f"{' (chance-scaled)' if contrast.scaled else ''}{''.join(settings)}"


def _limits(contrast: ContrastSettings) -> tuple[float, ...]:
    if contrast.published is not None and contrast.margin is not None:
        return contrast.published - contrast.margin, contrast.published + contrast.margin
    return {"best_of": (0.5,), "difference": (0.0,), "order": (0.0,)}.get(contrast.kind, ())
