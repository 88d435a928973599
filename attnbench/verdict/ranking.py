"""Variants that are separated from others: one ranked metric at one setting, for all variants that are ranked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.results.rows import TEST_OF_BEST
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_PAIRED
from attnbench.verdict.seeds import Figure, Key
from attnbench.verdict.statistics import MIN_SEEDS, Comparison, best, compare_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The rule by which a metric is ranked."""

    higher_is_better: bool
    smallest_difference: float
    """Smallest difference that matters: absolute, or with `relative` a share of the mean of the pair."""
    relative: bool


ACCURACY = Score(higher_is_better=True, smallest_difference=0.01, relative=False)
PERPLEXITY = Score(higher_is_better=False, smallest_difference=0.01, relative=True)


def score_of(metric: str) -> Score | None:
    """Tell how a metric is ranked: `accuracy` and what ends so, and `perplexity`, of any evaluation; None: not.

    Timings and memory are of one process and have no seeds to rank by.
    """
    if metric.endswith("accuracy"):
        return ACCURACY
    return PERPLEXITY if metric == "perplexity" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One ranked metric at one setting: the variants that are compared there, and the verdict."""

    evaluation: str
    metric: str
    settings: dict[str, Any]
    figures: list[Figure]
    """Figures in the order of the ranking's names."""
    comparisons: list[Comparison]
    best: str | None
    """The variant that is separated from all others and better; None where there is none, see `statistics.best`."""
    higher_is_better: bool
    exploratory: bool
    """No pair has the 3 common seeds that a comparison needs."""


def families(figures: Sequence[Figure], *, rank: Sequence[str], reference: str | None) -> list[Family]:
    """Compare the variants in `rank` in the ranked metrics at every setting.

    A variant in `rank` that has no value there keeps its pairs in the family, whether it ran or not.

    Args:
        rank: variants; figures of others change nothing.
        reference: one of them, with which alone the others are compared; None: all pairs.

    Raises:
        UserError: more than 6 variants without a reference, or a reference that is not among them.
    """
    rank = list(dict.fromkeys(rank))
    rank_names = frozenset(rank)
    if reference is None and len(rank) > MAX_PAIRED:
        raise UserError(
            f"rank={','.join(rank)}: has {len(rank)} variants, and more than {MAX_PAIRED} need a reference "
            "to be compared with; name one of them as reference"
        )
    if reference is not None and reference not in rank:
        raise UserError(f"reference={reference}: must be one of the ranked variants, {', '.join(rank)}")
    # Variants that are one model in an evaluation are one member there.
    one = {(figure.evaluation, name): figure.variant for figure in figures for name in figure.names}
    groups: dict[Key, dict[str, Figure]] = {}
    for figure in figures:
        if not rank_names.isdisjoint(figure.names) and _is_ranked(figure):
            groups.setdefault(figure.key, {})[figure.variant] = figure
    ranked = []
    for (evaluation, *_), group in groups.items():
        members = list(dict.fromkeys(one.get((evaluation, name), name) for name in rank))
        compared_with = one.get((evaluation, reference), reference) if reference is not None else None
        ranked.append(_family([group[name] for name in members if name in group], members, compared_with))
    return ranked


def _is_ranked(figure: Figure) -> bool:
    # Rates and checkpoints are chosen on validation data, which therefore ranks nobody.
    is_score = all(figure.settings.get(name, value) == value for name, value in TEST_OF_BEST.items())
    return is_score and score_of(figure.metric) is not None


def _family(members: list[Figure], rank: list[str], reference: str | None) -> Family:
    first = members[0]
    score = score_of(first.metric)
    assert score is not None
    measured = {figure.variant: figure.values for figure in members}
    scores = {name: measured.get(name, {}) for name in rank}
    comparisons = compare_pairs(
        scores, smallest_difference=score.smallest_difference, relative=score.relative, reference=reference
    )
    # Without a reference a variant that was measured alone has its seeds; beside one that was not, it has no pair.
    pairs = [pair for pair in comparisons if reference is not None or (scores[pair.first] and scores[pair.second])]
    num_seeds = [pair.num_seeds for pair in pairs] or [len(values) for values in scores.values()]
    return Family(
        evaluation=first.evaluation,
        metric=first.metric,
        settings=first.settings,
        figures=members,
        comparisons=comparisons,
        best=best(scores, comparisons, higher_is_better=score.higher_is_better),
        higher_is_better=score.higher_is_better,
        exploratory=max(num_seeds) < MIN_SEEDS,
    )
