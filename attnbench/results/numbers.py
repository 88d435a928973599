"""Numbers as text."""

import math

ROUNDING = 1e-9
"""Scores that differ by less are equal; one item of a test set is more."""


def reaches(value: float, level: float) -> bool:
    """Tell if `value` is at least `level`, up to rounding."""
    return value >= level - ROUNDING


def without_rounding(value: float) -> float:
    """Round a mean, so that rounding does not decide an order."""
    return round(value, 9)


LONG = 1e15
"""Numbers from this size on have a power of ten."""


def format_number(value: float) -> str:
    """Four significant digits; from 1,000 up a whole number with thousands separated, below LONG."""
    return f"{value:,.0f}" if 1000 <= abs(value) < LONG else f"{value:.4g}"


def format_within(value: float, low: float | None, high: float | None, sign: str = "") -> str:
    """Format with the digits that the interval supports, at most those of format_number.

    Half the interval's width keeps two significant digits if they are 10 to 35, otherwise one, as in the rounding rule
    of the Particle Data Group. `sign` is "+" to show the sign of positive numbers.
    """
    decimals = _num_decimals(low, high)
    if abs(value) >= LONG:
        return f"{value:{sign}.4g}"
    most = 4 - (math.ceil(math.log10(abs(value))) if value else 0)
    if decimals is None:
        return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"
    # A rounded zero has no sign of its own.
    decimals = min(decimals, max(most, 0))
    return f"{round(value, decimals) + 0.0:{sign},.{max(decimals, 0)}f}"


def _num_decimals(low: float | None, high: float | None) -> int | None:
    """Return the decimals that an interval supports, below 0 for tens and more; None where it has no width."""
    if low is None or high is None or not high > low:
        return None
    half = (high - low) / 2
    if half == math.inf:
        return None
    exponent = math.floor(math.log10(half))
    return (1 if half / 10**exponent < 3.55 else 0) - exponent


def format_interval(low: float | None, high: float | None, sign: str = "", *, is_of_difference: bool = False) -> str:
    """Format as `[low, high]` with the digits that its width supports; empty without an interval.

    Args:
        is_of_difference: an end that rounds to 0 keeps a digit, so that the verdict can be seen.
    """
    if low is None or high is None:
        return ""
    ends = [format_within(end, low, high, sign) for end in (low, high)]
    if is_of_difference:
        pairs = zip(ends, (low, high), strict=True)
        ends = [text if end == 0 or float(text.replace(",", "")) else f"{end:{sign}.1g}" for text, end in pairs]
    return f"[{', '.join(ends)}]"


def percent_of_nats(nats: float) -> float:
    try:
        return 100 * math.expm1(nats)
    except OverflowError:
        return math.inf
