"""Families: the pairs of variants that are tested, named before any score, and their differences.

A family pairs all variants, or each variant with the reference, at the primary metric of every evaluation.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from attnbench.results.metrics import Primary
from attnbench.results.protocol import SIGNIFICANCE
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_PAIRED
from attnbench.verdict.axes import is_chance
from attnbench.verdict.levels import UNPAIRED, limit
from attnbench.verdict.power import MAX_SEEDS
from attnbench.verdict.seeds import Figure
from attnbench.verdict.statistics import SIGN_FLIP, STUDENT, PairedTest

TESTS: dict[str, PairedTest] = {"nats": STUDENT, "accuracy": SIGN_FLIP, "level": UNPAIRED}

NATS_RESOLUTION = 1e-6
"""Smallest standard error of nats; smaller ones are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    evaluation: str
    primary: Primary
    settings: dict[str, Any]
    first: str
    second: str
    differences: tuple[float, ...] = ()
    """First minus second for each common seed, in the order of the seeds."""
    seeds: tuple[int, ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    """Scores of the first and of the second variant at these seeds, for a test that does not pair them; else empty."""
    resolution: float = NATS_RESOLUTION
    solved: tuple[int, int] | None = None
    """Numbers of these seeds that solve the task, for the first and second variant; None if unknown."""
    failed: tuple[str, ...] = ()
    """Variants of the pair with diverged seeds, which count as chance."""
    obstacle: str = ""

    @property
    def test(self) -> PairedTest:
        return TESTS[self.primary.kind]

    @property
    def sample(self) -> tuple[Any, ...]:
        """The test takes the differences, or both scores."""
        return self.scores or self.differences

    @property
    def limit(self) -> str:
        """ceiling or floor, if both variants are there and the ladder cannot separate them."""
        return limit(self.scores, self.settings.get("levels"))

    @property
    def condition(self) -> str:
        """The seeds of the verdict, if all have one outcome: it does not show how often seeds fail."""
        if self.solved is None or not self.seeds or self.solved not in ((0, 0), (len(self.seeds),) * 2):
            return ""
        return "seeds that solve it" if self.solved[0] else "seeds that do not solve it"

    @property
    def spread(self) -> float:
        """Standard deviation of the differences, at least their resolution."""
        variance = sum(float(np.var(values, ddof=1)) for values in self.scores or [self.differences])
        return max(math.sqrt(variance), self.resolution)


def family(
    figures: Sequence[Figure],
    *,
    rank: Sequence[str],
    reference: str | None,
    primaries: Mapping[str, Primary],
) -> list[Pair]:
    """Return the pairs of a comparison with their differences.

    Variants that are one model in an evaluation are one member there. Variants without scores keep their pairs.
    """
    shared: dict[str, dict[str, str]] = {}
    for figure in figures:
        shared.setdefault(figure.evaluation, {}).update(dict.fromkeys(figure.names, figure.variant))
    names = name_family(rank=rank, reference=reference, evaluations=list(primaries), shared=shared)
    pairs = []
    for evaluation, primary in primaries.items():
        of_it = [figure for figure in figures if figure.evaluation == evaluation]
        here = [(first, second) for where, first, second in names if where == evaluation]
        measured = primary_figures(of_it, primary, list({name for pair in here for name in pair}))
        pairs += [pair_of(evaluation, primary, first, second, measured, of_it) for first, second in here]
    return pairs


def name_family(
    *,
    rank: Sequence[str],
    reference: str | None,
    evaluations: Sequence[str],
    shared: Mapping[str, Mapping[str, str]],
) -> list[tuple[str, str, str]]:
    """Return the pairs of a comparison as (evaluation, first, second), before anything is measured. More than 6
    variants need a reference.

    Args:
        reference: the variant that all others are paired with; None: all pairs.
        evaluations: those with a primary metric.
        shared: by evaluation, variants that are one model with another, and that other.
    """
    rank = list(dict.fromkeys(rank))
    if reference is None and len(rank) > MAX_PAIRED:
        raise UserError(
            f"rank={','.join(rank)}: has {len(rank)} variants, but more than {MAX_PAIRED} need a reference "
            "to be compared with; name one of them as reference"
        )
    if reference is not None and rank and reference not in rank:
        raise UserError(f"reference={reference}: must be one of the ranked variants, {', '.join(rank)}")
    pairs = []
    for evaluation in evaluations:
        one = shared.get(evaluation, {})
        members = list(dict.fromkeys(one.get(name, name) for name in rank))
        against = one.get(reference, reference) if reference is not None else None
        names = combinations(members, 2) if against is None else [(m, against) for m in members if m != against]
        pairs += [(evaluation, first, second) for first, second in names]
    return pairs


def check_family(
    names: Sequence[tuple[str, str, str]],
    primaries: Mapping[str, Primary],
    num_seeds: Mapping[str, int],
    settings: Mapping[str, str],
) -> None:
    """Refuse a family in which the smallest possible p-value of a test exceeds its first Holm step.

    `num_seeds` and `settings` have, by evaluation, the number of seeds and the setting that gives it.
    """
    if not names:
        return
    alpha = SIGNIFICANCE / len(names)
    for evaluation in dict.fromkeys(where for where, *_ in names):
        primary, num = primaries[evaluation], num_seeds[evaluation]
        test = TESTS[primary.kind]
        if test.smallest_p(num) > alpha:
            raise UserError(
                f"{settings[evaluation]}: {num} {'seed' if num == 1 else 'seeds'} can decide nothing about "
                f"{primary.metric} of {evaluation}, whose p-value is at least {test.smallest_p(num):.2g} and must be "
                f"{alpha:.2g} in a family of {len(names)}; it takes {fewest_seeds(test, alpha)} seeds, or plan.rank=[] "
                "for numbers that are descriptive"
            )


def fewest_seeds_of(primary: Primary, num_pairs: int) -> int:
    return fewest_seeds(TESTS[primary.kind], SIGNIFICANCE / num_pairs)


def fewest_seeds(test: PairedTest, alpha: float) -> int:
    return next(num for num in range(2, MAX_SEEDS + 1) if test.smallest_p(num) <= alpha)


def primary_figures(figures: Sequence[Figure], primary: Primary, variants: Sequence[str]) -> dict[str, Figure]:
    by_setting: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        if figure.variant in variants and primary.takes(figure.metric, figure.settings):
            by_setting.setdefault(json.dumps(figure.settings, sort_keys=True), {})[figure.variant] = figure
    groups = list(by_setting.values())
    return max(groups, key=lambda group: primary.hardness(next(iter(group.values())).settings), default={})


def solved_beside(score: Figure, primary: Primary, figures: Sequence[Figure]) -> Figure | None:
    of_variant = [it for it in figures if it.variant == score.variant]
    for solved in (it for it in of_variant if it.metric == "solved"):
        place = {name: value for name, value in solved.settings.items() if not is_chance(name)}
        decide = [
            it for it in of_variant if primary.takes(it.metric, it.settings) and place.items() <= it.settings.items()
        ]
        hardest = max(decide, key=lambda it: primary.hardness(it.settings), default=None)
        if hardest is not None and (hardest.metric, hardest.settings) == (score.metric, score.settings):
            return solved
    return None


def pair_of(
    evaluation: str,
    primary: Primary,
    first: str,
    second: str,
    measured: Mapping[str, Figure],
    figures: Sequence[Figure] = (),
) -> Pair:
    settings = next(iter(measured.values())).settings if measured else primary.settings
    empty = Pair(evaluation=evaluation, primary=primary, settings=settings, first=first, second=second)
    for name in (first, second):
        if name not in measured:
            return replace(empty, obstacle=f"{name} was not measured")
        if measured[name].obstacle:
            return replace(empty, obstacle=f"{name} {measured[name].obstacle}")
    scores = [measured[name].values for name in (first, second)]
    seeds = sorted(scores[0].keys() & scores[1].keys())
    num_items = min((measured[name].num_samples or 0 for name in (first, second)), default=0)
    return replace(
        empty,
        differences=tuple(scores[0][seed] - scores[1][seed] for seed in seeds),
        seeds=tuple(seeds),
        scores=tuple(tuple(of[seed] for seed in seeds) for of in scores) if primary.kind == "level" else (),
        resolution=NATS_RESOLUTION if primary.kind == "nats" else 1 / num_items if num_items else 0.01,
        solved=_num_solved([measured[name] for name in (first, second)], primary, figures, seeds),
        failed=tuple(name for name in (first, second) if measured[name].num_diverged),
    )


def _num_solved(
    scores: Sequence[Figure], primary: Primary, figures: Sequence[Figure], seeds: Sequence[int]
) -> tuple[int, int] | None:
    solved = [solved_beside(score, primary, figures) for score in scores]
    counts = [
        sum(it.values[seed] > 0 for seed in seeds) for it in solved if it is not None and {*seeds} <= {*it.values}
    ]
    return (counts[0], counts[1]) if len(counts) == 2 else None
