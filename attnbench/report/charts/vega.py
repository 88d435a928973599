"""Charts in Vega-Lite. No other module imports altair.

Colours come from the chart's configuration, so that a page can draw a specification light or dark. User text enters as
data and never as part of an expression. Channels are given as altair's classes: for words it searches all its schemas.
Nothing is validated: it takes longer than all else, and tests/report validate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from attnbench.report.charts.looks import Look, looks
from attnbench.report.charts.marks import Axis, Datum, Drawing
from attnbench.settings.escape import printable

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])

PICKED = "picked"
"""Parameter with the variants that were clicked in a legend."""

BAR_TOOLTIP = {"variant": "variant", "x": "part", "share": "share"}

NUMBER_WIDTH = 34

LINE_END = "  "
"""Separator of a label's lines; a control character would be escaped."""

CHARACTER_WIDTH = 7
"""Pixels per character of a label 13 pixels high; wide fonts of browsers take 6.5."""

OF_EVERY_OBJECT = (
    *("__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__", "__proto__", "constructor"),
    *("hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString", "valueOf"),
)

CROSS_HEIGHT = 14
CROSS = "M-1,-1L1,1M1,-1L-1,1"

SHORT = "abs(datum.value) < 1000 ? format(datum.value, '~f') : format(datum.value, '~s')"
"""Format of an abbreviating axis: SI letters for large numbers (2.4M), but not for small ones (100m)."""


@debug_mode(False)
def draw(drawing: Drawing, variants: Sequence[str]) -> dict[str, Any]:
    """Return the marks as Vega-Lite; `variants` are the whole report's, so that each has one style in all charts."""
    style = _style(drawing, variants)
    x = alt.X("x:N" if drawing.x.categories is not None else "x:Q", **_channel(drawing.x, padding=18))
    y = alt.Y("value:Q", **_channel(drawing.y, padding=6))
    tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in drawing.words.items()]

    def marks(name: str) -> alt.Chart:
        return alt.Chart(alt.NamedData(name)).encode(x=x, y=y, color=style.color)

    thickness = 1.2 if drawing.is_thin else 2
    layers = {
        "levels": alt.Chart(alt.NamedData("levels")).mark_line(style="chance").encode(x=x, y=y),
        "steps": alt.Chart(alt.NamedData("best")).mark_line(style="chance", interpolate="step-after").encode(x=x, y=y),
        "bars": marks("points")
        .mark_rule(strokeWidth=1.5, clip=True)
        .encode(y=alt.Y("low:Q", **_channel(drawing.y, padding=6)), y2=alt.Y2("high:Q"), opacity=style.faded(0.55)),
        "lines": marks("lines")
        .mark_line(strokeWidth=thickness, clip=True)
        .encode(
            strokeDash=style.dash, detail=alt.Detail("line:N"), opacity=style.faded(0.75 if drawing.is_thin else 1.0)
        ),
        "dots": marks("dots").mark_point(filled=True, size=22, clip=True).encode(opacity=style.faded(0.6)),
        "rings": marks("rings").mark_point(size=190, strokeWidth=1.8).encode(opacity=style.faded(1.0)),
        "names": _names(x, y),
        "points": marks("points")
        .mark_point(filled=True, size=64, opacity=1)
        .encode(shape=style.shape, opacity=style.faded(1.0), tooltip=tooltip),
    }
    kinds = ("levels", "best", "names", "lines", "dots", "rings", "points")
    data = {name: list(getattr(drawing, name)) for name in kinds}
    data_of = {"bars": "points", "steps": "best"}
    kept = [layer for name, layer in layers.items() if data[data_of.get(name, name)]]
    # The top layer takes clicks on the legend; crosses follow, for points without a number.
    top = max(len(kept) - 1, 0)
    crosses = {f"missing {index}": list(values) for index, values in enumerate(drawing.missing.values())}
    for index, name in enumerate(crosses):
        mark = alt.Chart(alt.NamedData(name)).mark_point(shape=CROSS, size=36, strokeWidth=2.2, opacity=1)
        # Above the plot, one line per variant, so that crosses do not hide each other.
        height = alt.value(-8 - CROSS_HEIGHT * index)
        kept.append(mark.encode(x=x, y=height, color=style.color, tooltip=tooltip))
    kept[top] = kept[top].add_params(style.picked)
    return _specification(kept, data | crosses, height=264, description=drawing.description)


