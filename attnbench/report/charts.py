"""Plots as Vega-Lite specifications, as SVG and as PNG; alone in importing the plotting library.

A specification holds no colours of its own but those of the chart's configuration, so that a page can draw it light
or dark. Text of the user's enters as data and is never part of an expression.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import altair as alt
import vl_convert

from attnbench.report import words
from attnbench.report.plots import Plot, chance_text, describe, missing_text, share
from attnbench.results.tables import format_interval
from attnbench.settings.errors import printable
from attnbench.verdict.seeds import Figure

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STATIC_WIDTH = 640

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours that differ with every common kind of colour vision; shapes and dashes say the same again."""

OKABE_ITO_ON_DARK = ("#4DA6DB", "#EE7A33", "#1BBF92", "#DB93BA", "#E69F00", "#8CCBF2")
"""Lighter colours of these hues."""

PARTS = ("#56B4E9", "#E69F00", "#1BBF92", "#DB93BA", "#F0E442", "#EE7A33", "#B8B6AE", "#E3E1DA")
"""Colours of the parts of a whole, in their order: light enough for dark words on them, on any page."""

PARTS_ON_DARK = (*PARTS[:-1], "#80838A")
"""Colours of these parts on a dark page: the last, which nothing fills, is a little nearer to the page."""

BAR_TOOLTIP = {"variant": "variant", "x": "part", "share": "share"}

NUMBER_WIDTH = 34
"""Width in pixels below which a part of a bar has no room for its number."""

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [4, 1], [12, 4], [1, 3])
LEGEND_LIMIT = 150
CROSS_HEIGHT = 14
CROSS = "M-1,-1L1,1M1,-1L-1,1"

LOG_RATIO = 10
"""Numbers that span more than this are drawn on a logarithmic scale, where all are positive."""

SHORT = "abs(datum.value) < 1000 ? format(datum.value, '~f') : format(datum.value, '~s')"
"""Expression by which an axis writes numbers: SI letters keep 2,400,000 short, 2.4M; but 0.1 ms are not 100m."""

WIDE_AXIS = 8
"""Ratio of an axis's ends from which it is logarithmic: three doublings."""


def specification(plot: Plot, variants: Sequence[str]) -> dict[str, Any]:
    """Draw the plot as Vega-Lite: lines along the axis, points where it has a single value, bars of shares of a whole.

    Args:
        variants: of the whole report, so that each looks alike in all its plots.
    """
    look = _look(plot, variants)
    drawn_as_lines = len(plot.positions) > 1 and not plot.is_whole
    layers = _bars(plot, look) if plot.is_whole else _lines(plot, look) if drawn_as_lines else _points(plot, look)
    chart = alt.layer(*layers).properties(
        width="container",
        height=264 if drawn_as_lines else 44 * len(look.shown) + 16,
        description=describe(plot),
    )
    spec = chart.to_dict()
    # Where text goes out: the library dies of a control character, with the process.
    spec = _printable(spec)
    # The address of the schema is of no use to who draws the chart, and the page names no address at all.
    del spec["$schema"], spec["config"]
    return spec


def config(*, dark: bool) -> dict[str, Any]:
    """Set colours and type of all charts on a light or a dark page."""
    ink, muted, grid = ("#e8e6e1", "#a5a39c", "#34373c") if dark else ("#1c1d1f", "#63625d", "#e3e1da")
    text: dict[str, Any] = {
        "labelColor": muted,
        "titleColor": muted,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": 400,
    }
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "title": {"color": ink, "subtitleColor": muted, "fontSize": 14, "subtitlePadding": 6},
        "mark": {"color": muted},
        "rule": {"color": muted},
        "text": {"color": ink},
        "range": {
            "category": list(OKABE_ITO_ON_DARK if dark else OKABE_ITO),
            "ordinal": list(PARTS_ON_DARK if dark else PARTS),
        },
        "axis": {
            **text,
            "gridColor": grid,
            "domainColor": muted,
            "tickColor": muted,
            "labelOverlap": True,
            "labelPadding": 6,
            "titlePadding": 10,
        },
        "axisY": {"domain": False, "ticks": False},
        "axisX": {"grid": False, "tickSize": 4},
        "legend": {
            **text,
            "labelColor": ink,
            "labelFontSize": 13,
            "symbolSize": 90,
            "labelLimit": LEGEND_LIMIT,
            "columnPadding": 18,
        },
        "style": {
            "chance": {"strokeDash": [3, 3], "strokeWidth": 1.2},
            "value-label": {"fontSize": 12, "baseline": "bottom", "dy": -9},
            "part-label": {"fontSize": 12, "color": "#16181b"},
        },
    }


