"""Charts in Vega-Lite, as plain dictionaries; tests/report validate them.

Colours come from the chart's configuration, so that a page can draw a specification light or dark. User text enters as
data and never as part of an expression.
"""

from collections.abc import Callable, Sequence
from typing import Any

from attnbench.report.charts.looks import looks
from attnbench.report.charts.marks import Axis, Datum, Drawing
from attnbench.settings.escape import printable

VEGA_LITE = "6.4"
"""Version of Vega-Lite that draws the charts."""

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


Part = dict[str, Any]
"""Part of a specification."""


def draw(drawing: Drawing, variants: Sequence[str]) -> Part:
    """Return the marks as Vega-Lite; `variants` are the whole report's, so that each has one style in all charts."""
    styled = _styles(drawing, variants)
    x = _along(drawing.x, "x", padding=18)
    at = {"x": x, "y": _along(drawing.y, "value", padding=6)}
    marks = {**at, "color": styled("colour")}
    shaped = {**marks, "shape": styled("shape")}
    tooltip = {"tooltip": [_field(field, title=title) for field, title in drawing.words.items()]}
    ends = {"y": _along(drawing.y, "low", padding=6), "y2": {"field": "high"}}
    names = {"align": {"expr": "datum.align"}, "dx": {"expr": "datum.dx"}, "dy": {"expr": "datum.dy"}}
    dashed = {"strokeDash": styled("dash"), "detail": _field("line")}
    width, opacity = (1.2, 0.75) if drawing.is_thin else (2, 1.0)
    layers = [
        _layer("levels", at, type="line", style="chance"),
        _layer("trained", {"x": x}, type="rule", style="chance"),
        _layer("best", at, type="line", style="chance", interpolate="step-after"),
        _layer("points", marks | ends | _faded(0.55), type="rule", strokeWidth=1.5, clip=True),
        _layer("lines", marks | dashed | _faded(opacity), type="line", strokeWidth=width, clip=True),
        _layer("dots", marks | _faded(0.6), type="point", filled=True, size=22, clip=True),
        _layer("rings", marks | _faded(1.0), type="point", size=190, strokeWidth=1.8),
        _layer("names", {**at, "text": _field("name")}, type="text", fontSize=12, **names),
        _layer("points", shaped | _faded(1.0) | tooltip, type="point", filled=True, size=64, opacity=1),
    ]
    kinds = ("levels", "trained", "best", "names", "lines", "dots", "rings", "points")
    data = {name: list(getattr(drawing, name)) for name in kinds}
    kept = [layer for layer in layers if data[layer["data"]["name"]]]
    # The top layer takes clicks on the legend; crosses follow, for points without a number.
    top = max(len(kept) - 1, 0)
    crosses = {f"missing {index}": list(values) for index, values in enumerate(drawing.missing.values())}
    for index, name in enumerate(crosses):
        # Above the plot, one line per variant, so that crosses do not hide each other.
        height = {"value": -8 - CROSS_HEIGHT * index}
        encoding = {"x": x, "y": height, "color": styled("colour"), **tooltip}
        kept.append(_layer(name, encoding, type="point", shape=CROSS, size=36, strokeWidth=2.2, opacity=1))
    kept[top]["name"] = "top"
    picked: Part = {"name": PICKED, "select": {"type": "point", "fields": ["variant"]}, "views": ["top"]}
    picked |= {"bind": "legend"} if drawing.has_legend else {}
    spec = _specification(kept, data | crosses, height=264, description=drawing.description)
    return {**spec, "params": [picked]}


def draw_bars(values: Sequence[Datum], parts: Sequence[str], shown: Sequence[str], description: str) -> Part:
    """`values` have `order`, `share` and the part as `x`."""
    names = {"title": None, "labelFontSize": 13, "labelLimit": 180, "domain": False, "ticks": False}
    percent = {"title": None, "format": "%", "tickCount": 5}
    legend = {"title": None, "orient": "top", "symbolType": "square", "offset": 10}
    x = _field("value", "quantitative", stack="zero")
    both = {"y": _field("variant", scale={"domain": list(shown)}, axis=names), "order": _field("order", "ordinal")}
    bars = both | {
        "x": x | {"scale": {"domain": [0, 1]}, "axis": percent},
        "color": _field("x", scale={"domain": list(parts), "range": "ordinal"}, legend=legend),
        "tooltip": [_field(field, title=title) for field, title in BAR_TOOLTIP.items()],
    }
    fitting = {"condition": _field("share", test=f"datum.value * width >= {NUMBER_WIDTH}"), "value": ""}
    numbers = both | {"x": x | {"bandPosition": 0.5}, "text": fitting, "detail": _field("x")}
    layers = [_layer("parts", bars, type="bar", height=24), _layer("parts", numbers, type="text", style="part-label")]
    return _specification(layers, {"parts": list(values)}, height=44 * len(shown) + 16, description=description)


