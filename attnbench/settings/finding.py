"""Settings of a finding, a yaml of conf/finding: a published claim, its runs and its tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnbench.settings.check import check_name, check_value, read
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_VARIANTS, SELECTION_SEED, setting

KINDS = ("reaches", "misses", "difference", "ratio", "window", "correlation")

RANGES = {"accuracy": (0.0, 1.0), "symbol_accuracy": (0.0, 1.0), "string_accuracy": (0.0, 1.0), "solved": (0.0, 1.0)}
"""Ranges of bounded metrics; the others are above 0."""


@dataclass(slots=True, kw_only=True)
class VariantSettings:
    words: list[str]
    """The rest of its command line, as in a plan."""
    rates: dict[str, list[float]] | None
    """By probe, or `training` for the language model: one rate, found on seeds that are not scored, or several for a
    claim about the window of rates; null: not searched yet."""

    @property
    def in_window(self) -> bool:
        """True for a variant with several rates."""
        return any(len(grid) > 1 for grid in (self.rates or {}).values())


@dataclass(slots=True, kw_only=True)
class ContrastSettings:
    """One test of a finding, by its kind:

    reaches, misses: the share of seeds whose score is at least `threshold`, a lower bound of 0.7 or `at_least`, an
        upper bound of 0.6 or `at_most`
    difference, ratio: the mean score of the first of `variants` minus, or over, that of the second
    window: decades of learning rates with a mean score of at least `threshold`
    correlation: rank correlation of state bytes with the largest number of pairs at `threshold`
    """

    kind: str = setting(choices=KINDS)
    variants: list[str] = field(metadata={"distinct": True})
    evaluation: str | None = None
    """Evaluation with the metric; null: the finding's only one."""
    metric: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the row, {"length": 100}."""
    threshold: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    outside: bool = False
    """The claimed figure lies beyond at_least and at_most."""


@dataclass(slots=True, kw_only=True)
class PowerSettings:
    """Probability of PASS if the source's effect is true, by tools/simulate_findings.py."""

    scores: dict[str, list[float]]
    """Assumed mean and spread over seeds of each score: by variant, by variant and metric ("softmax solved"), by
    variant and rate ("softmax-lr0.01"), or by width of the state ("deltanet, width 16")."""
    simulated: float | None = setting(None, minimum=0, maximum=1)


@dataclass(slots=True, kw_only=True)
class FindingSettings:
    name: str
    statement: str
    source: str
    setting: str
    """The source's setting, and how this one differs."""
    otherwise: str
    """Sentence: the truth under the other answer."""
    core: bool
    needs: list[str] = field(default_factory=list)
    """Missing part of attnbench, without which it cannot run; empty if it can."""
    minutes: dict[str, float | None]
    """Minutes by type of device; null: not measured."""
    evaluations: list[str] = field(metadata={"distinct": True})
    overrides: list[str]
    variants: dict[str, VariantSettings]
    contrasts: list[ContrastSettings]
    power: PowerSettings | None = None


@dataclass(slots=True, kw_only=True)
class FindingsSettings:
    names: list[str] | None = field(metadata={"distinct": True})
    """null: those of the core."""
    full: bool
    freeze: bool
    seeds: list[int] = field(metadata={"distinct": True, "minimum": 0, "below": SELECTION_SEED})
    device: str
    outputs_dir: str
    num_workers: int = setting(1, minimum=1)
    devices: str = setting("one", choices=("one", "all"))
    stack: int | None = setting(1, minimum=1, maximum=1000)
    """num_workers, devices and stack are those of a plan; a stack of None is auto."""
    report: bool
    rerun: bool
    exported: str | None = None
    imported: str | None = None
    """Folders with a folder for each finding, as a published page has them."""
    command: str


def read_finding(name: str, values: Mapping[str, Any]) -> FindingSettings:
    where, parts = f"finding.{name}", {"variants": dict, "contrasts": list}
    for part, kind in parts.items():
        check_value(f"{where}.{part}", values.get(part, kind()), kind=kind)
    variants = {
        variant: read(VariantSettings, given, f"{where}.variants.{variant}")
        for variant, given in values.get("variants", {}).items()
    }
    contrasts = [
        read(ContrastSettings, given, f"{where}.contrasts[{index}]")
        for index, given in enumerate(values.get("contrasts", []))
    ]
    others = {part: value for part, value in values.items() if part not in parts}
    built = {"name": name, "variants": variants, "contrasts": contrasts}
    finding = read(FindingSettings, others, where, given=built)
    _check_finding(finding)
    return finding


