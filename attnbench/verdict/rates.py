"""Scores by learning rate: the width of the working rates, and the cost of a wrong rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

GOOD = 0.9
"""Rates work if they reach this share of the best accuracy, or of the best 1 / perplexity."""

DECADE = 1.0
"""Rates within this many powers of ten of the chosen one enter the sensitivity."""

Scores = Mapping[float, float | None]
"""Mean score by learning rate; None if all its trainings failed."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    variant: str
    evaluation: str
    settings: dict[str, Any]
    """Settings of the task; empty for language models."""
    grid: list[float]
    scores: dict[str, float | None]
    """Mean validation score by rate over the search seeds; None if all failed. Empty without a search; for language
    models, only of rates trained in full."""
    seeds: dict[str, list[float | None]] = field(default_factory=dict)
    solved: dict[str, int] = field(default_factory=dict)
    """Number of search seeds that solved the task, by rate; empty for language models."""
    steps: dict[str, float] = field(default_factory=dict)
    """Mean steps to 0.95, by rate, the budget if never reached; empty for language models."""
    after_an_epoch: dict[str, float | None] = field(default_factory=dict)
    """First-stage scores of language models: one seed after one epoch."""
    rate_window: float | None = None
    rate_sensitivity: float | None = None
    """Results of the functions below; for language models in two stages, of the first stage."""
    chosen: float
    at_edge: bool
    """The chosen rate is an end of the widened grid."""
    taken_from: None = None
    """Entry of comparison.json that nothing sets any more."""


def rate_window(scores: Scores, *, higher_is_better: bool) -> float | None:
    """Return the decades of rates whose scores, interpolated over log(rate), reach GOOD of the best.

    Accuracies of failed trainings are 0, their nats infinite; nats must be within -log GOOD of the lowest. None with
    fewer than two rates, if all failed, or if no accuracy is above 0.
    """
    excess = _excess(scores, higher_is_better=higher_is_better)
    if excess is None:
        return None
    best = max(score for score in scores.values() if score is not None)
    if higher_is_better and best <= 0:
        return None
    allowed = (1 - GOOD) * best if higher_is_better else -math.log(GOOD)
    return sum(
        math.log10(after / before) * _share_within(excess[before], excess[after], allowed)
        for before, after in pairwise(sorted(excess))
    )


def rate_sensitivity(scores: Scores, chosen: float, *, higher_is_better: bool) -> float | None:
    """Return the mean excess over the best score of all rates within one decade of the chosen one.

    None with fewer than two rates, or if nats within the decade, or all scores, are of failed trainings.
    """
    excess = _excess(scores, higher_is_better=higher_is_better)
    if excess is None:
        return None
    near = [value for rate, value in excess.items() if abs(math.log10(rate / chosen)) <= DECADE + 1e-9]
    mean = math.fsum(near) / len(near)
    return mean if math.isfinite(mean) else None


def rate_dots(seeds: Mapping[str, Sequence[float | None]]) -> list[tuple[float, float]]:
    return [(float(rate), score) for rate, scores in seeds.items() for score in scores if score is not None]


def _excess(scores: Scores, *, higher_is_better: bool) -> dict[float, float] | None:
    known = [score for score in scores.values() if score is not None]
    if len(scores) < 2 or not known:
        return None
    if higher_is_better:
        return {rate: max(known) - (score or 0.0) for rate, score in scores.items()}
    return {rate: (score if score is not None else math.inf) - min(known) for rate, score in scores.items()}


def _share_within(first: float, second: float, allowed: float) -> float:
    low, high = sorted((first, second))
    if high <= allowed:
        return 1.0
    return (allowed - low) / (high - low) if low <= allowed else 0.0
