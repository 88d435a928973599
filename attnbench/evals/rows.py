"""What the rows of several evaluations share: axes that double, options that count, and rows without a number."""

from collections.abc import Iterator
from typing import Any

from attnbench.errors import UserError
from attnbench.results import Measurement


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to `last`."""
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths


def without_numbers(units: dict[str, str], settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    """One row for each metric, with the status that says why it has no number."""
    for metric, unit in units.items():
        yield Measurement(metric=metric, value=None, unit=unit, settings=settings, status=status, reason=reason)


def check_counts(group: str, **counts: Any) -> None:
    """Raises UserError for the first value that is no positive whole number, or no list of them."""
    for name, value in counts.items():
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item > 0 for item in items):
            what = "positive whole numbers" if isinstance(value, list) else "a positive whole number"
            raise UserError(f"{group}.{name}={value}: must be {what}")