def to_svg(spec: dict[str, Any], plot: Plot) -> str:
    """Draw the chart as a picture on white with its title, without a browser."""
    below = [f"dashed: {chance_text(plot)}" if plot.chance() else "", missing_text(plot)]
    title = {"text": plot.title, "subtitle": [line for line in below if line], "anchor": "start", "offset": 16}
    static = {**spec, "width": STATIC_WIDTH, "title": _printable(title)}
    return vl_convert.vegalite_to_svg(static, vl_version=VEGA_LITE, config=_on_white())


def _printable(content: Any) -> Any:
    """Escape every text of plain data."""
    if isinstance(content, dict):
        return {name: _printable(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_printable(value) for value in content]
    return printable(content) if isinstance(content, str) else content


def to_png(svg: str) -> bytes:
    """Turn such a picture into pixels, two for every point."""
    return vl_convert.svg_to_png(svg, scale=2)


@lru_cache(maxsize=1)
def runtime() -> str:
    """Bundle the JavaScript that draws the charts, Vega-Embed with all it needs; it asks nothing of any server."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    # The addresses of an editor and of a schema: neither is used, and so the page can be seen to name none.
    return bundle.replace("https://vega.github.io/", "/").replace("https://github.com/", "/")


def _on_white() -> dict[str, Any]:
    light = config(dark=False)
    columns = STATIC_WIDTH // (LEGEND_LIMIT + 40)
    return {**light, "legend": {**light["legend"], "columns": columns}, "background": "white", "padding": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Colours, shapes and dashes of the variants, alike in all plots of a report."""

    shown: list[str]
    """The variants of this plot, in the report's order."""
    picked: alt.Parameter
    """Variants selected by a click on the legend."""
    color: alt.Color
    shape: alt.Shape
    dash: alt.StrokeDash


def _look(plot: Plot, variants: Sequence[str]) -> Look:
    def cycled(choices: Sequence[Any]) -> list[Any]:
        return [choices[index % len(choices)] for index in range(len(variants))]

    # One of several names has its own place, and is shown with all of them.
    labels = {figure.variant: figure.label for figure in plot.figures}
    shown = [labels[name] for name in variants if name in labels]
    domain = [labels.get(name, name) for name in variants]
    legend = None
    if len(plot.positions) > 1:
        # The lines of crosses stand between the legend and the plot.
        offset = 18 + CROSS_HEIGHT * len({figure.variant for figure in plot.missing})
        legend = alt.Legend(title=None, orient="top", values=shown, symbolStrokeWidth=0, symbolOpacity=1, offset=offset)
    # The colours stand in the configuration, which is another on a dark page; the domain gives each variant its place.
    return Look(
        shown=shown,
        picked=alt.selection_point(name="picked", fields=["variant"], bind="legend"),
        color=alt.Color("variant:N", scale=alt.Scale(domain=domain), legend=legend),
        shape=alt.Shape("variant:N", scale=alt.Scale(domain=domain, range=cycled(SHAPES)), legend=legend),
        dash=alt.StrokeDash("variant:N", scale=alt.Scale(domain=domain, range=cycled(DASHES)), legend=legend),
    )


def _lines(plot: Plot, look: Look) -> list[alt.Chart]:
    """Draw the variants as lines along the axis, their intervals as bars, crosses above for what has no number."""
    data = alt.Data(values=[_datum(plot, figure) for figure in plot.figures if figure.mean is not None])
    x, y = _axis(plot), alt.Y("value:Q", scale=_value_scale(plot), axis=_value_axis(plot), title=None)
    base = alt.Chart(data).encode(x=x, color=look.color)
    faded = alt.condition(look.picked, alt.value(1.0), alt.value(0.1))
    low = alt.Y("low:Q", scale=_value_scale(plot), axis=_value_axis(plot), title=None)
    bars = base.mark_rule(strokeWidth=1.5, clip=True).encode(
        y=low, y2="high:Q", opacity=alt.condition(look.picked, alt.value(0.55), alt.value(0.05))
    )
    lines = base.mark_line(strokeWidth=2).encode(y=y, strokeDash=look.dash, opacity=faded)
    points = base.mark_point(filled=True, size=64, opacity=1).encode(
        y=y, shape=look.shape, opacity=faded, tooltip=_tooltip(plot)
    )
    return [*_chance_line(plot, x, y), bars, lines, points.add_params(look.picked), *_crosses(plot, look, x)]


def _crosses(plot: Plot, look: Look, x: alt.X) -> list[alt.Chart]:
    """Draw crosses above the plot's top edge, a line for each variant, so that they do not hide each other."""
    layers = []
    for variant in (name for name in look.shown if any(figure.label == name for figure in plot.missing)):
        own = [_datum(plot, figure) for figure in plot.missing if figure.label == variant]
        mark = alt.Chart(alt.Data(values=own)).mark_point(shape=CROSS, size=36, strokeWidth=2.2, opacity=1)
        height = alt.value(-8 - CROSS_HEIGHT * len(layers))
        layers.append(mark.encode(x=x, y=height, color=look.color, tooltip=_tooltip(plot)))
    return layers


def _points(plot: Plot, look: Look) -> list[alt.Chart]:
    """Draw the variants one below the other, each with its number and interval."""
    data = alt.Data(values=[_datum(plot, figure) for figure in plot.figures])
    names = alt.Axis(title=None, labelFontSize=13, labelLimit=180, domain=False, ticks=False)
    y = alt.Y("variant:N", scale=alt.Scale(domain=look.shown), axis=names)
    scale, axis = _value_scale(plot), _value_axis(plot, grid=False)
    base = alt.Chart(data).encode(y=y, color=look.color)
    bars = base.mark_rule(strokeWidth=2, opacity=0.55, clip=True).encode(
        x=alt.X("low:Q", scale=scale, axis=axis, title=None), x2="high:Q"
    )
    x = alt.X("value:Q", scale=scale, axis=axis, title=None)
    points = base.mark_point(filled=True, size=90, opacity=1).encode(x=x, shape=look.shape, tooltip=_tooltip(plot))
    labels = alt.Chart(data).mark_text(style="value-label").encode(y=y, x=x, text="text:N")
    lost = alt.Data(values=[_datum(plot, figure) for figure in plot.missing])
    crosses = alt.Chart(lost).mark_point(shape=CROSS, size=36, strokeWidth=2.2, opacity=1)
    levels = [{"value": level} for level in dict.fromkeys(plot.chance().values())]
    chance = alt.Chart(alt.Data(values=levels)).mark_rule(style="chance").encode(x=x)
    return [
        *([chance] if levels else []),
        bars,
        points,
        labels,
        crosses.encode(y=y, x=alt.value(8), color=look.color, tooltip=_tooltip(plot)),
    ]


def _bars(plot: Plot, look: Look) -> list[alt.Chart]:
    """Draw a bar a variant, its parts one after the other, with their shares where there is room."""
    figures = [figure for figure in plot.figures if figure.mean is not None]
    values = [
        _datum(plot, figure) | {"order": plot.positions.index(figure.settings[plot.axis]), "share": share(figure)}
        for figure in figures
    ]
    names = alt.Axis(title=None, labelFontSize=13, labelLimit=180, domain=False, ticks=False)
    percent = alt.Axis(title=None, format="%", tickCount=5)
    legend = alt.Legend(title=None, orient="top", symbolType="square", offset=10)
    parts = alt.Scale(domain=[str(position) for position in plot.positions], range="ordinal")
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("variant:N", scale=alt.Scale(domain=look.shown), axis=names),
        x=alt.X("value:Q", stack="zero", scale=alt.Scale(domain=[0, 1]), axis=percent),
        order=alt.Order("order:O"),
    )
    bars = base.mark_bar(height=24).encode(
        color=alt.Color("x:N", scale=parts, legend=legend),
        tooltip=[alt.Tooltip(f"{field}:N", title=title) for field, title in BAR_TOOLTIP.items()],
    )
    middle = alt.X("value:Q", stack="zero", bandPosition=0.5)
    named = alt.condition(f"datum.value * width >= {NUMBER_WIDTH}", "share:N", alt.value(""))
    return [bars, base.mark_text(style="part-label").encode(x=middle, text=named, detail="x:N")]


