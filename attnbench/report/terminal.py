"""What a finished command prints: a table of what was trained, one of what was measured, and where the files are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnbench.report.summary import Summary, families, figures, same_models, summary
from attnbench.results.rows import ResultRow
from attnbench.results.tables import MetricColumn, comparison_tables, read_folders
from attnbench.settings.escaping import printable
from attnbench.verdict.seeds import told_apart
from attnbench.verdict.statistics import MIN_SEEDS

TRAINED = (
    MetricColumn(
        header="val PPL",
        evaluation="perplexity",
        metric="perplexity",
        settings={"split": "validation", "checkpoint": "best"},
    ),
    MetricColumn(
        header="test PPL",
        evaluation="perplexity",
        metric="perplexity",
        settings={"split": "test", "checkpoint": "best"},
    ),
    MetricColumn(header="token/s", evaluation="training", metric="tokens_per_second"),
    MetricColumn(header="seconds", evaluation="training", metric="train_seconds"),
)
"""What the table of language models shows."""


def print_summary(folders: Sequence[Path]) -> None:
    """Prints one table a corpus of the runs in `folders` to standard output, what else was measured, and the paths."""
    console, rows = Console(), read_folders(folders, last_only=True)
    shown = {column.evaluation for column in TRAINED}
    for table in comparison_tables([row for row in rows if row.identity.evaluation in shown], TRAINED):
        console.print(table)
    others = [row for row in rows if row.identity.evaluation not in shown]
    for name, group in _by_evaluation(told_apart(others)).items():
        console.print(_table(name, group))
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)
    console.print("Each holds config.yaml, metrics.jsonl, checkpoint/ and results/.")


def print_comparison(
    rows: Sequence[ResultRow],
    variants: Sequence[str],
    *,
    rank: Sequence[str],
    reference: str | None,
    shared: Mapping[str, Mapping[str, str]],
) -> None:
    """Prints the summary of a comparison to standard output, a line a score and a column a variant, one of which all
    failed included."""
    found = figures(rows, shared)
    ranked = families(found, rank=rank, reference=reference)
    content = summary(found, ranked, variants)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column()
    for variant, *_ in content.lines:
        table.add_column(Text(printable(variant.text)), justify="right", overflow="fold")
    for index, header in enumerate(content.headers[1:], start=1):
        cells = (Text(printable(line[index].in_full), style="bold" * line[index].is_best) for line in content.lines)
        table.add_row(Text(printable(header)), *cells)
    console = Console()
    console.print(table)
    for line in same_models(shared):
        console.print(printable(f"{line}: one model, run once."), markup=False, highlight=False)
    exploratory = [family for family in ranked if family.exploratory]
    if exploratory and len(exploratory) == len(ranked):
        console.print(f"Exploratory: fewer than {MIN_SEEDS} seeds, so nobody is ranked.")
    elif exploratory:
        names = ", ".join(dict.fromkeys(family.evaluation for family in exploratory))
        console.print(f"Exploratory: fewer than {MIN_SEEDS} seeds in {names}, so nobody is ranked there.")
    if any(family.best is not None for family in ranked):
        console.print("Bold: separated from all others.")


def _by_evaluation(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        found.setdefault(row.identity.evaluation, []).append(row)
    return found


def _table(name: str, rows: Sequence[ResultRow]) -> Table:
    """The headline figures of one evaluation, a line a variant; no winner is marked, as there are too few seeds."""
    found = figures(rows)
    return _drawn(name, summary(found, families(found, rank=[], reference=None)))


def _drawn(name: str, content: Summary) -> Table:
    table = Table(title=Text(printable(name)), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, header in enumerate(content.headers):
        table.add_column(Text(printable(header)), justify="left" if index == 0 else "right", overflow="fold")
    for line in content.lines:
        table.add_row(*(Text(printable(cell.in_full)) for cell in line))
    return table