def _names(x: alt.X, y: alt.Y) -> alt.Chart:
    mark = alt.Chart(alt.NamedData("names")).mark_text(
        fontSize=12, align=alt.ExprRef("datum.align"), dx=alt.ExprRef("datum.dx"), dy=alt.ExprRef("datum.dy")
    )
    return mark.encode(x=x, y=y, text=alt.Text("name:N"))


@debug_mode(False)
def draw_bars(values: Sequence[Datum], parts: Sequence[str], shown: Sequence[str], description: str) -> dict[str, Any]:
    """Draw a bar per variant; `values` have `order`, `share` and the part as `x`."""
    names = alt.Axis(title=None, labelFontSize=13, labelLimit=180, domain=False, ticks=False)
    percent = alt.Axis(title=None, format="%", tickCount=5)
    legend = alt.Legend(title=None, orient="top", symbolType="square", offset=10)
    scale = alt.Scale(domain=list(parts), range="ordinal")
    base = alt.Chart(alt.NamedData("parts")).encode(
        y=alt.Y("variant:N", scale=alt.Scale(domain=list(shown)), axis=names),
        x=alt.X("value:Q", stack="zero", scale=alt.Scale(domain=[0, 1]), axis=percent),
        order=alt.Order("order:O"),
    )
    bars = base.mark_bar(height=24).encode(
        color=alt.Color("x:N", scale=scale, legend=legend),
        tooltip=[alt.Tooltip(f"{field}:N", title=title) for field, title in BAR_TOOLTIP.items()],
    )
    middle = alt.X("value:Q", stack="zero", bandPosition=0.5)
    named = alt.condition(f"datum.value * width >= {NUMBER_WIDTH}", "share:N", alt.value(""))
    layers = [bars, base.mark_text(style="part-label").encode(x=middle, text=named, detail=alt.Detail("x:N"))]
    return _specification(layers, {"parts": list(values)}, height=44 * len(shown) + 16, description=description)


@debug_mode(False)
def draw_bounds(
    values: Sequence[Datum],
    description: str,
    *,
    gap: int = 28,
    level: float | None = None,
    variants: Sequence[str] = (),
    title: str | None = None,
) -> dict[str, Any]:
    """Draw a line per figure: its bounds, its value, a dot for each seed, and a tick at each limit.

    Args:
        values: `variant` (the label, with LINE_END between lines), `value`, `low`, `high`, `text`; for limits `variant`
        and `limit`; for seeds `variant` and `dot`.
        gap: pixels between two labels.
        level: position of a dashed line.
        variants: those of the report, for the colours of labels that are variants.
    """
    order = list(dict.fromkeys(value["variant"] for value in values))
    lines = [line for variant in order for line in variant.split(LINE_END)]
    # Names of variants are short or cut, and stand whole in the tables; other labels have lines of a known width.
    limit = 180 if variants else 360
    labels = {"labelFontSize": 13, "labelLimit": limit, "labelExpr": f"split(datum.label, '{LINE_END}')"}
    # Reserve the label's width: a browser's font may be wider than the one used for the layout.
    extent = min(limit, CHARACTER_WIDTH * max(map(len, lines)))
    names = alt.Axis(title=None, domain=False, ticks=False, minExtent=extent, **labels)
    y, number = alt.Y("variant:N", sort=order, axis=names), alt.Axis(title=title, tickCount=5)
    colours = {name: look.colour for name, look in looks(variants).items() if name in order}
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    color = alt.Color("variant:N", scale=scale, legend=None) if {*order} <= {*colours} else alt.Undefined
    tooltip = [alt.Tooltip("variant:N", title="figure"), alt.Tooltip("text:N", title="with its bounds")]
    base = alt.Chart(alt.NamedData("figures")).encode(y=y)
    limits = alt.Chart(alt.NamedData("limits")).encode(y=y, x=alt.X("limit:Q", axis=number))
    levels = alt.Chart(alt.NamedData("levels")).mark_rule(style="chance").encode(x=alt.X("level:Q", axis=number))
    layers = [
        *([levels] if level is not None else []),
        base.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", axis=number, scale=alt.Scale(zero=False, padding=8)), x2=alt.X2("high:Q"), color=color
        ),
        alt.Chart(alt.NamedData("dots"))
        .mark_point(filled=True, size=44, opacity=0.55)
        .encode(y=y, x=alt.X("dot:Q", axis=number), color=color),
        base.mark_point(filled=True, size=80, opacity=1).encode(x=alt.X("value:Q"), tooltip=tooltip, color=color),
        limits.mark_tick(thickness=3, size=min(26, 14 + gap), color="#D55E00"),
    ]
    data = {
        "levels": [{"level": level}] if level is not None else [],
        "figures": [value for value in values if "value" in value],
        "dots": [value for value in values if "dot" in value],
        "limits": [value for value in values if "limit" in value],
    }
    kept = [layer for layer in layers if data[layer.data.name]]
    num_lines = max(variant.count(LINE_END) + 1 for variant in order)
    return _specification(kept, data, height=(gap + 16 * num_lines) * len(order) + 16, description=description)


