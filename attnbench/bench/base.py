"""The interface of an operator table, and the rows that several of them have."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from attnbench.bench.operators.gate import GateError
from attnbench.bench.operators.roofline import Ceilings
from attnbench.bench.tables import Layout, Values
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.evals.lib.step_cost import Repetition
from attnbench.machine.precision import dtype_of
from attnbench.machine.timing import UNKNOWN_PEAK, OutOfMemory, Times, attempt
from attnbench.results.rows import Measurement, ResultRow
from attnbench.results.tables import Headline
from attnbench.settings.check import check_counts, check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings

MILLISECONDS = "_milliseconds"
"""End of the names of times, behind the name of the pass."""

ROOFLINE, SPEEDUP, MAX_ERROR = "roofline_fraction", "speedup", "max_error"

NO_KERNEL = "No available kernel"
"""Words of SDPA, after warnings that name the reason, where the kernel that it is held to does not take a shape."""

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class Conditions:
    """The device and the precision of a run, and the mixers that it may build."""

    device: torch.device
    precision: str
    ceilings: Ceilings
    """Ceilings of this device in this precision, measured in the same run."""
    mixers: Callable[[Sequence[str]], list[MixerSettings]]
    """Mixers by the names of their yamls of conf/attn, whether or not they can run here."""
    folder: Path | None = None
    """Folder of the run, for what is no row; None: that is not kept."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of inputs and outputs."""
        return dtype_of(self.precision)


class Bench(ABC):
    """One operator table. The constructor's signature is the schema of the yaml: keyword-only, typed, no **kwargs."""

    layouts: ClassVar[tuple[Layout, ...]]
    """Tables of its rows; the first metric of the first one is its headline."""

    numbers_version: ClassVar[int] = 0
    """Raised where its numbers change on purpose, so that rows of before are measured again; 0 is in no identity."""

    notes: ClassVar[tuple[str, ...]] = ()
    """Paragraphs under the tables: all that a reader must know."""

    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(metric, axis in settings) pairs that a report draws; none: every metric along its axis of most numbers."""

    headline: ClassVar[tuple[Headline, ...]] = ()
    """Columns of a summary; none: one of the first metric."""

    smoke: ClassVar[dict[str, Any]] = {}
    """Settings that finish on a CPU in a second."""

    not_logged: ClassVar[tuple[str, ...]] = (ROOFLINE, SPEEDUP)
    """Metrics that stand in the tables alone, and not in the log of a run."""

    ratios: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(numerator, denominator) pairs of implementations whose times are compared."""

    @property
    def mixer_names(self) -> Sequence[str]:
        """Yamls of attn/ that it takes, so that one that is not there is an error before anything is measured."""
        return ()

    @classmethod
    def layouts_of(cls, rows: Sequence[ResultRow]) -> Sequence[Layout]:
        """The tables of these rows, where they depend on the rows."""
        return cls.layouts

    @classmethod
    def files(cls, rows: Sequence[ResultRow]) -> dict[str, str]:
        """Contents of further files beside results.csv, by file name."""
        return {}

    @abstractmethod
    def cells(self) -> Iterator[dict[str, Any]]:
        """The settings of each cell, different for each; a cell is measured as a whole, and not again once it is."""

    @abstractmethod
    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        """Each number as soon as it is known, those of one implementation together.

        Their settings are those of the cell, `implementation`, and what else tells them apart. What does not fit or
        cannot run is a row, and the next implementation starts clean.
        """


@dataclass(kw_only=True)
class TimedBench(Bench):
    """A bench whose settings are its fields: numbers and lists of numbers are counts, and calls are repeated.

    Args:
        warmup, repeats: calls before those that count, and those that count, at most.
        max_seconds: for the repeats of one call: fewer where they would take longer, at least three.

    Raises:
        UserError: a count or a length of time that is none.
    """

    warmup: int
    repeats: int
    max_seconds: float

    def __post_init__(self) -> None:
        counts = [entry.name for entry in fields(self) if entry.type in (int, list[int])]
        check_counts("bench", **{name: getattr(self, name) for name in counts})
        check_value("bench.max_seconds", self.max_seconds, above=0)

    @property
    def repetition(self) -> Repetition:
        """Number of calls."""
        return Repetition(warmup=self.warmup, repeats=self.repeats, max_seconds=self.max_seconds)


