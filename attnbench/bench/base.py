"""The interface of an operator table, and rows of several tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from attnbench.bench.operators.gate import GateError
from attnbench.bench.operators.roofline import Ceilings
from attnbench.bench.tables import Layout, Values
from attnbench.evals.base import Evaluation
from attnbench.evals.lib.rows import time_row, without_numbers
from attnbench.evals.lib.step_cost import Timed
from attnbench.machine.precision import dtype_of, multiplying
from attnbench.machine.timing import OutOfMemory, Times, attempt
from attnbench.results.rows import DEVICE, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings

MILLISECONDS = "_milliseconds"
"""End of the metric of a pass's time."""

ROOFLINE, SPEEDUP, MAX_ERROR = "roofline_fraction", "speedup", "max_error"

NO_KERNEL = "No available kernel"
"""Words of SDPA when its one allowed kernel does not take a shape."""

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class Conditions:
    """Device, precision and folder of a bench, and the mixers that it may build."""

    device: torch.device
    precision: str
    ceilings: Ceilings
    """Highest rates of this device in this precision, measured in the same run."""
    mixers: Callable[[Sequence[str]], list[MixerSettings]]
    """Returns mixers by the names of their yamls, whether or not they can run here."""
    folder: Path | None = None
    """Folder of the run, for traces; None: they are not kept."""

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.precision)


class Bench(Timed, Evaluation, ABC):
    """An evaluation whose subject is an operator: cells, and tables of their rows."""

    layouts: ClassVar[tuple[Layout, ...]]
    """Tables of its rows; the first metric of the first one is its headline."""

    numbers_version: ClassVar[int] = 0
    """Raised if its numbers change on purpose, so that former rows are measured again; 0 is in no identity."""

    notes: ClassVar[tuple[str, ...]] = ()
    """Paragraphs under the tables."""

    not_logged: ClassVar[tuple[str, ...]] = (ROOFLINE, SPEEDUP)
    """Metrics that are not in the log of a run."""

    ratios: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(numerator, denominator) pairs of implementations; each cell has rows of their times' ratios, pass by pass."""

    @property
    def mixer_names(self) -> Sequence[str]:
        """Yamls of attn/ that it needs."""
        return ()

    @classmethod
    def layouts_of(cls, rows: Sequence[ResultRow]) -> Sequence[Layout]:
        """Return the tables of these rows; a bench may make them from the rows."""
        return cls.layouts

    @classmethod
    def files(cls, rows: Sequence[ResultRow]) -> dict[str, str]:
        """Return contents of further files beside results.csv, by file name."""
        return {}

    @abstractmethod
    def cells(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each cell."""

    @abstractmethod
    def measure(self, cell: dict[str, Any], conditions: Conditions) -> Iterator[Measurement]:
        """Yield each number as soon as it is known, those of one implementation together.

        Settings are those of the cell, `implementation`, and whatever tells rows apart. An implementation that cannot
        run is a row, and the next one starts clean.
        """


class Missing(NamedTuple):
    status: str
    reason: str


def attempted(measure: Callable[[], Value]) -> Value | Missing:
    """Return the result of `measure`, or the reason for none: a wrong result, no memory, a refusal, or any exception of
    a kernel or its compiler."""
    try:
        result = attempt(measure)
    except UserError as refusal:
        return Missing("unsupported", str(refusal))
    except GateError as error:
        return Missing("failed", str(error))
    except Exception as error:
        if "CUDA error" in str(error):
            # The device accepts no more work from this process.
            raise
        line = (str(error).strip().splitlines() or [""])[0]
        return Missing("unsupported" if NO_KERNEL in line else "failed", f"{type(error).__name__}: {line}")
    return Missing("out_of_memory", result.reason) if isinstance(result, OutOfMemory) else result


def rows_or_reason(
    units: dict[str, str], settings: dict[str, Any], measure: Callable[[], Iterable[Measurement]]
) -> Iterator[Measurement]:
    """Yield the rows of one implementation, or one without a number for each metric of `units`."""
    rows = attempted(lambda: list(measure()))
    yield from without_numbers(units, settings, *rows) if isinstance(rows, Missing) else rows


def by_implementation(
    names: Iterable[str],
    units: dict[str, str],
    cell: dict[str, Any],
    conditions: Conditions,
    make: Callable[[], Value],
    measure: Callable[[str, Value, dict[str, Any]], Iterable[Measurement]],
    label: Callable[[str], str] = str,
) -> Iterator[Measurement]:
    """Yield the rows of each implementation on the example of `make`: inputs, and their outputs in float64."""
    with multiplying(conditions.precision):
        example = attempt(make)
        for name in names:
            settings = cell | {"implementation": label(name)}
            if isinstance(example, OutOfMemory):
                yield from without_numbers(units, settings, "out_of_memory", f"the reference: {example.reason}")
            else:
                yield from rows_or_reason(units, settings, partial(measure, name, example, settings))


def time_rows(name: str, times: Times, settings: dict[str, Any], floor_ms: float) -> Iterator[Measurement]:
    """Yield the row `<name>_milliseconds` of a pass and its `roofline_fraction`, `floor_ms` over its time."""
    yield time_row(times, settings, f"{name}{MILLISECONDS}")
    yield Measurement(
        metric=ROOFLINE,
        value=floor_ms / times.median_ms,
        unit="",
        settings=settings | {"pass": name},
        num_samples=times.num_repeats,
    )


def error_row(error: float, settings: dict[str, Any]) -> Measurement:
    return Measurement(metric=MAX_ERROR, value=error, unit="", settings=settings)


def with_speedups(measurements: Iterable[Measurement], ratios: Iterable[tuple[str, str]]) -> Iterator[Measurement]:
    """Yield the rows of a cell, then the ratio of times of each (numerator, denominator), pass by pass."""
    times: dict[tuple[str, str], Measurement] = {}
    for measurement in measurements:
        if measurement.metric.endswith(MILLISECONDS) and measurement.value is not None:
            times[measurement.metric, measurement.settings.get("implementation", DEVICE)] = measurement
        yield measurement
    for metric, (numerator, denominator) in product(dict.fromkeys(metric for metric, _ in times), ratios):
        slow, fast = times.get((metric, numerator)), times.get((metric, denominator))
        if slow is not None and fast is not None and slow.value and fast.value:
            of = {"pass": metric.removesuffix(MILLISECONDS), "numerator": numerator, "denominator": denominator}
            yield Measurement(metric=SPEEDUP, value=slow.value / fast.value, unit="", settings=fast.settings | of)


def speedup_columns(ratios: Iterable[tuple[str, str]], name: str) -> tuple[Values, ...]:
    return tuple(
        Values(
            metric=SPEEDUP,
            header=f"{numerator} / {denominator}",
            where={"pass": name, "numerator": numerator, "denominator": denominator},
        )
        for numerator, denominator in ratios
    )
