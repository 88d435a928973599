"""Scores against costs: accuracies against bytes of state, losses also against milliseconds per training step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.numbers import reaches, without_rounding
from attnbench.results.rows import TRAINING
from attnbench.verdict.axes import grouped, is_chance
from attnbench.verdict.family import primary_figures
from attnbench.verdict.seeds import Figure

WIDTH = "width"


@dataclass(frozen=True, slots=True)
class Priced:
    score: Figure
    cost: Figure

    @property
    def value(self) -> float:
        assert self.score.mean is not None
        return self.score.mean

    @property
    def price(self) -> float:
        assert self.cost.mean is not None
        return self.cost.mean


def widths_of(points: Sequence[Priced]) -> list[int]:
    widths = sorted({point.score.settings[WIDTH] for point in points if WIDTH in point.score.settings})
    return widths if len(widths) > 1 else []


def cost_metrics(primary: Primary) -> Sequence[str]:
    return ("step_milliseconds", "state_bytes") if primary.kind == "nats" else ("state_bytes",)


def priced(figures: Sequence[Figure], evaluation: str, primary: Primary, metric: str) -> list[list[Priced]]:
    """Pair the primary scores of an evaluation with their costs in `metric`, in groups.

    One group at the hardest setting or, with models of several widths, one for each setting apart from the width.
    Against time, each name of a score has its own cost. Scores without a cost are left out.
    """
    of_it = [f for f in figures if f.evaluation == evaluation and primary.takes(f.metric, f.settings)]
    if len({figure.settings[WIDTH] for figure in of_it if WIDTH in figure.settings}) > 1:
        groups = [*grouped(of_it, lambda figure: json.dumps(figure.settings | {WIDTH: None}, sort_keys=True)).values()]
    else:
        groups = [[*primary_figures(of_it, primary, [figure.variant for figure in of_it]).values()]]
    if metric == "step_milliseconds":
        # Variants that share a model share its score, but each kernel has its own time.
        groups = [[_named(score, name) for score in group for name in score.names] for group in groups]

    def cost_of(score: Figure) -> Figure | None:
        costs = [f for f in figures if score.variant in f.names and f.metric == metric and _is_cost_of(f, score)]
        # The largest batch; of equal ones the first, as throughput is measured before scaling.
        return max(costs, key=lambda figure: figure.settings.get("batch_size", 0), default=None)

    found = [[Priced(it, cost) for it in group if it.mean is not None and (cost := cost_of(it))] for group in groups]
    return [group for group in found if group]


def _named(score: Figure, name: str) -> Figure:
    return replace(score, names=(name,), identity=replace(score.identity, variant=name))


def _is_cost_of(cost: Figure, score: Figure) -> bool:
    if not cost.mean:
        return False
    if cost.metric == "state_bytes":
        # A language model's state is in the rows of its training, and a probe has its own model.
        of_training = (TRAINING, split_name(score.evaluation)[1])
        is_trained = split_name(cost.evaluation) == of_training and cost.identity.model == score.identity.model
        is_of_model = is_trained or cost.evaluation == score.evaluation
        return is_of_model and cost.settings.items() <= score.settings.items()
    if cost.evaluation == "throughput":
        return cost.settings.get("sequence_length") == score.identity.seq_len
    return split_name(cost.evaluation)[0] == "scaling" and cost.settings.get("model") == score.identity.model


def frontier(points: Sequence[Priced], primary: Primary) -> list[Priced]:
    """Choose the accuracies worth their cost: cheapest first, each more than the margin above chance and all before."""
    kept: list[Priced] = []
    levels = (value for name, value in points[0].score.settings.items() if is_chance(name))
    chance = max(levels, default=0.0)
    for point in sorted(points, key=lambda point: (point.price, -without_rounding(point.value))):
        if not reaches((kept[-1].value if kept else chance) + primary.margin, point.value):
            kept.append(point)
    return kept