class Missing(NamedTuple):
    """The reason why there is no number."""

    status: str
    reason: str


def attempted(measure: Callable[[], Value]) -> Value | Missing:
    """Return the result of `measure`, or the reason for none: it is wrong, does not fit, was refused or raised.

    As in the doctor: whatever a kernel or its compiler raises is reported, and the others still have their turn.
    """
    try:
        result = attempt(measure)
    except UserError as refusal:
        return Missing("unsupported", str(refusal))
    except GateError as error:
        return Missing("failed", str(error))
    except Exception as error:
        if "CUDA error" in str(error):
            # The device takes no more work from this process.
            raise
        line = (str(error).strip().splitlines() or [""])[0]
        return Missing("unsupported" if NO_KERNEL in line else "failed", f"{type(error).__name__}: {line}")
    return Missing("out_of_memory", result.reason) if isinstance(result, OutOfMemory) else result


def rows_or_reason(
    units: dict[str, str], settings: dict[str, Any], measure: Callable[[], Iterable[Measurement]]
) -> Iterator[Measurement]:
    """The rows of one implementation, or one without a number for each metric of `units`, see `attempted`."""
    rows = attempted(lambda: list(measure()))
    yield from without_numbers(units, settings, *rows) if isinstance(rows, Missing) else rows


def time_rows(name: str, times: Times, settings: dict[str, Any], floor_ms: float) -> Iterator[Measurement]:
    """The row `<name>_milliseconds` and its `roofline_fraction`.

    Args:
        name: of the pass that was timed.
        floor_ms: the time at the ceilings of the device.
    """
    yield time_row(times, settings, f"{name}{MILLISECONDS}")
    yield Measurement(
        metric=ROOFLINE,
        value=floor_ms / times.median_ms,
        unit="",
        settings=settings | {"pass": name},
        num_samples=times.num_repeats,
    )


def error_row(error: float, settings: dict[str, Any]) -> Measurement:
    """The row `max_error`: the largest relative error of output and gradients."""
    return Measurement(metric=MAX_ERROR, value=error, unit="", settings=settings)


def peak_row(metric: str, peak_mib: float | None, settings: dict[str, Any]) -> Measurement:
    """A peak of memory; without a number where the system does not give one."""
    status, reason = ("ok", "") if peak_mib is not None else ("unsupported", UNKNOWN_PEAK)
    return Measurement(metric=metric, value=peak_mib, unit="MiB", settings=settings, status=status, reason=reason)


def with_speedups(measurements: Iterable[Measurement], ratios: Iterable[tuple[str, str]]) -> Iterator[Measurement]:
    """The rows of a cell, and then how many times as fast the denominator of each ratio is as its numerator, pass by
    pass, where both have a time."""
    times: dict[tuple[str, str], Measurement] = {}
    for measurement in measurements:
        if measurement.metric.endswith(MILLISECONDS) and measurement.value is not None:
            times[measurement.metric, measurement.settings["implementation"]] = measurement
        yield measurement
    for metric, (numerator, denominator) in product(dict.fromkeys(metric for metric, _ in times), ratios):
        slow, fast = times.get((metric, numerator)), times.get((metric, denominator))
        if slow is not None and fast is not None and slow.value and fast.value:
            of = {"pass": metric.removesuffix(MILLISECONDS), "numerator": numerator, "denominator": denominator}
            yield Measurement(metric=SPEEDUP, value=slow.value / fast.value, unit="", settings=fast.settings | of)


def speedup_columns(ratios: Iterable[tuple[str, str]], name: str) -> tuple[Values, ...]:
    """A column for each ratio of a pass."""
    return tuple(
        Values(
            metric=SPEEDUP,
            header=f"{numerator} / {denominator}",
            where={"pass": name, "numerator": numerator, "denominator": denominator},
        )
        for numerator, denominator in ratios
    )


def check_implementations(names: object, known: Collection[str], *, may_be_empty: bool = False) -> None:
    """Check a list of implementations.

    Raises:
        UserError: it is no list, or empty, or names one twice, or one that there is not.
    """
    if not isinstance(names, list) or not (names or may_be_empty):
        raise UserError(f"bench.implementations={names}: must be a list of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"bench.implementations: {name} is none of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UserError(f"bench.implementations={names}: names one of them twice")
