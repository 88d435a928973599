"""The interface of an operator table: cells that are measured one after another, and the tables they make."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnbench.bench.roofline import Ceilings
from attnbench.machine.device import dtype_of
from attnbench.machine.timing import Times
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.schema import MixerSettings

MILLISECONDS = "_milliseconds"
"""How the names of times end, those of passes before it."""

ROOFLINE, SPEEDUP, MAX_ERROR = "roofline_fraction", "speedup", "max_error"


@dataclass(slots=True, kw_only=True)
class Subject:
    """Where a cell is measured, and in what."""

    device: torch.device
    precision: str
    ceilings: Ceilings
    """Of this device in this precision, measured in the same run."""
    mixers: Callable[[Sequence[str]], list[MixerSettings]]
    """Mixers by the names of their yamls of conf/attn, whether or not they can run here."""
    folder: Path | None = None
    """Of the run, for what is no row; None: that is not kept."""
    trusted: Collection[str] = ()
    """Classes outside attnbench that may be built, see registry.py."""

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return dtype_of(self.precision)


@dataclass(slots=True, kw_only=True, frozen=True)
class Values:
    """What stands in some columns of a table: the rows of one metric."""

    metric: str
    header: str = "{}"
    """Above a column; braces stand for whose it is."""
    where: dict[str, Any] = field(default_factory=dict)
    """Settings that a row must have."""
    only: tuple[str, ...] | None = None
    """Whose columns; None: everybody's."""
    is_share: bool = False
    """Shown in percent."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    """One table of a bench."""

    title: str
    lines: tuple[str, ...]
    """Settings that tell its lines apart."""
    values: tuple[Values, ...]
    columns: str = "implementation"
    """The setting that tells the columns of the same values apart; empty where there is one column of each."""
    headers: dict[str, str] = field(default_factory=dict)
    """What stands above `lines` where it is not the setting's name."""
    on_page_alone: bool = False
    """Left out on a terminal, for its length."""


class Bench(ABC):
    """The constructor's signature is the schema of the yaml: keyword-only, typed, no **kwargs."""

    title: ClassVar[str]
    """Of the page that is published."""

    layouts: ClassVar[tuple[Layout, ...]]

    notes: ClassVar[tuple[str, ...]] = ()
    """What a reader of the tables must know; a paragraph each."""

    plots: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(metric, axis in settings) pairs that a report draws; none: every metric along its axis of most numbers."""

    smoke: ClassVar[dict[str, Any]] = {}
    """Settings that finish on a CPU in a second."""

    unsaid: ClassVar[tuple[str, ...]] = (ROOFLINE, SPEEDUP)
    """Metrics that stand in the tables alone and are not told while it measures."""

    ratios: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(numerator, denominator) pairs of implementations whose times are held against each other."""

    @property
    def mixer_names(self) -> Sequence[str]:
        """Yamls of attn/ that it takes, so that one that is not there is an error before anything is measured."""
        return ()

    @classmethod
    def layouts_of(cls, rows: Sequence[ResultRow]) -> Sequence[Layout]:
        """The tables of these rows, where what they are depends on the rows."""
        return cls.layouts

    @classmethod
    def files(cls, rows: Sequence[ResultRow]) -> dict[str, str]:
        """What else is written beside results.csv, by file name."""
        return {}

    @abstractmethod
    def cells(self) -> Iterator[dict[str, Any]]:
        """The settings of each cell, different for each; a cell is measured as a whole, and not again once it is."""

    @abstractmethod
    def measure(self, cell: dict[str, Any], subject: Subject) -> Iterator[Measurement]:
        """Each number as soon as it is known, those of one implementation together.

        Their settings are those of the cell, `implementation`, and what else tells them apart. What does not fit or
        cannot run is a row, and the next implementation starts clean.
        """


def timed(name: str, times: Times, settings: dict[str, Any], floor_ms: float) -> Iterator[Measurement]:
    """The row `<name>_milliseconds`, from the 20th to the 80th percentile, and its `roofline_fraction`.

    Args:
        name: of the pass that was timed.
        floor_ms: what it would take at the ceilings of the device.
    """
    yield Measurement(
        metric=f"{name}{MILLISECONDS}",
        value=times.median_ms,
        unit="ms",
        settings=settings,
        low=times.low_ms,
        high=times.high_ms,
        num_samples=times.num_repeats,
    )
    yield Measurement(
        metric=ROOFLINE,
        value=floor_ms / times.median_ms,
        unit="",
        settings=settings | {"pass": name},
        num_samples=times.num_repeats,
    )


def error_row(error: float, settings: dict[str, Any]) -> Measurement:
    """The row `max_error`: the largest relative error that the gate has found, of output and gradients."""
    return Measurement(metric=MAX_ERROR, value=error, unit="", settings=settings)


def with_speedups(measurements: Iterable[Measurement], ratios: Iterable[tuple[str, str]]) -> Iterator[Measurement]:
    """The rows of a cell, and then how many times as fast the denominator of each ratio is as its numerator, pass by
    pass, where both have a time."""
    times: dict[tuple[str, str], Measurement] = {}
    for measurement in measurements:
        if measurement.metric.endswith(MILLISECONDS) and measurement.value is not None:
            times[measurement.metric, measurement.settings["implementation"]] = measurement
        yield measurement
    for metric, (numerator, denominator) in product(dict.fromkeys(metric for metric, _ in times), ratios):
        over, own = times.get((metric, numerator)), times.get((metric, denominator))
        if over is not None and own is not None and over.value and own.value:
            of = {"pass": metric.removesuffix(MILLISECONDS), "numerator": numerator, "denominator": denominator}
            yield Measurement(metric=SPEEDUP, value=over.value / own.value, unit="", settings=own.settings | of)


def speedup_columns(ratios: Iterable[tuple[str, str]], name: str) -> tuple[Values, ...]:
    """A column a ratio of a pass."""
    return tuple(
        Values(
            metric=SPEEDUP,
            header=f"{numerator} / {denominator}",
            where={"pass": name, "numerator": numerator, "denominator": denominator},
        )
        for numerator, denominator in ratios
    )
