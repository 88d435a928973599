"""Result rows as tables for a terminal of 80 columns; rows of different corpora never share one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnbench.errors import UserError
from attnbench.results import Identity, Measurement, ResultRow, read_results, same_corpus

LABELS = {"variant": "variant", "backend": "backend", "parameters": "params", "seq_len": "T", "seed": "seed"}
"""Columns that every table has, and what stands above them."""

DISTINCTIONS = ("experiment", "mixer", "model", "precision", "device", "num_devices", "commit")
"""Columns that a table gets only where its rows differ in them, so that no difference is hidden."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricColumn:
    """A column of numbers: those of `metric` whose settings contain `settings`."""

    header: str
    metric: str
    settings: dict[str, Any] = field(default_factory=dict)

    def takes(self, measurement: Measurement) -> bool:
        """Whether the measurement belongs into this column."""
        return measurement.metric == self.metric and self.settings.items() <= measurement.settings.items()


SUMMARY = (
    MetricColumn(header="val PPL", metric="perplexity", settings={"split": "validation", "checkpoint": "best"}),
    MetricColumn(header="test PPL", metric="perplexity", settings={"split": "test", "checkpoint": "best"}),
    MetricColumn(header="token/s", metric="tokens_per_second"),
    MetricColumn(header="seconds", metric="train_seconds"),
)
"""What the table at the end of a training shows."""


def print_summary(folders: Sequence[Path]) -> None:
    """Prints one table a corpus of the runs in `folders` to standard output, and where their files are."""
    console = Console()
    rows = [
        row for folder in folders for path in sorted((folder / "results").glob("*.jsonl")) for row in read_results(path)
    ]
    for table in comparison_tables(rows, SUMMARY):
        console.print(table)
    for folder in folders:
        console.print(f"  {folder}/", markup=False, highlight=False, soft_wrap=True)
    console.print("Each holds config.yaml, metrics.jsonl, checkpoint/ and results/.")


def comparison_tables(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> list[Table]:
    """One comparison_table for each corpus, in the order in which the rows name them."""
    by_corpus: dict[str | None, list[ResultRow]] = {}
    for row in rows:
        by_corpus.setdefault(row.identity.corpus, []).append(row)
    return [comparison_table(group, columns) for group in by_corpus.values()]


def comparison_table(rows: Iterable[ResultRow], columns: Sequence[MetricColumn]) -> Table:
    """A table with one line per variant, sequence length and seed, titled with the corpus.

    A cell without a number shows its status, and a dash where nothing was measured.

    Raises:
        UserError: the rows come from several corpora, or two of them belong into one cell.
    """
    rows = list(rows)
    corpus = same_corpus(rows)
    shown = [row for row in rows if any(column.takes(row.measurement) for column in columns)]
    differing = [name for name in DISTINCTIONS if len({getattr(row.identity, name) for row in shown}) > 1]
    names = [*LABELS, *differing]
    title = Text(printable(corpus if corpus is not None else "no corpus"))
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        right = name in ("parameters", "seq_len", "seed", "num_devices")
        table.add_column(LABELS.get(name, name), justify="right" if right else "left", overflow="fold")
    for column in columns:
        table.add_column(Text(printable(column.header)), justify="right", overflow="fold")
    lines: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in shown:
        lines.setdefault(tuple(getattr(row.identity, name) for name in names), []).append(row)
    for group in lines.values():
        labels = [Text(_label(group[0].identity, name)) for name in names]
        table.add_row(*labels, *(Text(_cell(group, column)) for column in columns))
    return table


def printable(text: str) -> str:
    """`text` with what a terminal would obey (escape sequences, line ends, direction marks) spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def format_number(value: float) -> str:
    """Four significant digits; whole numbers with thousands separated from 1,000 up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _label(identity: Identity, name: str) -> str:
    value = getattr(identity, name)
    if value is None:
        return "–"
    if name == "parameters" and value >= 100_000:
        return f"{value / 1e6:.2f}M"
    return printable(str(value))


def _cell(group: Sequence[ResultRow], column: MetricColumn) -> str:
    found = [row for row in group if column.takes(row.measurement)]
    if not found:
        return "–"
    if len(found) > 1:
        places = "; ".join(f"{row.identity.run}, {row.measurement.settings}" for row in found)
        raise UserError(f"{column.header}: {len(found)} rows belong into one cell ({places}); name the setting meant")
    measurement = found[0].measurement
    return measurement.status.replace("_", " ") if measurement.value is None else format_number(measurement.value)