def _specification(
    layers: Sequence[alt.Chart], data: dict[str, list[Datum]], *, height: int, description: str
) -> dict[str, Any]:
    chart = alt.layer(*layers).properties(width="container", height=height, description=description)
    spec = chart.to_dict(validate=False)
    spec["datasets"] = {name: values for name, values in data.items() if values}
    # Remove the schema's address (pages contain none) and altair's default configuration.
    del spec["$schema"], spec["config"]
    return with_printable_text(spec)


def to_chart(spec: dict[str, Any], config: dict[str, Any]) -> alt.LayerChart:
    """Return a specification as a chart of altair, which notebooks show."""
    return alt.LayerChart.from_dict({**spec, "config": config}, validate=False)


def with_printable_text(content: Any) -> Any:
    """Escape control characters in texts, which would end the drawing library's process.

    A name that every JavaScript object has would be found in any object, so it gets a trailing no-break space.
    """
    if isinstance(content, str) and content in OF_EVERY_OBJECT:
        return content + "\N{NO-BREAK SPACE}"
    if isinstance(content, dict):
        return {name: with_printable_text(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [with_printable_text(value) for value in content]
    return printable(content) if isinstance(content, str) else content


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    picked: alt.Parameter
    color: alt.Color
    shape: alt.Shape
    dash: alt.StrokeDash

    def faded(self, opacity: float) -> Any:
        picked = alt.ConditionalParameterValueDefnumberExprRef(param=alt.ParameterName(PICKED), value=opacity)
        return alt.OpacityValue(opacity / 10, condition=picked)


def _style(drawing: Drawing, variants: Sequence[str]) -> Style:
    shown_as = looks(variants)

    def each(choose: Callable[[Look], Any]) -> list[Any]:
        return [choose(shown_as[name]) for name in variants]

    # A variant with several names is shown with all of them.
    shown = [drawing.labels[name] for name in variants if name in drawing.labels]
    domain = [drawing.labels.get(name, name) for name in variants]
    # Crosses are drawn between the legend and the plot.
    offset = 18 + CROSS_HEIGHT * len(drawing.missing)
    legend = alt.Legend(title=None, orient="top", values=shown, symbolStrokeWidth=0, symbolOpacity=1, offset=offset)
    if not drawing.points:
        legend = alt.Legend(title=None, orient="top", values=shown, offset=offset, symbolType="stroke", symbolSize=300)
    if not drawing.has_legend:
        legend = None
    # A page in dark colours replaces these by its own (page.js).
    return Style(
        picked=alt.selection_point(
            name=PICKED, fields=["variant"], bind="legend" if drawing.has_legend else alt.Undefined
        ),
        color=alt.Color("variant:N", scale=alt.Scale(domain=domain, range=each(lambda it: it.colour)), legend=legend),
        shape=alt.Shape("variant:N", scale=alt.Scale(domain=domain, range=each(lambda it: it.shape)), legend=legend),
        dash=alt.StrokeDash("variant:N", scale=alt.Scale(domain=domain, range=each(lambda it: it.dash)), legend=legend),
    )


def _channel(axis: Axis, *, padding: int) -> dict[str, Any]:
    if axis.categories is not None:
        return {"sort": list(axis.categories), "axis": alt.Axis(title=axis.title, labelAngle=0)}
    shown: dict[str, Any] = {"title": axis.title}
    shown |= {"values": list(axis.ticks)} if axis.ticks is not None else {"tickCount": 5}
    shown |= {"labelExpr": SHORT} if axis.is_short else {"format": ",.12~g"} if axis.ticks is not None else {}
    scale: dict[str, Any] = {"type": "log"} if axis.is_logarithmic else {}
    if axis.domain is not None:
        is_share = axis.domain == (0, 1)
        scale |= {"domain": list(axis.domain), "nice": False, **({} if is_share else {"padding": padding})}
    scale |= {} if axis.is_logarithmic else {"zero": False}
    return {"scale": alt.Scale(**scale), "axis": alt.Axis(**shown)}
