"""Colours and fonts of all charts, the page's script that draws them, and pictures drawn without a browser."""

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attnbench.report.blocks import Picture
from attnbench.report.charts.vega import VEGA_LITE, with_printable_text
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.paths import user_cache

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STATIC_WIDTH = 640
LEGEND_LIMIT = 150
PUBLISHED_NAME = "window.vegaEmbed = vegaEmbed;"

PARTS = ("#56B4E9", "#E69F00", "#1BBF92", "#DB93BA", "#F0E442", "#EE7A33", "#B8B6AE", "#E3E1DA")
"""Colours of the parts of a whole, in order; light enough for dark text on any page."""

PARTS_ON_DARK = (*PARTS[:-1], "#80838A")
"""Colours of these parts on a dark page; the last, an unfilled rest, is closer to the background."""


def config(*, dark: bool) -> dict[str, Any]:
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
            "part-label": {"fontSize": 12, "color": "#16181b"},
        },
    }


def to_svg(picture: Picture, variants: Sequence[str]) -> str:
    static, on_white = alone(picture, variants)
    return _draw("vegalite_to_svg", vl_spec=static, vl_version=VEGA_LITE, config=on_white).decode()


def alone(picture: Picture, variants: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a picture outside of a page: the specification with a title and a width, and a light configuration."""
    below = [line for line in (picture.legend, picture.missing) if line]
    title = {"text": picture.title, "subtitle": below, "anchor": "start", "offset": 16}
    static = {**picture.spec, "width": STATIC_WIDTH, "title": with_printable_text(title)}
    light, longest = config(dark=False), max((8 * len(name) for name in variants), default=LEGEND_LIMIT)
    legend = {**light["legend"], "columns": max(1, STATIC_WIDTH // (longest + 40)), "labelLimit": 0}
    return static, {**light, "legend": legend, "background": "white", "padding": 16}


def digest(picture: Picture, variants: Sequence[str]) -> str:
    return sha256(json.dumps([alone(picture, variants), VEGA_LITE, vl_convert_version()]).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def vl_convert_version() -> str:
    return version("vl-convert-python")


def to_png(svg: str) -> bytes:
    return _draw("svg_to_png", svg=svg, scale=2)


@lru_cache(maxsize=1)
def runtime() -> str:
    """Return the page's script, which the chart engine makes in seconds, once for all pages of a user."""
    made_from = json.dumps([PUBLISHED_NAME, VEGA_LITE, vl_convert_version()])
    name = f"charts-{sha256(made_from.encode()).hexdigest()[:16]}.js"
    with suppress(OSError, UserError):
        return (user_cache() / name).read_text(encoding="utf-8")
    bundle = _draw("javascript_bundle", snippet=PUBLISHED_NAME, vl_version=VEGA_LITE).decode()
    # Unused addresses of an editor and a schema; without them a page visibly contains none.
    script = bundle.replace("https://vega.github.io/", "/").replace("https://github.com/", "/")
    # A page is written also where nothing can be kept.
    with suppress(OSError, UserError):
        user_cache().mkdir(parents=True, exist_ok=True)
        replace_file(user_cache() / name, script)
    return script


def _draw(name: str, **arguments: Any) -> bytes:
    """Raise ValueError if vl-convert refuses its arguments."""
    drawn = json.loads(_answer(json.dumps([name, arguments])))
    if "error" in drawn:
        raise ValueError(drawn["error"])
    return drawn["text"].encode() if "text" in drawn else base64.b64decode(drawn["base64"])


def _answer(line: str) -> str:
    engine = _engine()
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        engine.stdin.write(f"{line}\n")
        engine.stdin.flush()
        answer = engine.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        _engine.cache_clear()
        raise UserError(
            f"the chart engine vl-convert ended with code {engine.wait()}, probably out of memory: raise the limit "
            "(ulimit -v); attnbench report then writes the report again"
        )
    return answer


@lru_cache(maxsize=1)
def _engine() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("engine.py"))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    )
