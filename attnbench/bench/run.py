"""Runs of attnbench bench: cells one after another, each in its own results file.

outputs/benchmark/<bench>/<precision>-<hash>/ config.yaml environment.json train.log results/
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attnbench.bench.base import MILLISECONDS, Bench, Conditions, with_speedups
from attnbench.bench.operators.roofline import Ceilings
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import machine
from attnbench.machine.precision import resolve_precision
from attnbench.machine.timing import copy_ceiling, matrix_product_ceiling
from attnbench.results.folder import ROOT
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.job import Job, run_jobs
from attnbench.results.numbers import format_number
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.rows import DEVICE, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable
from attnbench.settings.registry import build, class_named, is_own, resolve
from attnbench.settings.schema import BenchSettings, MixerSettings

log = logging.getLogger(__name__)

EXPERIMENT = "benchmark"
CEILINGS = {"matrix_product_tflops": "TFLOP/s", "copy_gigabytes_per_second": "GB/s"}
"""Units of the rows of `Ceilings`, in the order of its fields."""

ComposeMixers = Callable[[Sequence[str] | None], list[MixerSettings]]


def run_bench(settings: BenchSettings, compose_mixers: ComposeMixers) -> Path:
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.precision, device.type, setting="precision")
    bench = build(settings.target, settings.options, Bench, group="bench")
    if next(bench.cells(), None) is None:
        empty = ", ".join(f"bench.{name}=[]" for name, value in settings.options.items() if value == [])
        raise UserError(f"{empty}: leaves bench={settings.name} nothing to measure")
    hashed = _hash(settings, precision, device, compose_mixers(bench.mixer_names))
    folder = Path(settings.outputs_dir) / EXPERIMENT / settings.name / f"{precision}-{hashed}"
    unknown = Ceilings(0.0, 0.0)
    conditions = Conditions(device=device, precision=precision, ceilings=unknown, mixers=compose_mixers, folder=folder)
    given = BenchRun(settings=settings, bench=bench, folder=folder, config_hash=hashed, conditions=conditions)
    run_jobs([CeilingsJob(given), *(CellJob(given, index, cell) for index, cell in enumerate(bench.cells()))])
    return folder


def results_file(folder: Path, bench: str, name: str) -> Path:
    return folder / "results" / f"{bench}-{name}.jsonl"


def cell_label(cell: dict[str, Any]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in cell.items())


def _hash(settings: BenchSettings, precision: str, device: torch.device, mixers: list[MixerSettings]) -> str:
    targets = [settings.target, *(class_named(mixer) for mixer in mixers)]
    code = code_of(targets, ["mixers", "model", "timing"])
    if version := resolve(settings.target, Bench).numbers_version:
        code["bench"] = version
    # A user's yaml may change like a class.
    code |= {mixer.name: mixer.options for mixer in mixers if not is_own(class_named(mixer))}
    return hash_with_code([settings.name, settings.target, settings.options, precision, machine(device, ROOT)], code)


@dataclass(slots=True, kw_only=True)
class BenchRun:
    settings: BenchSettings
    bench: Bench
    folder: Path
    config_hash: str
    conditions: Conditions
    """Without ceilings until these are measured."""
    stamp: dict[str, Any] | None = None
    """The environment, once the first job has begun."""


class BenchJob(Job):
    """A results file of a bench. Its rows are the device's; those of an implementation have its name."""

    experiment = EXPERIMENT

    def __init__(self, given: BenchRun, name: str, label: str) -> None:
        self.given, self.name, self.label = given, name, label
        self.evaluation, self.config_hash, self.folder = given.settings.name, given.config_hash, given.folder
        self.device, self.rerun = given.conditions.device, given.settings.rerun

    @property
    def results(self) -> Path:
        return results_file(self.folder, self.evaluation, self.name)

    def columns(self) -> dict[str, Any]:
        return {
            **{"run": f"{self.evaluation}/{self.folder.name}", "variant": DEVICE, "seed": 0},
            **dict.fromkeys(("mixer", "backend", "model"), ""),
            **dict.fromkeys(("parameters", "seq_len", "corpus")),
            "precision": self.given.conditions.precision,
        }

    def config(self) -> dict[str, Any]:
        settings = asdict(self.given.settings)
        del settings["rerun"]
        resolved = {"precision": self.given.conditions.precision, "device": str(self.device)}
        return {"bench": settings, "resolved": resolved}

    def begin(self) -> dict[str, Any]:
        if self.given.stamp is None:
            self.given.stamp = super().begin()
        return self.given.stamp

    def write(self, writer: ResultsWriter, measurement: Measurement) -> ResultRow:
        """Implementation and backend are columns, as in every other row."""
        settings = dict(measurement.settings)
        variant = settings.pop("implementation", DEVICE)
        columns = {"variant": variant, "backend": settings.pop("backend", "" if variant == DEVICE else variant)}
        return writer.write(replace(measurement, settings=settings), **columns)


class CeilingsJob(BenchJob):
    def __init__(self, given: BenchRun) -> None:
        super().__init__(given, "ceilings", "ceilings of the device")

    def rows(self) -> Iterator[Measurement]:
        tflops = matrix_product_ceiling(self.device, self.given.conditions.precision)
        ceilings = Ceilings(tflops, copy_ceiling(self.device))
        for (metric, unit), value in zip(CEILINGS.items(), ceilings, strict=True):
            yield Measurement(metric=metric, value=value, unit=unit)
        self._keep(ceilings)

    def announce(self, *, done: bool) -> None:
        if done:
            values = {row.measurement.metric: row.measurement.value for row in read_results(self.results)}
            self._keep(Ceilings(*(values[metric] or 0.0 for metric in CEILINGS)))

    def _keep(self, ceilings: Ceilings) -> None:
        conditions = self.given.conditions
        conditions.ceilings = ceilings
        most = f"{ceilings.tflops:.4g} TFLOP/s and {ceilings.gigabytes_per_second:.4g} GB/s"
        log.info(f"{conditions.precision}: at most {most} here")


class CellJob(BenchJob):
    """One cell, with a line of the log for each implementation once it has all its rows."""

    def __init__(self, given: BenchRun, index: int, cell: dict[str, Any]) -> None:
        super().__init__(given, f"{index:04}", cell_label(cell))
        self.cell = cell

    def rows(self) -> Iterator[Measurement]:
        bench = self.given.bench
        measured = with_speedups(bench.measure(self.cell, self.given.conditions), bench.ratios)
        for name, group in groupby(measured, key=lambda one: one.settings.get("implementation", DEVICE)):
            kept = []
            for measurement in group:
                kept.append(measurement)
                yield measurement
            self._log(name, kept)

    def announce(self, *, done: bool) -> None:
        log.info(self.label)
        for name, group in groupby(read_results(self.results) if done else (), key=lambda row: row.identity.variant):
            self._log(name, [row.measurement for row in group])

    def _log(self, name: str, measured: Sequence[Measurement]) -> None:
        shown = [measurement for measurement in measured if measurement.metric not in self.given.bench.not_logged]
        if parts := dict.fromkeys(map(_in_words, shown)):
            log.info(printable(f"  {name:14} {', '.join(parts)}"))


def _in_words(measurement: Measurement) -> str:
    if measurement.value is None:
        return f"{measurement.status.replace('_', ' ')}: {measurement.reason}"
    settings, name = measurement.settings, measurement.metric.removesuffix(MILLISECONDS).replace("_", " ")
    what = " ".join(filter(None, [settings.get("form"), settings.get("pass") or name]))
    return f"{what} {format_number(measurement.value)} {measurement.unit}".rstrip()
