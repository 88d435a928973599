"""Decide a finding from rows: an estimate, its limits and a verdict for each contrast."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnbench.results.rows import ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.finding import ContrastSettings, FindingSettings
from attnbench.verdict.bounds import (
    FAIL,
    MISSES,
    NOT_RUN,
    PASS,
    REACHES,
    UNDECIDED,
    Estimate,
    Limits,
    capacity_correlation,
    difference,
    judge,
    judge_all,
    ratio,
    seeds_needed,
    share_of_seeds,
    window,
)
from attnbench.verdict.seeds import Figure, figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    label: str
    """The figure in words: "share of seeds of softmax with accuracy >= 0.95"."""
    estimate: Estimate
    limits: Limits
    outside: bool
    verdict: str
    seeds_needed: int | None
    """Total number of seeds that would decide an undecided contrast; None: more than 100."""

    @property
    def asked(self) -> str:
        least, most = self.limits
        words = [f">= {least:g}"] if math.isfinite(least) else []
        words += [f"<= {most:g}"] if math.isfinite(most) else []
        return f"outside {least:g} to {most:g}" if self.outside else " and ".join(words)

    @property
    def text(self) -> str:
        estimate = self.estimate
        text = f"{self.label} {estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}], asked {self.asked}"
        if self.verdict != UNDECIDED:
            return text
        more = f"{self.seeds_needed - estimate.num_seeds} seeds more" if self.seeds_needed else "more than 100 seeds"
        return f"{text}, {more} would decide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    finding: FindingSettings
    verdict: str
    tested: Sequence[Tested] = ()
    reason: str = ""

    @property
    def line(self) -> str:
        head = f"{self.verdict:9} {self.finding.name}"
        deciding = [it for it in self.tested if it.verdict == self.verdict]
        if not deciding:
            return f"{head}: {self.reason}"
        others = len(self.tested) - 1
        return f"{head}: {deciding[0].text}{f' (one of {others + 1} contrasts)' if others else ''}"

    @property
    def other_answer(self) -> tuple[str, str]:
        """The other verdict (FAIL for an undecided finding), and the condition for it."""
        if self.verdict != FAIL:
            return FAIL, self.finding.otherwise
        missed = [it for it in self.tested if it.verdict != PASS]
        return PASS, "; ".join(f"{it.label.removesuffix(':')} would have to be {it.asked}" for it in missed)


def decide(finding: FindingSettings, rows: Iterable[ResultRow], seeds: Sequence[int]) -> Decision:
    """Decide a finding; it is not run if the score of any seed is missing."""
    scored, wanted = figures(rows), sorted(seeds)
    try:
        tested = [_test(contrast, finding, scored, wanted) for contrast in finding.contrasts]
    except _MissingError as error:
        return Decision(finding=finding, verdict=NOT_RUN, reason=str(error))
    return Decision(finding=finding, verdict=judge_all([it.verdict for it in tested]), tested=tested)


def variant_at(name: str, rates: Mapping[str, float], finding: FindingSettings) -> str:
    return "-lr".join([name, *(f"{rate:g}" for rate in rates.values())]) if finding.variants[name].in_window else name


class _MissingError(Exception): ...


def _test(contrast: ContrastSettings, finding: FindingSettings, scored: Sequence[Figure], seeds: list[int]) -> Tested:
    estimate, is_share = _estimate(contrast, finding, scored, seeds), contrast.kind in ("reaches", "misses")
    least = REACHES if contrast.kind == "reaches" and contrast.at_least is None else contrast.at_least
    most = MISSES if contrast.kind == "misses" and contrast.at_most is None else contrast.at_most
    limits = (-math.inf if least is None else least, math.inf if most is None else most)
    verdict = judge(estimate, limits, outside=contrast.outside)
    return Tested(
        label=_label(contrast),
        estimate=estimate,
        limits=limits,
        outside=contrast.outside,
        verdict=verdict,
        seeds_needed=seeds_needed(estimate, limits, is_share=is_share) if verdict == UNDECIDED else None,
    )


def _estimate(
    contrast: ContrastSettings, finding: FindingSettings, scored: Sequence[Figure], seeds: list[int]
) -> Estimate:
    def scores(variant: str) -> list[float]:
        return _values(_one(contrast, scored, variant), seeds)

    first, threshold = contrast.variants[0], contrast.threshold or 0.0
    if contrast.evaluation is not None:
        scored = [figure for figure in scored if figure.evaluation == contrast.evaluation]
    if contrast.kind in ("reaches", "misses"):
        return share_of_seeds(scores(first), threshold)
    if contrast.kind == "difference":
        return difference(scores(first), scores(contrast.variants[1]))
    if contrast.kind == "ratio":
        return ratio(scores(first), scores(contrast.variants[1]))
    if contrast.kind == "window":
        [(name, grid)] = (finding.variants[first].rates or {}).items()
        return window({rate: scores(variant_at(first, {name: rate}, finding)) for rate in grid}, threshold)
    return _capacity(contrast, scored, seeds)


def _capacity(contrast: ContrastSettings, scored: Sequence[Figure], seeds: list[int]) -> Estimate:
    held: dict[str, dict[int, list[float]]] = {}
    sizes: dict[str, float] = {}
    for figure in scored:
        if figure.variant not in contrast.variants:
            continue
        model = f"{figure.variant}, width {figure.settings.get('width')}"
        if figure.metric == "state_bytes" and figure.mean is not None:
            sizes[model] = figure.mean
        if figure.metric == contrast.metric and contrast.settings.items() <= figure.settings.items():
            held.setdefault(model, {})[int(figure.settings["num_pairs"])] = _values(figure, seeds)
    loads = {tuple(sorted(by_load)) for by_load in held.values()}
    if len(loads) != 1 or len(held) < 3 or not {*held} <= {*sizes}:
        raise _MissingError(f"{contrast.metric}: a correlation needs three models, each at every number of pairs")
    return capacity_correlation(held, sizes, contrast.threshold or 0.0)


def _one(contrast: ContrastSettings, scored: Sequence[Figure], variant: str) -> Figure:
    known = [
        figure
        for figure in scored
        if variant in figure.names
        and figure.metric == contrast.metric
        and contrast.settings.items() <= figure.settings.items()
    ]
    if not known:
        raise _MissingError(f"{variant} has no {contrast.metric} at {contrast.settings}")
    if len(known) > 1:
        given = f"settings={contrast.settings}"
        raise UserError(f"{given}: {contrast.metric} of {variant} was measured at {len(known)} such settings, not one")
    return known[0]


def _values(figure: Figure, seeds: list[int]) -> list[float]:
    missing = [seed for seed in seeds if seed not in figure.values]
    if missing:
        why = f" ({figure.obstacle})" if figure.obstacle else ""
        raise _MissingError(f"{figure.variant} has no {figure.metric} of {len(missing)} of {len(seeds)} seeds{why}")
    return [figure.values[seed] for seed in seeds]


def _label(contrast: ContrastSettings) -> str:
    first, metric = contrast.variants[0], contrast.metric.replace("_", " ")
    at = "".join(
        f", {name.removeprefix('num_').replace('_', ' ')} {value}" for name, value in contrast.settings.items()
    )
    return {
        "reaches": f"share of seeds of {first} with {metric} >= {contrast.threshold}{at}:",
        "misses": f"share of seeds of {first} with {metric} >= {contrast.threshold}{at}:",
        "difference": f"{metric} of {first} less {contrast.variants[-1]}{at}:",
        "ratio": f"{metric} of {first} over {contrast.variants[-1]}{at}:",
        "window": f"decades of rates of {first} with {metric} >= {contrast.threshold}{at}:",
        "correlation": f"rank correlation of state bytes and pairs held at {metric} >= {contrast.threshold}:",
    }[contrast.kind]