def _chance_line(plot: Plot, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Draw the chance level at every position, as a line under everything."""
    levels = plot.chance()
    values = [
        {"x": _position(plot, position), "value": levels[position]} for position in plot.positions if position in levels
    ]
    return [alt.Chart(alt.Data(values=values)).mark_line(style="chance").encode(x=x, y=y)] if values else []


def _datum(plot: Plot, figure: Figure) -> dict[str, Any]:
    """Write one figure as the charts read it, numbers also as text."""
    seeds = len(figure.values)
    datum = {
        "variant": figure.label,
        "x": _position(plot, figure.settings[plot.axis]),
        "at": words.shown_value(figure.settings[plot.axis]),
        "text": words.outcome(figure),
        "interval": format_interval(figure.low, figure.high) or "–",
        "seeds": f"{seeds} of {sum(figure.statuses.values())}",
    }
    if figure.mean is not None:
        low, domain = _or(figure.low, figure.mean), _logarithmic_domain(plot)
        if domain is not None:
            # The interval of a few positive numbers may reach below 0, where a logarithm has no place for its end.
            low = max(low, domain[0])
        datum |= {"value": figure.mean, "low": low, "high": _or(figure.high, figure.mean)}
    return datum


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _position(plot: Plot, value: Any) -> Any:
    return value if plot.is_numeric else str(value)


def _tooltip(plot: Plot) -> list[alt.Tooltip]:
    names = {
        "variant": "variant",
        "at": words.axis_name(plot.axis),
        "text": words.metric_name(plot.metric, plot.unit),
        "interval": words.interval_name(plot.figures),
        "seeds": "seeds with a number",
    }
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in names.items()]


def _axis(plot: Plot) -> alt.X:
    """Draw the axis along the plot, with a tick at each of its values."""
    title, positions = words.axis_name(plot.axis), plot.positions
    if not plot.is_numeric:
        return alt.X("x:N", sort=[str(value) for value in positions], axis=alt.Axis(title=title, labelAngle=0))
    wide = positions[0] > 0 and positions[-1] >= WIDE_AXIS * positions[0]
    scale = alt.Scale(type="log" if wide else "linear", domain=[positions[0], positions[-1]], nice=False, padding=18)
    return alt.X("x:Q", scale=scale, axis=alt.Axis(title=title, values=positions, format=",.12~g"))


def _logarithmic_domain(plot: Plot) -> tuple[float, float] | None:
    """Choose the ends of a logarithmic scale; None for accuracies, and numbers that span no more than LOG_RATIO."""
    means = [figure.mean for figure in plot.figures if figure.mean is not None]
    if not means or _is_share(plot) or not max(means) > LOG_RATIO * min(means) > 0:
        return None
    return min(means) / 1.3, max(means) * 1.3


def _is_share(plot: Plot) -> bool:
    return "accuracy" in plot.metric or bool(plot.chance())


def _value_scale(plot: Plot) -> alt.Scale:
    """Scale 0 to 1 for accuracies, logarithmic where the numbers span more than LOG_RATIO, else close around them."""
    if _is_share(plot):
        return alt.Scale(domain=[0, 1], nice=False)
    domain = _logarithmic_domain(plot)
    if domain is not None:
        return alt.Scale(type="log", domain=list(domain), nice=False)
    means = [figure.mean for figure in plot.figures if figure.mean is not None]
    ends = [end for figure in plot.figures for end in (figure.low, figure.high) if end is not None]
    if not means:
        return alt.Scale(domain=[0, 1])
    # An interval of very few seeds may be far wider than all that is to be seen: it is cut at the plot's edges.
    span = max(means) - min(means) or abs(means[0]) or 1.0
    low, high = min([*means, *ends]), max([*means, *ends])
    return alt.Scale(
        domain=[max(low, min(means) - span), min(high, max(means) + span)], zero=False, nice=True, padding=6
    )


def _value_axis(plot: Plot, *, grid: bool = True) -> alt.Axis:
    means = [abs(figure.mean) for figure in plot.figures if figure.mean is not None]
    domain = _logarithmic_domain(plot)
    if domain is not None:
        return alt.Axis(grid=grid, values=_round_numbers(*domain), labelExpr=SHORT)
    # Small numbers as Vega writes them: as many digits as tell ticks apart.
    more: dict[str, Any] = {"labelExpr": SHORT} if means and max(means) >= 10_000 else {}
    return alt.Axis(grid=grid, tickCount=5, **more)


def _round_numbers(low: float, high: float) -> list[float]:
    """List 1, 2, 5, 10, ... between the ends; only the powers of ten where there are more than two of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
