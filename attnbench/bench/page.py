"""The tables of benches on a terminal, and as a page of docs/results."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attnbench.bench.base import Bench
from attnbench.bench.run import CEILINGS, cell_label, results_file
from attnbench.bench.tables import WIDTH, Layout, narrowed, reasons, tables
from attnbench.machine.environment import environment_id
from attnbench.results import page
from attnbench.results.files import replace_file
from attnbench.results.numbers import format_number
from attnbench.results.row_files import read_results
from attnbench.results.row_tables import write_csv
from attnbench.results.rows import ResultRow
from attnbench.results.tables import Table, print_table
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable
from attnbench.settings.registry import build, resolve
from attnbench.settings.untrusted import MAX_YAML_BYTES, parse_yaml, read_bounded, read_object


@dataclass(slots=True, kw_only=True, frozen=True)
class Measured:
    bench: type[Bench]
    name: str
    commands: list[str]
    rows: list[ResultRow]
    missing: list[str]
    """Cells that are not complete."""

    @property
    def layouts(self) -> Sequence[Layout]:
        return self.bench.layouts_of(self.rows)


def is_bench(folder: Path) -> bool:
    path = folder / "config.yaml"
    return path.exists() and "bench" in _content(path)


def print_tables(folders: Sequence[Path]) -> None:
    """Print the tables of each bench among the runs, write results.csv into each folder, and list the folders."""
    # First, because rows of several runs may collide in a table, which is an error.
    for folder in folders:
        for measured in _measured([folder]):
            write_csv(measured.rows, folder / "results.csv")
            for name, text in measured.bench.files(measured.rows).items():
                replace_file(folder / name, text)
    console = Console(width=WIDTH + 1)
    for measured in _measured(folders):
        layouts = [layout for layout in measured.layouts if not layout.on_page_alone]
        shown = list(tables(measured.rows, layouts))
        for table in shown:
            for part in narrowed(table):
                print_table(part, console)
        for line in (*reasons(measured.rows, layouts), _ceilings_text(measured.rows, shown)):
            text = textwrap.fill(printable(line), WIDTH, subsequent_indent="  ")
            console.print(text, markup=False, highlight=False)
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)


def write_page(folders: Sequence[Path], target: Path, *, title: str, note: str = "") -> None:
    runs = list(_measured(folders))
    if len(runs) != 1 or not runs[0].rows:
        names = ", ".join(measured.name for measured in runs)
        raise UserError(f"{', '.join(map(str, folders))}: must be runs of one bench that measured something ({names})")
    [measured] = runs
    shown, why = list(tables(measured.rows, measured.layouts)), reasons(measured.rows, measured.layouts)
    missing = measured.missing
    commit, device = (page.listed_values(measured.rows, column) for column in ("commit", "device"))
    sentences = (
        f"at commit {commit} on {device}. results.csv has all rows, with percentiles and numbers of repeats; "
        "environment-*.json the machine and its libraries."
    )
    stamps = [read_object(path) for folder in folders for path in folder.glob("environment*.json")]
    page.write_page(
        target,
        title=title,
        parts=[
            note,
            *measured.bench.notes,
            *shown,
            *(["Without a number:", page.bullets(why)] if why else []),
            *([f"Not measured yet, {len(missing)} cells:", page.bullets(missing)] if missing else []),
            _ceilings_text(measured.rows, shown),
            page.made_by(measured.commands, sentences),
        ],
        rows=measured.rows,
        environments={environment_id(stamp): stamp for stamp in stamps},
        files=measured.bench.files(measured.rows),
    )


def _ceilings_text(rows: Sequence[ResultRow], shown: Sequence[Table]) -> str:
    """Describe the ceilings of the roofline; empty if no table has shares of it."""
    if not any(str(header).endswith("roof") for table in shown for header in table.headers):
        return ""
    values = {(row.identity.precision, row.measurement.metric): row.measurement.value for row in rows}
    flops, copy = CEILINGS
    parts = [
        f"{format_number(values[precision, flops] or 0)} TFLOP/s ({precision}) and "
        f"{format_number(values[precision, copy] or 0)} GB/s"
        for precision in dict.fromkeys(precision for precision, metric in values if metric == flops)
    ]
    if not parts:
        return ""
    return (
        "roof, the share of the roofline: operations and bytes that the function cannot do without, at what a large "
        f"matrix product and a large copy reached in the same run: {'; '.join(parts)}."
    )


def _measured(folders: Sequence[Path]) -> Iterator[Measured]:
    configs = {folder: _config(folder) for folder in folders}
    for name in dict.fromkeys(config["name"] for config in configs.values()):
        runs = {folder: config for folder, config in configs.items() if config["name"] == name}
        target = next(iter(runs.values()))["target"]
        files = [path for folder in runs for path in sorted((folder / "results").glob("*.jsonl"))]
        yield Measured(
            bench=resolve(target, Bench),
            name=name,
            commands=list(dict.fromkeys(config["command"] for config in runs.values())),
            rows=[row for path in files for row in read_results(path)],
            missing=[label for folder, config in runs.items() for label in _missing(folder, config)],
        )


def _missing(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    bench = build(config["target"], config["options"], Bench, group="bench")
    for index, cell in enumerate(bench.cells()):
        if not results_file(folder, config["name"], f"{index:04}").exists():
            yield f"{folder.name}: {cell_label(cell)}"


def _config(folder: Path) -> dict[str, Any]:
    content = _content(folder / "config.yaml")
    if "bench" not in content:
        raise UserError(f"{folder}: is no run of attnbench bench")
    return content["bench"]


def _content(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(read_bounded(path, MAX_YAML_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(f"{path}: cannot be read ({reason}); restore it, or give another folder") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold settings by name; restore it, or give another folder")
    return content
