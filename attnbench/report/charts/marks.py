"""Charts as plain data: marks and axes, which vega.py converts to Vega-Lite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOG_RATIO = 10
"""Positive numbers with a larger ratio have a logarithmic scale."""

WIDE_AXIS = 8
"""Ratio of an axis's ends from which it is logarithmic."""

MANY = 10_000
"""Numbers from here on are abbreviated: 2.4M."""

Datum = dict[str, Any]
"""`variant`, `x`, `value`, optionally `low`, `high` and `line` (data of one line), and texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    title: str | None = None
    domain: tuple[float, float] | None = None
    """None: the range of the numbers."""
    is_logarithmic: bool = False
    ticks: Sequence[float] | None = None
    is_short: bool = False
    categories: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    description: str
    labels: Mapping[str, str]
    x: Axis
    y: Axis
    points: Sequence[Datum] = ()
    lines: Sequence[Datum] = ()
    dots: Sequence[Datum] = ()
    """Small, one per seed."""
    rings: Sequence[Datum] = ()
    levels: Sequence[Datum] = ()
    """A dashed line below all other marks."""
    trained: Sequence[Datum] = ()
    """A dashed upright line at the longest trained length."""
    best: Sequence[Datum] = ()
    """Joined by dashed steps in order of cost."""
    names: Sequence[Datum] = ()
    """Names beside points, as `placed` has them."""
    has_legend: bool = True
    missing: Mapping[str, Sequence[Datum]] = field(default_factory=dict)
    """Crosses above the plot, by label."""
    is_thin: bool = False
    """True for many lines, one per seed."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Titles of the entries of data that a tooltip shows."""


NAME_HEIGHT, CHARACTER_WIDTH = 14, 6.6
NAMED_WIDTH, NAMED_HEIGHT = 300, 250
"""Size in pixels for which names are placed: that of a narrow page."""
PLACES = (("left", 9, 4), ("right", -9, 4), ("center", 0, -11), ("center", 0, 19), ("left", 7, -9), ("right", -7, -9),
          ("left", 7, 17), ("right", -7, 17))  # fmt: skip
"""Alignment and distance of a name from its point, in order of preference."""


def placed(points: Sequence[Datum], x: Axis, y: Axis) -> list[Datum]:
    """Place the `name` of each point where it hides no point and no other name, or leave it out."""
    centres = [(NAMED_WIDTH * _share(x, it["x"]), NAMED_HEIGHT * (1 - _share(y, it["value"]))) for it in points]
    taken = [(left - 6, top - 6, left + 6, top + 6) for left, top in centres]
    found = []
    for point, (left, top) in zip(points, centres, strict=True):
        width = CHARACTER_WIDTH * len(point["name"])
        for align, dx, dy in PLACES:
            begin = left + dx - {"left": 0.0, "center": width / 2, "right": width}[align]
            box = begin, top + dy - NAME_HEIGHT + 3, begin + width, top + dy + 3
            is_inside = box[0] >= -20 and box[2] <= NAMED_WIDTH + 24 and box[3] <= NAMED_HEIGHT + 6
            own = (left - 6, top - 6, left + 6, top + 6)
            if is_inside and not any(_overlap(box, other) for other in taken if other != own):
                taken.append(box)
                found.append({**point, "align": align, "dx": dx, "dy": dy})
                break
    return found


def _share(axis: Axis, value: float) -> float:
    assert axis.domain is not None
    low, high = axis.domain
    if axis.is_logarithmic:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low) if high > low else 0.5


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def value_axis(means: Sequence[float], ends: Sequence[float] = (), title: str | None = None) -> Axis:
    """Return an axis close to the means, logarithmic if they span more than LOG_RATIO; far interval ends are cut."""
    if not means:
        return Axis(title=title, domain=(0, 1))
    if max(means) > LOG_RATIO * min(means) > 0:
        domain = min(means) / 1.3, max(means) * 1.3
        return Axis(title=title, domain=domain, is_logarithmic=True, is_short=True, ticks=round_numbers(*domain))
    span = max(means) - min(means) or abs(means[0]) or 1.0
    low, high = min([*means, *ends]), max([*means, *ends])
    domain = max(low, min(means) - span), min(high, max(means) + span)
    return Axis(title=title, domain=domain, is_short=max(map(abs, means)) >= MANY)


def position_axis(positions: Sequence[float], title: str) -> Axis:
    is_wide = positions[0] > 0 and positions[-1] >= WIDE_AXIS * positions[0]
    return Axis(title=title, domain=(positions[0], positions[-1]), is_logarithmic=is_wide, ticks=positions)


def round_numbers(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... between the ends; only powers of ten if there are more than two of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
