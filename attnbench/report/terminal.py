"""Tables that a finished command prints."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from attnbench.report.sections.answer import sentences
from attnbench.report.sections.scores import score_table, summary_table
from attnbench.results.rows import TEST_OF_BEST, Identity
from attnbench.results.tables import MetricColumn, TableCell, comparison_tables, print_table, read_folders
from attnbench.settings.check import setting_of
from attnbench.settings.escape import printable
from attnbench.verdict.axes import distinguish_variants
from attnbench.verdict.factorial import Factorial
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import summary

if TYPE_CHECKING:
    from attnbench.report.inputs import Inputs

TEST = {**TEST_OF_BEST, "context": "full"}
TRAINED = (
    MetricColumn(
        header="val PPL", evaluation="perplexity", metric="perplexity", settings=TEST | {"split": "validation"}
    ),
    MetricColumn(header="test PPL", evaluation="perplexity", metric="perplexity", settings=TEST),
    MetricColumn(header="bits/byte", evaluation="perplexity", metric="bits_per_byte", settings=TEST),
    MetricColumn(header="token/s", evaluation="training", metric="tokens_per_second"),
    MetricColumn(header="secs", evaluation="training", metric="train_seconds"),
)

NAMED_BY_ROWS = {"attn", "data", "eval", *(column.name for column in fields(Identity))}
"""Last parts of the names of settings that rows name in columns."""


def print_summary(folders: Mapping[Path, Sequence[str]]) -> None:
    console, rows = Console(), read_folders(list(folders), last_only=True)
    trained = {column.evaluation for column in TRAINED}
    # Swept values that rows do not name, by run: train.learning_rate, but not attn or seq_len.
    swept = {
        folder.name: {
            setting: word.partition("=")[2]
            for word in words
            if (setting := setting_of(word)).rpartition(".")[2] not in NAMED_BY_ROWS
        }
        for folder, words in folders.items()
    }
    for table in comparison_tables([row for row in rows if row.identity.evaluation in trained], TRAINED, swept):
        print_table(table, console)
    others = distinguish_variants([row for row in rows if row.identity.evaluation not in trained])
    for evaluation in dict.fromkeys(row.identity.evaluation for row in others):
        measured = [row for row in others if row.identity.evaluation == evaluation]
        # Without verdicts: a sweep has too few seeds to mark a winner.
        print_table(score_table(summary(figures(measured), []), title=evaluation), console)
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)
    console.print("Each contains config.yaml, metrics.jsonl, checkpoint/ and results/.")


def print_comparison(inputs: "Inputs") -> None:
    # Imported here: it loads torch, and commands check their settings first.
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
    lacking = {
        (variant, entry.figure.without): None
        for variant, entries in content.lines.items()
        for entry in entries
        if entry.figure is not None and entry.figure.without
    }
    told = [f"{variant}: {without}, which others have here." for variant, without in lacking]
    notes = [*content.ratio_notes, *sentences(inputs), *told, *filter(None, [inputs.imported])]
    # Once below the table, where each cell of a variant would repeat it.
    table, repeated = summary_table(content), {without for _, without in lacking}
    lines = [[_leaving_out(cell, repeated) for cell in line] for line in table.lines]
    print_table(replace(table, lines=lines, notes=notes))


def _leaving_out(cell: str | TableCell, notes: Set[str]) -> str | TableCell:
    if isinstance(cell, str):
        return cell
    return replace(cell, notes=tuple(note for note in cell.notes if note not in notes))