def draw_bounds(
    values: Sequence[Datum],
    description: str,
    *,
    gap: int = 28,
    level: float | None = None,
    variants: Sequence[str] = (),
    title: str | None = None,
) -> Part:
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
    # Reserve the label's width: a browser's font may be wider than the one used for the layout.
    extent = min(limit, CHARACTER_WIDTH * max(map(len, lines)))
    names = {"title": None, "domain": False, "ticks": False, "minExtent": extent, "labelFontSize": 13}
    names |= {"labelLimit": limit, "labelExpr": f"split(datum.label, '{LINE_END}')"}
    y, number = {"y": _field("variant", sort=order, axis=names)}, {"title": title, "tickCount": 5}
    known, names_of = looks(variants), {label: label.partition(" = ")[0] for label in order}
    colours = {label: known[name].colour for label, name in names_of.items() if name in known}
    scale = {"domain": list(colours), "range": list(colours.values())}
    color = {"color": _field("variant", scale=scale, legend=None)} if {*order} <= {*colours} else {}
    tooltip = [_field("variant", title="figure"), _field("text", title="with its bounds")]

    def x(field: str, **channel: Any) -> Part:
        return {"x": _field(field, "quantitative", axis=number, **channel)}

    intervals = y | x("low", scale={"zero": False, "padding": 8}) | {"x2": {"field": "high"}} | color
    values_at = y | {"x": _field("value", "quantitative"), "tooltip": tooltip} | color
    size = min(26, 14 + gap)
    layers = [
        _layer("levels", x("level"), type="rule", style="chance"),
        _layer("figures", intervals, type="rule", strokeWidth=2),
        _layer("dots", y | x("dot") | color, type="point", filled=True, size=44, opacity=0.55),
        _layer("figures", values_at, type="point", filled=True, size=80, opacity=1),
        _layer("limits", y | x("limit"), type="tick", thickness=3, size=size, color="#D55E00"),
    ]
    data = {
        "levels": [{"level": level}] if level is not None else [],
        "figures": [value for value in values if "value" in value],
        "dots": [value for value in values if "dot" in value],
        "limits": [value for value in values if "limit" in value],
    }
    kept = [layer for layer in layers if data[layer["data"]["name"]]]
    num_lines = max(variant.count(LINE_END) + 1 for variant in order)
    return _specification(kept, data, height=(gap + 16 * num_lines) * len(order) + 16, description=description)


def _specification(layers: Sequence[Part], data: dict[str, list[Datum]], *, height: int, description: str) -> Part:
    given = {name: values for name, values in data.items() if values}
    shape = {"width": "container", "height": height, "description": description}
    return with_printable_text({"layer": layers, **shape, "datasets": given})


def _layer(data: str, encoding: Part, **mark: Any) -> Part:
    return {"data": {"name": data}, "mark": mark, "encoding": encoding}


def _field(name: str, kind: str = "nominal", **channel: Any) -> Part:
    return {"field": name, "type": kind, **channel}


def _faded(opacity: float) -> Part:
    """Opacity of variants while no other is picked in the legend."""
    return {"opacity": {"condition": {"param": PICKED, "value": opacity}, "value": opacity / 10}}


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


def _styles(drawing: Drawing, variants: Sequence[str]) -> Callable[[str], Part]:
    shown_as = looks(variants)
    # A variant with several names is shown with all of them.
    shown = [drawing.labels[name] for name in variants if name in drawing.labels]
    domain = [drawing.labels.get(name, name) for name in variants]
    # Crosses are drawn between the legend and the plot.
    legend = {"title": None, "orient": "top", "values": shown, "offset": 18 + CROSS_HEIGHT * len(drawing.missing)}
    points, lines = {"symbolStrokeWidth": 0, "symbolOpacity": 1}, {"symbolType": "stroke", "symbolSize": 300}
    legend |= points if drawing.points else lines

    # A page in dark colours replaces these by its own (page.js).
    def styled(name: str) -> Part:
        scale = {"domain": domain, "range": [getattr(shown_as[variant], name) for variant in variants]}
        return _field("variant", scale=scale, legend=legend if drawing.has_legend else None)

    return styled


def _along(axis: Axis, field: str, *, padding: int) -> Part:
    if axis.categories is not None:
        return _field(field, sort=list(axis.categories), axis={"title": axis.title, "labelAngle": 0})
    shown: Part = {"title": axis.title}
    shown |= {"values": list(axis.ticks)} if axis.ticks is not None else {"tickCount": 5}
    shown |= {"labelExpr": SHORT} if axis.is_short else {"format": ",.12~g"} if axis.ticks is not None else {}
    scale: Part = {"type": "log"} if axis.is_logarithmic else {}
    if axis.domain is not None:
        is_share = axis.domain == (0, 1)
        scale |= {"domain": list(axis.domain), "nice": False, **({} if is_share else {"padding": padding})}
    scale |= {} if axis.is_logarithmic else {"zero": False}
    return _field(field, "quantitative", scale=scale, axis=shown)
