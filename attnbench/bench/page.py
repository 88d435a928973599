"""What a bench found: its tables on the terminal, and as a page of docs/results with its rows and environments."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attnbench.bench.base import Bench
from attnbench.bench.run import CEILINGS, cell_file, cell_name, told_cell
from attnbench.bench.tables import WIDTH, grids, narrowed, reasons
from attnbench.machine.device import environment_id
from attnbench.results.files import replace_file
from attnbench.results.rows import ResultRow, is_complete, read_results, write_csv, write_environments
from attnbench.results.tables import format_number, to_markdown, to_terminal
from attnbench.settings.documents import MOST_YAML_BYTES, parse_yaml, read_bounded, read_object
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import markdown_text, printable
from attnbench.settings.registry import build, resolve


@dataclass(slots=True, kw_only=True, frozen=True)
class Measured:
    """The runs of one bench."""

    bench: type[Bench]
    name: str
    commands: list[str]
    rows: list[ResultRow]
    missing: list[str]
    """Cells that have not come to their end."""


def is_bench(folder: Path) -> bool:
    """Whether it is the folder of a run of benchmark.py."""
    path = folder / "config.yaml"
    return path.exists() and "bench" in _content(path)


def print_tables(folders: Sequence[Path]) -> None:
    """Prints the tables of each bench among the runs; writes a results.csv into each folder, and says where it is."""
    # First: rows of several jobs may belong into one cell, and are no less measured.
    for folder in folders:
        for measured in _measured([folder]):
            _write_rows(measured, folder)
    console = Console(width=WIDTH + 1)
    for measured in _measured(folders):
        layouts = [layout for layout in measured.bench.layouts_of(measured.rows) if not layout.on_page_alone]
        for drawn in grids(measured.rows, layouts):
            for part in narrowed(drawn):
                console.print(to_terminal(part))
        for line in (*reasons(measured.rows, layouts), _ceilings_text(measured.rows)):
            console.print(textwrap.fill(line, WIDTH, subsequent_indent="  "), markup=False, highlight=False)
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)


def write_page(folders: Sequence[Path], target: Path, *, title: str, note: str = "") -> None:
    """Writes README.md, results.csv and environments of runs of one bench.

    Raises:
        UserError: nothing was measured, or the runs are of several benches.
    """
    found = list(_measured(folders))
    if len(found) != 1 or not found[0].rows:
        names = ", ".join(measured.name for measured in found)
        raise UserError(f"{', '.join(map(str, folders))}: must be runs of one bench that measured something ({names})")
    (measured,) = found
    target.mkdir(parents=True, exist_ok=True)
    _write_rows(measured, target)
    stamps = [read_object(path) for folder in folders for path in folder.glob("environment*.json")]
    write_environments(target, {environment_id(stamp): stamp for stamp in stamps})
    replace_file(target / "README.md", _page(title, note, measured))


def _write_rows(measured: Measured, target: Path) -> None:
    write_csv(measured.rows, target / "results.csv")
    for name, text in measured.bench.files(measured.rows).items():
        replace_file(target / name, text)


def _page(title: str, note: str, measured: Measured) -> str:
    parts = [f"# {title}"]
    for drawn in grids(measured.rows, measured.bench.layouts_of(measured.rows)):
        parts.append(to_markdown(drawn))
    missing = reasons(measured.rows, measured.bench.layouts_of(measured.rows))
    if missing:
        parts += ["Without a number:", _listed(missing)]
    if measured.missing:
        parts += [f"Not measured yet, {len(measured.missing)} cells:", _listed(measured.missing)]
    commands = "\n".join(f"    {printable(line)}" for line in measured.commands)
    commits, devices = (
        ", ".join(dict.fromkeys(markdown_text(str(getattr(row.identity, name))) for row in measured.rows))
        for name in ("commit", "device")
    )
    parts += [*measured.bench.notes, _ceilings_text(measured.rows), note]
    parts += [
        f"Made by\n\n{commands}\n\nat commit {commits} on {devices}. results.csv has all rows, with percentiles and "
        "numbers of repeats; environment-*.json the machine and its libraries."
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)


def _ceilings_text(rows: Sequence[ResultRow]) -> str:
    """What shares of the roofline are shares of."""
    found = {(row.identity.precision, row.measurement.metric): row.measurement.value for row in rows}
    parts = [
        f"{format_number(found[precision, CEILINGS[0]] or 0)} TFLOP/s ({precision}) and "
        f"{format_number(found[precision, CEILINGS[1]] or 0)} GB/s"
        for precision in dict.fromkeys(precision for precision, metric in found if metric == CEILINGS[0])
    ]
    if not parts:
        return ""
    return (
        "roof, the share of the roofline: operations and bytes that the function cannot do without, at what a large "
        f"matrix product and a large copy reached in the same run: {'; '.join(parts)}."
    )


def _measured(folders: Sequence[Path]) -> Iterator[Measured]:
    """The runs by bench, in the order in which the folders name them.

    Raises:
        UserError: a folder that is no run of a bench, or a file that was altered.
    """
    configs = {folder: _config(folder) for folder in folders}
    for name in dict.fromkeys(config["name"] for config in configs.values()):
        own = {folder: config for folder, config in configs.items() if config["name"] == name}
        first = next(iter(own.values()))
        files = [path for folder in own for path in sorted((folder / "results").glob("*.jsonl"))]
        yield Measured(
            bench=resolve(first["target"], Bench),
            name=name,
            commands=list(dict.fromkeys(config["command"] for config in own.values())),
            rows=[row for path in files if is_complete(path) for row in read_results(path)],
            missing=[label for folder, config in own.items() for label in _missing(folder, config)],
        )


def _missing(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """The cells that a run which was cut off has not come to the end of."""
    bench = build(config["target"], config["options"], Bench)
    for index, cell in enumerate(bench.cells()):
        if not is_complete(cell_file(folder, config["name"], cell_name(index))):
            yield f"{folder.name}: {told_cell(cell)}"


def _config(folder: Path) -> dict[str, Any]:
    """The settings of a run of benchmark.py."""
    content = _content(folder / "config.yaml")
    if "bench" not in content:
        raise UserError(f"{folder}: is no run of benchmark.py")
    return content["bench"]


def _content(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(read_bounded(path, MOST_YAML_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold settings by name")
    return content
