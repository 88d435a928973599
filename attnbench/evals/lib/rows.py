"""What the rows of several evaluations share: axes that double, and rows without a number."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attnbench.evals.base import Evaluation
from attnbench.machine.timing import OutOfMemory, attempt
from attnbench.results.rows import Measurement


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


def until_out_of_memory(
    measured: Iterator[Measurement], instead: Callable[[str], Iterable[Measurement]]
) -> Iterator[Measurement]:
    """What was measured. Where memory runs out, what `instead` makes of the reason follows, but for rows that are
    there already: what an evaluation does not tell itself is told so, and what it had found is kept."""
    found: set[str] = set()
    while True:
        # The next row alone: an evaluation that was interrupted gives no other.
        row = attempt(lambda: next(measured, None))
        if row is None:
            return
        if isinstance(row, OutOfMemory):
            yield from (own for own in instead(row.reason) if _place(own) not in found)
            return
        found.add(_place(row))
        yield row


def first_metric_without_number(evaluation: Evaluation, name: str, reason: str) -> Iterator[Measurement]:
    """One row in place of all that an evaluation, called `name`, has not measured for want of memory."""
    metric = evaluation.plots[0][0] if evaluation.plots else name
    yield Measurement(metric=metric, value=None, unit="", status="out_of_memory", reason=reason)


def _place(row: Measurement) -> str:
    return f"{row.metric} {sorted(row.settings.items())}"
