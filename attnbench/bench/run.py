"""What benchmark.py does: a bench's cells, one after another, each in a results file of its own.

outputs/benchmark/<bench>/<precision>-<hash>/ config.yaml environment.json train.log results/
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attnbench.bench.base import MILLISECONDS, Bench, Conditions
from attnbench.bench.operators.roofline import Ceilings, measure_ceilings
from attnbench.evals.runners.system import UNHASHED
from attnbench.machine.device import environment, resolve_device, resolve_precision
from attnbench.machine.locks import device_lock
from attnbench.results.folder import ROOT, recording, stamp_environment, write_config
from attnbench.results.identity import code_of, hash_with_code
from attnbench.results.rows import DEVICE, Identity, Measurement, ResultRow, ResultsWriter, is_complete, read_results
from attnbench.results.tables import format_number
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import printable
from attnbench.settings.registry import build, is_own
from attnbench.settings.schema import BenchSettings, MixerSettings
from attnbench.training.prepare import measured_by

log = logging.getLogger(__name__)

EXPERIMENT = "benchmark"
CEILINGS = ("matrix_product_tflops", "copy_gigabytes_per_second")

ComposeMixers = Callable[[Sequence[str] | None], list[MixerSettings]]


def run_bench(settings: BenchSettings, compose_mixers: ComposeMixers) -> Path:
    """Measures what is not there yet, saying each line as it comes; returns the folder.

    Args:
        compose_mixers: see `config.compose_mixers`.

    Raises:
        UserError: the device is not there, or has no such precision; there is nothing to measure, or no such mixer.
    """
    device = resolve_device(settings.device)
    precision = resolve_precision(settings.precision, device.type, setting="precision")
    bench = build(settings.target, settings.options, Bench)
    if next(bench.cells(), None) is None:
        empty = ", ".join(f"bench.{name}=[]" for name, value in settings.options.items() if value == [])
        raise UserError(f"{empty}: leaves bench={settings.name} nothing to measure")
    mixers = compose_mixers(bench.mixer_names)
    stamp = environment(device, ROOT)
    machine = {name: value for name, value in stamp.items() if name not in UNHASHED}
    targets = [settings.target, *(mixer.target for mixer in mixers)]
    code = code_of(targets, ["mixers", "model", "timing"])
    # A yaml from elsewhere is edited as its class is.
    code |= {mixer.name: mixer.options for mixer in mixers if not is_own(mixer.target)}
    hashed = hash_with_code([settings.name, settings.target, settings.options, precision, machine], code)
    folder = Path(settings.outputs_dir) / EXPERIMENT / settings.name / f"{precision}-{hashed}"
    with recording(folder, waits=True), device_lock(device, shared=False):
        write_config(folder, _config(settings, precision, device))
        identity = _identity(settings, precision, hashed, stamp_environment(folder, device), folder)
        results = Results(folder, identity, settings.rerun)
        ceilings = _ceilings(results, device, precision)
        conditions = Conditions(
            device=device,
            precision=precision,
            ceilings=ceilings,
            mixers=compose_mixers,
            folder=folder,
        )
        for index, cell in enumerate(bench.cells()):
            rows = results.cell(cell_name(index), lambda cell=cell: bench.measure(cell, conditions))
            _say(cell, rows, bench.not_logged)
    return folder


def cell_name(index: int) -> str:
    """Of a cell, by its place among the bench's cells."""
    return f"{index:04}"


def cell_file(folder: Path, bench: str, name: str) -> Path:
    """Where a run keeps what it measured of a cell."""
    return folder / "results" / f"{bench}-{name}.jsonl"


class Results:
    """The files of a run: what is complete is read, the rest is measured."""

    def __init__(self, folder: Path, identity: Identity, rerun: bool) -> None:
        self.folder, self.identity, self.rerun = folder, identity, rerun

    def cell(self, name: str, measure: Callable[[], Iterable[Measurement]]) -> Iterator[ResultRow]:
        """The rows of a cell as they come; those of a cell that was cut off are measured again."""
        path = cell_file(self.folder, self.identity.evaluation, name)
        if not self.rerun and is_complete(path):
            yield from read_results(path)
            return
        with ResultsWriter(path, self.identity) as writer:
            for measurement in measure():
                # Whose it is, and by what, stands in the row's own columns, as in every other row.
                settings = dict(measurement.settings)
                variant, backend = settings.pop("implementation", None), settings.pop("backend", None)
                yield writer.write(replace(measurement, settings=settings), variant, backend)


def _ceilings(results: Results, device: torch.device, precision: str) -> Ceilings:
    def measure() -> Iterator[Measurement]:
        units = ("TFLOP/s", "GB/s")
        for metric, unit, value in zip(CEILINGS, units, measure_ceilings(device, precision), strict=True):
            yield Measurement(metric=metric, value=value, unit=unit)

    rows = {row.measurement.metric: row.measurement.value for row in results.cell("ceilings", measure)}
    ceilings = Ceilings(*(rows[metric] or 0.0 for metric in CEILINGS))
    log.info(f"{precision}: at most {ceilings.tflops:.4g} TFLOP/s and {ceilings.gigabytes_per_second:.4g} GB/s here")
    return ceilings


def _say(cell: dict[str, Any], rows: Iterable[ResultRow], unsaid: Sequence[str]) -> None:
    """A line an implementation, as soon as it has all its rows."""
    log.info(told_cell(cell))
    for name, group in groupby(rows, key=lambda row: row.identity.variant):
        measured = [row.measurement for row in group if row.measurement.metric not in unsaid]
        parts = dict.fromkeys(map(_told, measured))
        if parts:
            log.info(printable(f"  {name:14} {', '.join(parts)}"))


def told_cell(cell: dict[str, Any]) -> str:
    """Its settings in a line."""
    return " ".join(f"{axis}={value}" for axis, value in cell.items())


def _told(measurement: Measurement) -> str:
    if measurement.value is None:
        return f"{measurement.status.replace('_', ' ')}: {measurement.reason}"
    settings, name = measurement.settings, measurement.metric.removesuffix(MILLISECONDS).replace("_", " ")
    what = " ".join(filter(None, [settings.get("form"), settings.get("pass") or name]))
    return f"{what} {format_number(measurement.value)} {measurement.unit}".rstrip()


def _config(settings: BenchSettings, precision: str, device: torch.device) -> dict[str, Any]:
    given = asdict(settings)
    del given["rerun"]
    return {"bench": given, "resolved": {"precision": precision, "device": str(device)}}


def _identity(settings: BenchSettings, precision: str, hashed: str, stamp: dict[str, Any], folder: Path) -> Identity:
    """Of rows that belong to the device; those of an implementation bear its name."""
    return Identity(
        experiment=EXPERIMENT,
        run=f"{settings.name}/{folder.name}",
        mixer="",
        variant=DEVICE,
        backend="",
        model="",
        parameters=None,
        seq_len=None,
        evaluation=settings.name,
        seed=0,
        precision=precision,
        corpus=None,
        config_hash=hashed,
        **measured_by(stamp),
    )
