"""Plots as pictures."""

from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.report.blocks import Picture
from attnbench.report.charts.marks import Axis, Datum, Drawing, position_axis, value_axis
from attnbench.report.charts.plots import Plot, chance_text, describe, missing_text, share
from attnbench.report.charts.vega import draw, draw_bars
from attnbench.report.sections import words
from attnbench.results.tables import NOTHING
from attnbench.verdict.axes import grouped
from attnbench.verdict.seeds import Figure

AT = ("sequence_length", "batch_size")
"""Settings of costs that the caption names where all figures share them."""


def picture(plot: Plot, variants: Sequence[str]) -> Picture:
    """Draw lines along the axis, or bars of shares of a whole; `variants` are those of the whole report."""
    spec = _bars(plot, variants) if plot.is_whole else draw(_drawing(plot), variants)
    at = {name: plot.figures[0].place.get(name) for name in AT if name not in (plot.axis, *plot.fixed)}
    told = {name: it for name, it in at.items() if it and all(f.place.get(name) == it for f in plot.figures)}
    legend = [words.where(told)] if "batch_size" in told else []
    legend += [f"dashed: {chance_text(plot)}"] if plot.chance() else []
    legend += ["right of the dashed upright line: longer than trained"] if plot.trained is not None else []
    legend += seeds_legend(plot.figures) if not plot.is_whole else []
    given = {"name": plot.name, "title": plot.title, "legend": "; ".join(legend), "missing": missing_text(plot)}
    return Picture(spec=spec, description=describe(plot), **given)


def _drawing(plot: Plot) -> Drawing:
    with_mean = [figure for figure in plot.figures if figure.mean is not None]
    means = [figure.mean for figure in with_mean if figure.mean is not None]
    ends = [end for figure in with_mean for end in ends_of(figure)]
    is_share = "accuracy" in plot.metric or bool(plot.chance())
    y = Axis(domain=(0, 1)) if is_share else value_axis(means, ends)
    names, title = [str(value) for value in plot.positions], words.axis_name(plot.axis)
    x = position_axis(plot.positions, title) if plot.is_numeric else Axis(title=title, categories=names)
    # Intervals of positive numbers may reach below 0, where a logarithmic axis ends.
    least = y.domain[0] if y.is_logarithmic and y.domain is not None else None
    points, levels = [_datum(plot, figure, least) for figure in with_mean], plot.chance()
    crosses = grouped(plot.missing, lambda figure: figure.label)
    missing = {label: [_datum(plot, figure) for figure in group] for label, group in crosses.items()}
    return Drawing(
        description=describe(plot),
        labels=labels_of(plot.figures),
        x=x,
        y=y,
        points=points,
        lines=points,
        dots=[it for figure in with_mean for it in seed_dots(figure, _shown(plot, plot.position(figure)), least)],
        missing=missing,
        trained=[{"x": plot.trained}] if plot.trained is not None else [],
        levels=[{"x": _shown(plot, at), "value": levels[at]} for at in plot.positions if at in levels],
        words={
            "variant": "variant",
            "at": title,
            "text": words.metric_name(plot.metric, plot.unit),
            "interval": words.interval_name(plot.figures),
            "seeds": "seeds with a number",
        },
    )


def labels_of(figures: Iterable[Figure]) -> dict[str, str]:
    return {figure.variant: figure.label for figure in figures}


def _bars(plot: Plot, variants: Sequence[str]) -> dict[str, Any]:
    values = [
        _datum(plot, figure) | {"order": plot.positions.index(plot.position(figure)), "share": share(figure)}
        for figure in plot.figures
        if figure.mean is not None
    ]
    labels = labels_of(plot.figures)
    return draw_bars(
        values, list(map(str, plot.positions)), [labels[n] for n in variants if n in labels], describe(plot)
    )


def _datum(plot: Plot, figure: Figure, least: float | None = None) -> Datum:
    at = plot.position(figure)
    datum = {
        "variant": figure.label,
        "x": _shown(plot, at),
        "at": words.shown_value(at),
        **figure_words(figure),
    }
    if figure.mean is not None:
        low, high = bounds(figure)
        datum |= {"value": figure.mean, "low": low if least is None else max(low, least), "high": high}
    return datum


def seeds_legend(figures: Iterable[Figure], lines: str = "upright lines") -> list[str]:
    """Say what the small dots and the lines at the means are."""
    measured = [it for it in figures if it.mean is not None]
    with_interval = [it for it in measured if not it.has_range and bounds(it)[0] != bounds(it)[1]]
    dots = ["small dots: seeds"] if any(it.has_range for it in measured) else []
    return dots + ([f"{lines}: {words.interval_name(with_interval)}"] if with_interval else [])


def bounds(figure: Figure) -> tuple[float, float]:
    """A figure whose seeds are dots has its mean alone."""
    assert figure.mean is not None
    if figure.has_range or figure.low is None or figure.high is None:
        return figure.mean, figure.mean
    return figure.low, figure.high


def ends_of(figure: Figure) -> Sequence[float]:
    """Return the ends of what is drawn of a figure: of its seeds or of its interval."""
    return figure.range if figure.has_range else bounds(figure)


def seed_dots(figure: Figure, x: Any, least: float | None = None) -> list[Datum]:
    if not figure.has_range:
        return []
    values = figure.values.values()
    return [{"variant": figure.label, "x": x, "value": it} for it in values if least is None or it >= least]


def figure_words(figure: Figure) -> dict[str, str]:
    num_seeds = sum(figure.statuses.values())
    return {
        "text": words.outcome(figure),
        "interval": figure.spread.strip("()") or NOTHING,
        "seeds": f"{len(figure.values)} of {num_seeds}",
    }


def _shown(plot: Plot, position: Any) -> Any:
    return position if plot.is_numeric else str(position)
