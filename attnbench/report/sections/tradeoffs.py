"""Charts of scores against costs: accuracies against bytes of state, losses also against time per training step."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnbench.report.blocks import Block, Note, Picture, Pictures, Section, file_name
from attnbench.report.charts.marks import WIDE_AXIS, Axis, Datum, Drawing, placed, round_numbers, value_axis
from attnbench.report.charts.pictures import bounds, ends_of, figure_words, labels_of, seed_dots, seeds_legend
from attnbench.report.charts.vega import draw
from attnbench.report.sections import words
from attnbench.results.metrics import Primary
from attnbench.results.rows import MIXER_OPTIONS, ResultRow, is_search
from attnbench.verdict.costs import WIDTH, Priced, cost_metrics, frontier, priced, widths_of
from attnbench.verdict.seeds import Figure, sittings_lead

WINDOW = "window"
"""Option of a mixer with a window of positions, which determines its state size."""


STEPS = "dashed: the best mean with at most as many bytes"


def tradeoffs(
    rows: Sequence[ResultRow],
    figures: Sequence[Figure],
    primaries: Mapping[str, Primary],
    variants: Sequence[str],
    *,
    without: Collection[str] = (),
) -> Section | None:
    """Draw all but the pictures `without`."""
    drawn, notes = cost_pictures(rows, figures, primaries, variants)
    pictures = [picture for picture in drawn if picture.name not in without]
    about = "Up is better for accuracies, down for losses; left is cheaper."
    blocks = [Note(about), *([Pictures(pictures)] if pictures else []), *notes]
    return Section(title="What a score costs", blocks=blocks) if pictures or notes else None


def cost_pictures(
    rows: Sequence[ResultRow], figures: Sequence[Figure], primaries: Mapping[str, Primary], variants: Sequence[str]
) -> tuple[list[Picture], list[Block]]:
    """Return the charts, and notes on scores without one."""
    pictures: list[Picture] = []
    notes: list[Block] = []
    curves = _windows(rows)
    asked = [(*it, metric) for it in primaries.items() for metric in cost_metrics(it[1])]
    for evaluation, primary, metric in asked:
        groups = priced(figures, evaluation, primary, metric)
        for points in groups:
            if sittings_lead(("", point.cost) for point in points):
                notes.append(Note(f"Not drawn, as its timings cannot be ranked: {_title(evaluation, points)}."))
            elif len({point.price for point in points}) > 1:
                name = file_name(evaluation, points[0].cost.metric, *([_place(points)] if len(groups) > 1 else []))
                best = frontier(points, primary) if primary.higher_is_better else []
                pictures.append(_picture(name, evaluation, points, best, curves, variants))
    return pictures, notes


def _windows(rows: Sequence[ResultRow]) -> dict[tuple[str, str], str]:
    """Return the curve by (evaluation, variant) for variants that differ only in their window."""
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


def _title(evaluation: str, points: Sequence[Priced]) -> str:
    score, cost = points[0].score, points[0].cost
    against = {"state_bytes": "bytes of state", "step_milliseconds": "time of a training step"}[cost.metric]
    return f"{words.heading(evaluation)}: {words.metric_name(score.metric)} against {against}"


def _place(points: Sequence[Priced]) -> str:
    skipped = ("split", "checkpoint", "context", *([WIDTH] if widths_of(points) else []))
    return words.where({name: value for name, value in points[0].score.settings.items() if name not in skipped})


def _picture(
    name: str,
    evaluation: str,
    points: Sequence[Priced],
    best: Sequence[Priced],
    curves: Mapping[tuple[str, str], str],
    variants: Sequence[str],
) -> Picture:
    widths, scores = widths_of(points), [point.score for point in points]
    data = [_datum(point) | ({"width": f"{point.score.settings.get(WIDTH)}"} if widths else {}) for point in points]
    ends = [end for score in scores for end in ends_of(score)]
    is_share = scores[0].metric.endswith("accuracy")
    cost = points[0].cost.metric
    title = {"state_bytes": "bytes of state a sequence", "step_milliseconds": "milliseconds a step"}[cost]
    timed = points[0].cost if cost == "step_milliseconds" else None
    at_cost = f"step: {timed.evaluation} at {words.where(timed.place)}" if timed is not None else ""
    if widths:
        lines = [datum | {"line": datum["variant"]} for datum in data]
        joined = f"joined: one variant at widths {words.listed(map(str, widths))}"
    else:
        named = [
            (datum, curves.get((evaluation, point.score.variant))) for datum, point in zip(data, points, strict=True)
        ]
        lines = [datum | {"line": curve} for datum, curve in named if curve]
        joined = "joined: one mixer with several windows" if lines else ""
    # The curve of a window has the name and colour of its first variant.
    first = {datum["line"]: datum["variant"] for datum in reversed(lines)}
    at_width = [f"at width {datum['width']} " if widths else "" for datum in data]
    described = [f"{d['variant']} {at}{d['text']} at {d['cost']}" for d, at in zip(data, at_width, strict=True)]
    x = _cost_axis([point.price for point in points], title)
    y = Axis(domain=(0, 1)) if is_share else value_axis([point.value for point in points], ends)
    at = (f", {point.score.settings.get(WIDTH)}" if widths else "" for point in points)
    named = [{**datum, "name": f"{datum['variant']}{width}"} for datum, width in zip(data, at, strict=True)]
    # The best ones have their names first.
    is_best = [point in best for point in points]
    order = sorted(range(len(points)), key=lambda index: not is_best[index])
    names = placed([named[index] for index in order], x, y)
    better = f"{'upper' if is_share else 'lower'} left is better"
    drawing = Drawing(
        description=f"{_title(evaluation, points)}: {'; '.join(described)}.",
        labels=labels_of(scores),
        x=x,
        y=y,
        points=data,
        dots=[dot for point in points for dot in seed_dots(point.score, point.price)],
        best=[datum for datum, it in zip(data, is_best, strict=True) if it],
        names=names,
        has_legend=len(names) < len(points),
        lines=[datum | {"variant": first[datum["line"]]} for datum in lines],
        words={
            "variant": "variant",
            **({"width": "width"} if widths else {}),
            "text": words.metric_name(scores[0].metric),
            "interval": words.interval_name(scores),
            "cost": "bytes of state" if cost == "state_bytes" else "milliseconds a step",
        },
    )
    return Picture(
        name=name,
        title=_title(evaluation, points),
        spec=draw(drawing, variants),
        description=drawing.description,
        legend="; ".join(
            filter(
                None, (_place(points), at_cost, joined, STEPS if len(best) > 1 else "", *seeds_legend(scores), better)
            )
        ),
    )


def _cost_axis(costs: Sequence[float], title: str) -> Axis:
    if max(costs) < WIDE_AXIS * min(costs):
        return replace(value_axis(costs, title=title), is_short=True)
    domain = min(costs) / 1.25, max(costs) * 1.25
    return Axis(title=title, domain=domain, is_logarithmic=True, is_short=True, ticks=round_numbers(*domain))


def _datum(point: Priced) -> Datum:
    score = point.score
    return {
        "variant": score.label,
        "x": point.price,
        "value": point.value,
        **dict(zip(("low", "high"), bounds(score), strict=True)),
        "cost": words.outcome(point.cost),
        **figure_words(score),
    }
