"""Pictures of what a score costs: accuracy against the bytes of a state, loss against the time of a training step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnbench.report.blocks import Block, Note, Picture, Pictures, Section
from attnbench.report.charts.marks import WIDE_AXIS, Axis, Datum, Drawing, round_numbers, share_axis, value_axis
from attnbench.report.charts.pictures import figure_words, labels_of
from attnbench.report.charts.vega import draw
from attnbench.report.sections import words
from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.results.rows import MIXER_OPTIONS, ResultRow, is_search
from attnbench.results.tables import Table, format_interval
from attnbench.verdict.family import primary_figures
from attnbench.verdict.seeds import Figure

WINDOW = "window"
"""Option of a mixer that sees so many positions: by it a state has any size."""

Points = dict[str, tuple[Figure, Figure]]
"""Score and cost by variant."""


def tradeoffs(
    rows: Sequence[ResultRow], figures: Sequence[Figure], primaries: Mapping[str, Primary], variants: Sequence[str]
) -> Section | None:
    """Draw every primary score against its cost; a table where all cost the same; None where no cost is known."""
    pictures: list[Picture] = []
    tables: list[Block] = []
    curves = _windows(rows)
    for evaluation, primary in primaries.items():
        of_it = [figure for figure in figures if figure.evaluation == evaluation]
        scores = primary_figures(of_it, primary, list(dict.fromkeys(figure.variant for figure in of_it)))
        cost, points = _costs(figures, scores, primary)
        values = {figure.mean for _, figure in points.values()}
        if len(values) > 1:
            pictures.append(_picture(evaluation, cost, points, curves, variants))
        elif values and len(points) > 1:
            tables.append(_table(evaluation, cost, points))
    about = "Better is up where it is an accuracy, down where it is a loss; cheaper is left."
    blocks = [Note(about), *([Pictures(pictures)] if pictures else []), *tables]
    return Section(title="What a score costs", blocks=blocks) if pictures or tables else None


def _costs(figures: Sequence[Figure], scores: Mapping[str, Figure], primary: Primary) -> tuple[str, Points]:
    """Find the cost of each score: of a loss the milliseconds of a step, of an accuracy the bytes of a state."""
    metric = "step_milliseconds" if primary.kind == "nats" else "state_bytes"
    points = {}
    for variant, score in scores.items():
        costs = [f for f in figures if variant in f.names and f.metric == metric and _is_cost_of(f, score)]
        # At the most tokens a step; throughput is measured before scaling.
        cost = max(costs, key=lambda figure: figure.settings.get("batch_size", 0), default=None)
        if cost is not None and cost.mean and score.mean is not None:
            points[variant] = (score, cost)
    return metric, points


def _is_cost_of(cost: Figure, score: Figure) -> bool:
    """Tell if a cost is of the model that a score is of."""
    if cost.mean is None:
        return False
    if cost.metric == "state_bytes":
        return cost.evaluation == score.evaluation and cost.settings.items() <= score.settings.items()
    if cost.evaluation == "throughput":
        return cost.settings.get("sequence_length") == score.identity.seq_len
    return split_name(cost.evaluation)[0] == "scaling" and cost.settings.get("model") == score.identity.model


def _windows(rows: Sequence[ResultRow]) -> dict[tuple[str, str], str]:
    """Name the curve that a variant of an evaluation lies on: of those that differ in their window alone.

    Returns:
        by (evaluation, variant); variants of no such curve are left out.
    """
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        options = row.measurement.settings.get(MIXER_OPTIONS)
        if isinstance(options, dict) and not is_search(row.identity.seed):
            others = {name: value for name, value in options.items() if name != WINDOW}
            key = row.identity.evaluation, json.dumps([row.identity.mixer, others], sort_keys=True)
            curves.setdefault(key, {})[row.identity.variant] = options.get(WINDOW)
    return {
        (evaluation, variant): f"windows of {next(iter(windows))}"
        for (evaluation, _), windows in curves.items()
        if len(set(windows.values())) > 1
        for variant in windows
    }


def _title(evaluation: str, cost: str, points: Points) -> str:
    score, _ = next(iter(points.values()))
    against = {"state_bytes": "state bytes", "step_milliseconds": "milliseconds a training step"}[cost]
    return f"{words.heading(evaluation)}: {words.metric_name(score.metric)} against {against}"


def _place(points: Points) -> str:
    score, _ = next(iter(points.values()))
    skipped = ("split", "checkpoint", "context")
    return words.where({name: value for name, value in score.settings.items() if name not in skipped})


def _picture(
    evaluation: str, cost: str, points: Points, curves: Mapping[tuple[str, str], str], variants: Sequence[str]
) -> Picture:
    data = {name: _datum(*pair) for name, pair in points.items()}
    scores = [score for score, _ in points.values()]
    costs = [datum["x"] for datum in data.values()]
    means = [datum["value"] for datum in data.values()]
    ends = [end for score in scores for end in (score.low, score.high) if end is not None]
    is_share = scores[0].metric.endswith("accuracy")
    title = {"state_bytes": "bytes of state a sequence", "step_milliseconds": "milliseconds a step"}[cost]
    # A window's curve is named by its first variant, and drawn in that one's colour.
    lines = [datum | {"line": curves[evaluation, name]} for name, datum in data.items() if (evaluation, name) in curves]
    first = {datum["line"]: datum["variant"] for datum in reversed(lines)}
    described = [f"{d['variant']} {d['text']} at {d['cost']}" for d in data.values()]
    drawing = Drawing(
        description=f"{_title(evaluation, cost, points)}: {'; '.join(described)}.",
        labels=labels_of(scores),
        x=_cost_axis(costs, title),
        y=share_axis() if is_share else value_axis(means, ends),
        points=list(data.values()),
        lines=[datum | {"variant": first[datum["line"]]} for datum in lines],
        words={
            "variant": "variant",
            "text": words.metric_name(scores[0].metric),
            "interval": words.interval_name(scores),
            "cost": "bytes of state" if cost == "state_bytes" else "milliseconds a step",
        },
    )
    notes = (_place(points), "joined: one mixer with several windows" if lines else "")
    return Picture(
        name=f"{evaluation}-{cost}".replace("/", "_").replace(" ", "_"),
        title=_title(evaluation, cost, points),
        spec=draw(drawing, variants),
        description=drawing.description,
        legend="; ".join(filter(None, notes)),
    )


def _cost_axis(costs: Sequence[float], title: str) -> Axis:
    if max(costs) < WIDE_AXIS * min(costs):
        return replace(value_axis(costs, title=title), is_short=True)
    domain = min(costs) / 1.25, max(costs) * 1.25
    return Axis(title=title, domain=domain, is_logarithmic=True, is_short=True, ticks=round_numbers(*domain))


def _datum(score: Figure, cost: Figure) -> Datum:
    mean = score.mean
    assert mean is not None
    return {
        "variant": score.label,
        "x": cost.mean,
        "value": mean,
        "low": mean if score.low is None else score.low,
        "high": mean if score.high is None else score.high,
        "cost": words.outcome(cost),
        **figure_words(score),
    }


def _table(evaluation: str, cost: str, points: Points) -> Table:
    lines = [
        [score.label, words.outcome(score), format_interval(score.low, score.high), words.outcome(paid)]
        for score, paid in points.values()
    ]
    score, paid = next(iter(points.values()))
    headers = ["Variant", *(words.capitalized(words.metric_name(f.metric)) for f in (score, paid))]
    headers.insert(2, words.interval_name([score]))
    return Table(title=f"{_title(evaluation, cost, points)}, {_place(points)}", headers=headers, lines=lines)
