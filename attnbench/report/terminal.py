"""Tables that a finished command prints, of what was trained and measured, and the paths of its files."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from attnbench.report.sections.answer import sentences
from attnbench.results.rows import TEST_OF_BEST, Identity, ResultRow
from attnbench.results.tables import MetricColumn, Table, TableCell, comparison_tables, print_table, read_folders
from attnbench.settings.check import setting_of
from attnbench.settings.errors import printable
from attnbench.verdict.axes import distinguish_variants
from attnbench.verdict.factorial import Factorial
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import Entry, Summary, summary

if TYPE_CHECKING:
    from attnbench.report.inputs import Inputs

TRAINED = (
    MetricColumn(
        header="val PPL",
        evaluation="perplexity",
        metric="perplexity",
        settings={"split": "validation", "checkpoint": "best", "context": "full"},
    ),
    MetricColumn(
        header="test PPL",
        evaluation="perplexity",
        metric="perplexity",
        settings={**TEST_OF_BEST, "context": "full"},
    ),
    MetricColumn(
        header="bits/byte",
        evaluation="perplexity",
        metric="bits_per_byte",
        settings={**TEST_OF_BEST, "context": "full"},
    ),
    MetricColumn(header="token/s", evaluation="training", metric="tokens_per_second"),
    MetricColumn(header="secs", evaluation="training", metric="train_seconds"),
)
"""Columns of the table of language models."""

NAMED_BY_ROWS = {"attn", "data", "eval", *(column.name for column in fields(Identity))}
"""Settings, by the last of their names, that columns of a row tell."""

MAX_COLUMNS = 8
"""Variants that stand side by side; of more there is a line each."""


def print_summary(folders: Mapping[Path, Sequence[str]]) -> None:
    """Print one table a corpus of the runs in `folders` to standard output, what else was measured, and the paths.

    Args:
        folders: each with the overrides that made it.
    """
    console, rows = Console(), read_folders(list(folders), last_only=True)
    trained, swept = {column.evaluation for column in TRAINED}, _swept(folders)
    for table in comparison_tables([row for row in rows if row.identity.evaluation in trained], TRAINED, swept):
        print_table(table, console)
    others = distinguish_variants([row for row in rows if row.identity.evaluation not in trained])
    for evaluation in dict.fromkeys(row.identity.evaluation for row in others):
        print_table(_evaluation_table([row for row in others if row.identity.evaluation == evaluation]), console)
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)
    console.print("Each holds config.yaml, metrics.jsonl, checkpoint/ and results/.")


def _swept(folders: Mapping[Path, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Take from the overrides the values that rows do not name, by run: train.learning_rate, not attn or seq_len."""
    return {
        folder.name: {
            setting: word.partition("=")[2]
            for word in words
            if (setting := setting_of(word)).rpartition(".")[2] not in NAMED_BY_ROWS
        }
        for folder, words in folders.items()
    }


def _evaluation_table(rows: Sequence[ResultRow]) -> Table:
    """Make the headline table of one evaluation, a line a variant; with so few seeds no winner is marked."""
    content = summary(figures(rows), [])
    lines = [[variant, *map(_cell, entries)] for variant, entries in content.lines.items()]
    headers = ["variant", *(column.header for column in content.columns)]
    return Table(title=rows[0].identity.evaluation, lead=content.lead, headers=headers, lines=lines)


def summary_table(content: Summary, *, with_intervals: bool = False) -> Table:
    """Make the table of a line a score and a column a variant, or the other way round where there are many variants.

    Args:
        with_intervals: for a page, which has room for them and for the parts that a variant lacks; on a terminal a
            sentence below the table names those.
    """

    def cell(entry: Entry) -> TableCell:
        return _cell(entry, with_interval=with_intervals, tells_parts=with_intervals)

    if len(content.lines) > MAX_COLUMNS:
        lines = [[variant, *map(cell, entries)] for variant, entries in content.lines.items()]
        headers = ["variant", *(column.header for column in content.columns)]
        return Table(lead=content.lead, headers=headers, lines=lines)
    lines = [
        [column.header, *(cell(entries[index]) for entries in content.lines.values())]
        for index, column in enumerate(content.columns)
    ]
    return Table(lead=content.lead, headers=["", *content.lines], lines=lines)


def _cell(entry: Entry, *, with_interval: bool = False, tells_parts: bool = True) -> TableCell:
    figure = entry.figure
    if with_interval:
        notes = [entry.spread]
    elif figure is not None and figure.has_range:
        low, high = min(figure.values.values()), max(figure.values.values())
        # Near 1 two digits would hide what differs.
        digits = 2 if low < 0.99 else 3
        notes = [f"{low:.{digits}f}–{high:.{digits}f}", entry.solved.replace(" of ", "/")]
    else:
        notes = []
    notes += [figure.without] if figure is not None and tells_parts else []
    return TableCell(text=entry.text, notes=tuple(filter(None, notes)), mark="best" if entry.is_best else "")


def print_comparison(inputs: "Inputs") -> None:
    """Print the summary of a comparison to standard output, with the variants of which all seeds failed; of a factorial
    its effects and corners."""
    # Imported here: it loads torch, which scripts wait for only once their configuration is checked.
    from attnbench.report.sections.effects import factorial_tables

    protocol = inputs.protocol
    if protocol.factors:
        factorial = Factorial.of(protocol.variants, protocol.factors)
        for table in factorial_tables(factorial, inputs.figures, inputs.primaries):
            print_table(table)
        if inputs.imported:
            print(printable(inputs.imported))
        return
    content = summary(inputs.figures, inputs.verdicts, protocol.variants)
    lacking = [
        f"{variant}: {without}, which others have here."
        for variant, entries in content.lines.items()
        for without in dict.fromkeys(entry.figure.without for entry in entries if entry.figure is not None)
        if without
    ]
    notes = [*sentences(inputs), *lacking, *filter(None, [inputs.imported])]
    print_table(replace(summary_table(content), notes=notes))
