"""A variant's learning rate and its scores by rate: how wide the rates are that work, and what a wrong one costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

GOOD = 0.9
"""Share of the best accuracy, or of the best 1 / perplexity, from which on a rate works."""

DECADE = 1.0
"""Rates that sensitivity is taken over are at most so many powers of ten from the chosen one."""

Scores = Mapping[float, float | None]
"""Mean score by learning rate; None where all its trainings failed."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Choice:
    """Choice of the rate that a variant is scored at."""

    variant: str
    evaluation: str
    settings: dict[str, Any]
    """Settings of the task; empty for language models."""
    grid: list[float]
    """All rates that were tried, those that widened the grid too."""
    scores: dict[str, float | None]
    """Mean score of each rate over the search seeds, on validation data; None where all failed. Empty without a search;
    of language models those that went on to whole trainings."""
    seeds: dict[str, list[float | None]] = field(default_factory=dict)
    """The scores behind each mean, seed by seed."""
    solved: dict[str, int] = field(default_factory=dict)
    """Number of search seeds that were solved, by rate; empty for language models."""
    steps: dict[str, float] = field(default_factory=dict)
    """Mean steps to 0.95, by rate, the budget where it was never reached; empty for language models."""
    after_an_epoch: dict[str, float | None] = field(default_factory=dict)
    """Scores of the first stage of language models, of one seed after one epoch."""
    rate_window: float | None = None
    rate_sensitivity: float | None = None
    """By the functions below; of language models in two stages those of the first."""
    chosen: float
    at_edge: bool
    """The chosen rate is the smallest or the largest of the widened grid: a wider one might hold a better one."""
    taken_from: dict[str, Any] | None = None
    """The settings of the neighbouring task whose rate this is."""


def rate_window(scores: Scores, *, higher_is_better: bool) -> float | None:
    """Return how many decades of rates in total reach GOOD of the best, gaps left out.

    Between two rates that were tried, scores are taken to lie on a line over the logarithm of the rate; beyond the
    first and the last nothing is known, and nothing counted.

    Args:
        higher_is_better: True for accuracies, of which a failed one is 0. False for nats, of which a failed one is
            infinite, and those within -log GOOD of the lowest reach it.

    Returns:
        None with fewer than two rates, or where all failed or none has an accuracy above 0.
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
    """Return the mean excess over the best score of all rates tried within one decade of the chosen one, that included.

    Args:
        higher_is_better: as in `rate_window`; the excess is in the score's unit and never negative.

    Returns:
        None with fewer than two rates, or where nats of one within the decade, or of all, are of failed trainings.
    """
    excess = _excess(scores, higher_is_better=higher_is_better)
    if excess is None:
        return None
    near = [value for rate, value in excess.items() if abs(math.log10(rate / chosen)) <= DECADE + 1e-9]
    mean = math.fsum(near) / len(near)
    return mean if math.isfinite(mean) else None


def rate_dots(seeds: Mapping[str, Sequence[float | None]]) -> list[tuple[float, float]]:
    """List (rate, score) of every search seed that has a score, for the curve; `seeds` as in comparison.json."""
    return [(float(rate), score) for rate, scores in seeds.items() for score in scores if score is not None]


def _excess(scores: Scores, *, higher_is_better: bool) -> dict[float, float] | None:
    """Return by how much each rate is worse than the best; None where there is nothing to compare."""
    known = [score for score in scores.values() if score is not None]
    if len(scores) < 2 or not known:
        return None
    if higher_is_better:
        return {rate: max(known) - (score or 0.0) for rate, score in scores.items()}
    return {rate: (score if score is not None else math.inf) - min(known) for rate, score in scores.items()}


def _share_within(first: float, second: float, allowed: float) -> float:
    """Return the share of a line from `first` to `second` that is at most `allowed`."""
    low, high = sorted((first, second))
    if high <= allowed:
        return 1.0
    return (allowed - low) / (high - low) if low <= allowed else 0.0