def _check_finding(finding: FindingSettings) -> None:
    where = f"finding.{finding.name}"
    check_name("finding", finding.name)
    check_value(f"{where}.minutes", list(finding.minutes), kind=list[str], choices=("cpu", "cuda"))
    if not finding.contrasts or not finding.variants:
        raise UserError(f"{where}.contrasts: a finding names variants, and at least one contrast of them")
    for name, variant in finding.variants.items():
        at = f"{where}.variants.{name}.rates"
        for evaluation, grid in (variant.rates or {}).items():
            check_value(f"{at}.{evaluation}", grid, distinct=True, most=MAX_VARIANTS, above=0)
        if variant.in_window and len(finding.evaluations) > 1:
            raise UserError(f"{at}={variant.rates}: several rates are of a finding of one evaluation")
    for index, contrast in enumerate(finding.contrasts):
        at = f"{where}.contrasts[{index}]"
        _check_contrast(at, contrast, finding.variants)
        check_value(f"{at}.evaluation", contrast.evaluation, choices=finding.evaluations)
        if contrast.evaluation is None and len(finding.evaluations) > 1:
            raise UserError(f"{at}.evaluation: must be one of {', '.join(finding.evaluations)}")
    of_variants = tuple(f"{name}{end}" for name in finding.variants for end in ("\n", " ", ", ", "-lr"))
    unknown = [key for key in (finding.power.scores if finding.power else []) if not f"{key}\n".startswith(of_variants)]
    if unknown:
        raise UserError(f"{where}.power.scores: {min(unknown)} must be one of {', '.join(finding.variants)}")


def _check_contrast(where: str, contrast: ContrastSettings, variants: Mapping[str, VariantSettings]) -> None:
    unknown = [name for name in contrast.variants if name not in variants]
    if unknown:
        raise UserError(f"{where}.variants: {unknown[0]} must be one of {', '.join(variants)}")
    number = {"difference": 2, "ratio": 2, "correlation": len(contrast.variants)}.get(contrast.kind, 1)
    if len(contrast.variants) != number or not number:
        raise UserError(f"{where}.variants={contrast.variants}: kind={contrast.kind} takes {number or 'some'}")
    grids = [it for it in contrast.variants if variants[it].in_window != (contrast.kind == "window")]
    if grids:
        raise UserError(f"{where}: {grids[0]} has rates={variants[grids[0]].rates}; a window alone takes several")
    needs_threshold = contrast.kind not in ("difference", "ratio")
    if needs_threshold != (contrast.threshold is not None):
        takes = "one" if needs_threshold else "null"
        raise UserError(f"{where}.threshold={contrast.threshold}: kind={contrast.kind} takes {takes}")
    low, high = RANGES.get(contrast.metric, (0.0, float("inf")))
    if contrast.threshold is not None and not low < contrast.threshold <= high:
        raise UserError(f"{where}.threshold={contrast.threshold:g}: {contrast.metric} lies in {low:g} to {high:g}")
    _check_limits(where, contrast, high - low)


def _check_limits(where: str, contrast: ContrastSettings, span: float) -> None:
    """Refuse limits that no figure, or every figure, passes."""
    ranges = {"difference": (-span, span), "ratio": (0.0, float("inf")), "window": (0.0, float("inf"))}
    low, high = ranges.get(contrast.kind, (-1.0, 1.0) if contrast.kind == "correlation" else (0.0, 1.0))
    limits = {"at_least": contrast.at_least, "at_most": contrast.at_most}
    for name, limit in limits.items():
        if limit is not None and not low < limit < high:
            raise UserError(f"{where}.{name}={limit:g}: must lie inside {low:g} to {high:g}, where the figure does")
    if contrast.kind not in ("reaches", "misses") and not any(limit is not None for limit in limits.values()):
        raise UserError(f"{where}: kind={contrast.kind} takes at_least, at_most, or both")
