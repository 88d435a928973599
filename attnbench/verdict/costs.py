"""Costs of scores, of an accuracy the bytes of a state and of a loss the milliseconds of a training step; and the
scores that are worth theirs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.numbers import reaches, without_rounding
from attnbench.verdict.axes import is_chance
from attnbench.verdict.family import primary_figures
from attnbench.verdict.seeds import Figure

WIDTH = "width"
"""Setting of a probe's models by which a state has another size."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A score and what its model costs; both have means."""

    score: Figure
    cost: Figure

    @property
    def value(self) -> float:
        """Mean of the score."""
        assert self.score.mean is not None
        return self.score.mean

    @property
    def price(self) -> float:
        """Mean of the cost."""
        assert self.cost.mean is not None
        return self.cost.mean


def widths_of(points: Sequence[Priced]) -> list[int]:
    """List the widths of the models, narrowest first; empty where there is one, or none is known."""
    widths = sorted({point.score.settings[WIDTH] for point in points if WIDTH in point.score.settings})
    return widths if len(widths) > 1 else []


def cost_metric(primary: Primary) -> str:
    """Name the metric in which a score costs."""
    return "step_milliseconds" if primary.kind == "nats" else "state_bytes"


def priced(figures: Sequence[Figure], evaluation: str, primary: Primary) -> list[list[Priced]]:
    """Find what the primary scores of an evaluation cost; those whose cost nobody measured are left out.

    Returns:
        The scores at the hardest setting or, where models of several widths were trained, those of each setting but the
        width, so that one variant may be there several times. Lists without any score are left out. Against time each
        name of a score is there with its own cost.
    """
    of_it = [f for f in figures if f.evaluation == evaluation and primary.takes(f.metric, f.settings)]
    if len({figure.settings[WIDTH] for figure in of_it if WIDTH in figure.settings}) > 1:
        by_place: dict[str, list[Figure]] = {}
        for figure in of_it:
            place = {name: value for name, value in figure.settings.items() if name != WIDTH}
            by_place.setdefault(json.dumps(place, sort_keys=True), []).append(figure)
        groups = list(by_place.values())
    else:
        groups = [[*primary_figures(of_it, primary, [figure.variant for figure in of_it]).values()]]
    if cost_metric(primary) == "step_milliseconds":
        # Variants that are one model have one score, and are several kernels with a time each.
        groups = [[_named(score, name) for score in group for name in score.names] for group in groups]
    pairs = [[(score, _cost_of(score, figures, primary)) for score in group] for group in groups]
    found = [[Priced(score, cost) for score, cost in group if score.mean is not None and cost] for group in pairs]
    return [group for group in found if group]


def _named(score: Figure, name: str) -> Figure:
    return replace(score, names=(name,), identity=replace(score.identity, variant=name))


def _cost_of(score: Figure, figures: Sequence[Figure], primary: Primary) -> Figure | None:
    metric = cost_metric(primary)
    costs = [f for f in figures if score.variant in f.names and f.metric == metric and _is_cost_of(f, score)]
    # At the most tokens a step; throughput is measured before scaling.
    return max(costs, key=lambda figure: figure.settings.get("batch_size", 0), default=None)


def _is_cost_of(cost: Figure, score: Figure) -> bool:
    """Tell if a cost is of the model that a score is of."""
    if not cost.mean:
        return False
    if cost.metric == "state_bytes":
        return cost.evaluation == score.evaluation and cost.settings.items() <= score.settings.items()
    if cost.evaluation == "throughput":
        return cost.settings.get("sequence_length") == score.identity.seq_len
    return split_name(cost.evaluation)[0] == "scaling" and cost.settings.get("model") == score.identity.model


def frontier(points: Sequence[Priced], primary: Primary) -> list[Priced]:
    """Choose accuracies of one setting, the cheapest first, each more than the margin above those before it and above
    chance.

    Every other is at most the margin above one of them that costs no more, or above chance.
    """
    kept: list[Priced] = []
    levels = (value for name, value in points[0].score.settings.items() if is_chance(name))
    chance = max(levels, default=0.0)
    for point in sorted(points, key=lambda point: (point.price, -without_rounding(point.value))):
        if not reaches((kept[-1].value if kept else chance) + primary.margin, point.value):
            kept.append(point)
    return kept
