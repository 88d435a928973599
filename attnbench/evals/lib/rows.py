"""Rows that several evaluations have: timed, of memory, or without a number."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attnbench.evals.base import Evaluation, Subject
from attnbench.machine.precision import dtype_of
from attnbench.machine.timing import UNKNOWN_PEAK, OutOfMemory, Times, attempt
from attnbench.mixers.base import state_bytes
from attnbench.model.language_model import LanguageModel
from attnbench.results.rows import Measurement

STATE = "state_bytes"


def doublings(first: int, last: int) -> list[int]:
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths


def without_number(metric: str, unit: str, settings: dict[str, Any], status: str, reason: str) -> Measurement:
    return Measurement(metric=metric, value=None, unit=unit, settings=settings, status=status, reason=reason)


def without_numbers(units: dict[str, str], settings: dict[str, Any], status: str, reason: str) -> Iterator[Measurement]:
    for metric, unit in units.items():
        yield without_number(metric, unit, settings, status, reason)


def lacks_state(model: LanguageModel) -> str | None:
    backend = model.backend_without_state
    return f"backend {backend} only trains: it takes no state" if backend else None


def state_rows(subject: Subject, lengths: Iterable[int], axis: str) -> Iterator[Measurement]:
    """Yield bytes of one sequence's state grown to each length (`axis`), caches in the compute dtype."""
    # On the meta device bytes are counted, not allocated.
    model, dtype = subject.new_model().to("meta"), dtype_of(subject.precision)
    reason = lacks_state(model)
    for length in lengths:
        settings = {axis: length, "batch_size": 1}
        if reason is not None:
            yield without_number(STATE, "B", settings, "unsupported", reason)
            continue
        num_bytes = sum(state_bytes(state) for state in model.init_state(1, length, dtype))
        yield Measurement(metric=STATE, value=num_bytes, unit="B", settings=settings)


def until_out_of_memory(
    measured: Iterator[Measurement], instead: Callable[[str], Iterable[Measurement]]
) -> Iterator[Measurement]:
    """Pass rows on until memory runs out; then yield the rows of `instead`."""
    measured_keys: set[str] = set()
    while True:
        row = attempt(lambda: next(measured, None))
        if row is None:
            return
        if isinstance(row, OutOfMemory):
            yield from (other for other in instead(row.reason) if _key(other) not in measured_keys)
            return
        measured_keys.add(_key(row))
        yield row


def time_row(times: Times, settings: dict[str, Any], metric: str = "step_milliseconds") -> Measurement:
    """The value is the median, from the 20th to the 80th percentile."""
    return Measurement(
        metric=metric,
        value=times.median_ms,
        unit="ms",
        settings=settings,
        low=times.low_ms,
        high=times.high_ms,
        num_samples=times.num_repeats,
    )


def speed_row(metric: str, num_tokens: int, times: Times, settings: dict[str, Any]) -> Measurement:
    return Measurement(
        metric=metric,
        value=num_tokens / times.median_ms * 1e3,
        unit="token/s",
        settings=settings,
        low=num_tokens / times.high_ms * 1e3,
        high=num_tokens / times.low_ms * 1e3,
        num_samples=times.num_repeats,
    )


def peak_row(metric: str, peak_mib: float | None, settings: dict[str, Any]) -> Measurement:
    status, reason = ("ok", "") if peak_mib is not None else ("unsupported", UNKNOWN_PEAK)
    return Measurement(metric=metric, value=peak_mib, unit="MiB", settings=settings, status=status, reason=reason)


def first_metric_without_number(evaluation: Evaluation, name: str, reason: str) -> Iterator[Measurement]:
    """Yield one row in place of all that did not fit into memory."""
    metric = evaluation.plots[0][0] if evaluation.plots else name
    yield without_number(metric, "", {}, "out_of_memory", reason)


def _key(row: Measurement) -> str:
    return f"{row.metric} {sorted(row.settings.items())}"
