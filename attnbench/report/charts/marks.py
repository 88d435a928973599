"""Charts as plain data: marks by their positions, and axes. vega.py turns them into Vega-Lite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOG_RATIO = 10
"""Numbers that span more than this are drawn on a logarithmic scale, where all are positive."""

WIDE_AXIS = 8
"""Ratio of an axis's ends from which it is logarithmic: three doublings."""

MANY = 10_000
"""From here on an axis writes its numbers short: 2.4M."""

Datum = dict[str, Any]
"""`variant`, `x`, `value`, and where there are any `low`, `high`, `line` (joins data to lines) and words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Scale of one direction."""

    title: str | None = None
    domain: tuple[float, float] | None = None
    """None: as wide as the numbers."""
    is_logarithmic: bool = False
    ticks: Sequence[float] | None = None
    is_short: bool = False
    """True where numbers are written as 2.4M."""
    categories: Sequence[str] | None = None
    """Values in order of an axis that has no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Marks on two axes; every variant has a colour, a shape and a dash of its own."""

    description: str
    labels: Mapping[str, str]
    """Name by which each variant is shown."""
    x: Axis
    y: Axis
    points: Sequence[Datum] = ()
    """With intervals."""
    lines: Sequence[Datum] = ()
    dots: Sequence[Datum] = ()
    """Small, one a seed."""
    rings: Sequence[Datum] = ()
    """Around what was chosen."""
    levels: Sequence[Datum] = ()
    """A dashed line under everything."""
    best: Sequence[Datum] = ()
    """Named beside their places, and joined by dashed steps, cheapest first; with `name`, and its side:
    `is_left`, and above where `is_low`."""
    missing: Mapping[str, Sequence[Datum]] = field(default_factory=dict)
    """Crosses above the plot, by label."""
    is_thin: bool = False
    """True where lines are many, one a seed."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Entries of the data that a tooltip shows, and their titles."""


def share_axis() -> Axis:
    """Return the axis of accuracies."""
    return Axis(domain=(0, 1))


def value_axis(means: Sequence[float], ends: Sequence[float] = (), title: str | None = None) -> Axis:
    """Return an axis close around the numbers, logarithmic where they span more than LOG_RATIO.

    Args:
        ends: of intervals: those of very few seeds may be far wider than all that is to be seen, and are cut at the
            plot's edges.
    """
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
    """Return the axis along a plot, with a tick at each of its numbers, which are in order."""
    is_wide = positions[0] > 0 and positions[-1] >= WIDE_AXIS * positions[0]
    return Axis(title=title, domain=(positions[0], positions[-1]), is_logarithmic=is_wide, ticks=positions)


def round_numbers(low: float, high: float) -> list[float]:
    """List 1, 2, 5, 10, ... between the ends; only the powers of ten where there are more than two of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
