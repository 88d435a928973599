"""Tables that a finished command prints."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from attnbench.report.sections.answer import sentences
from attnbench.report.sections.scores import summary_table
from attnbench.results.rows import Identity
from attnbench.results.tables import TableCell, print_table, read_folders
from attnbench.settings.check import setting_of
from attnbench.settings.escape import printable
from attnbench.verdict.axes import distinguish_variants, grouped
from attnbench.verdict.factorial import Factorial
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import summary

if TYPE_CHECKING:
    from attnbench.report.inputs import Inputs

NAMED_BY_ROWS = {"attn", "data", "eval", *(column.name for column in fields(Identity))}
"""Last parts of the names of settings that rows name in columns."""


def print_summary(folders: Mapping[Path, Sequence[str]]) -> None:
    """Print the scores of runs, a table for each corpus, and their folders. `folders` have the overrides of each
    run."""
    console, rows, endings = Console(), read_folders(list(folders), last_only=True), _endings(folders)
    named = [
        replace(row, identity=replace(it, variant=f"{it.variant}{endings.get(it.run, '')}"))
        for row in rows
        for it in [row.identity]
    ]
    by_corpus = grouped(distinguish_variants(named), lambda row: row.identity.corpus)
    for corpus, group in by_corpus.items():
        # Without verdicts: a sweep has too few seeds to mark a winner.
        print_table(summary_table(summary(figures(group), []), title=corpus or ""), console)
    for folder in folders:
        console.print(printable(f"  {folder}/"), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{'It' if len(folders) == 1 else 'Each'} contains config.yaml, metrics.jsonl, checkpoint/ and results/."
    )


def _endings(folders: Mapping[Path, Sequence[str]]) -> dict[str, str]:
    """Name by run the settings that differ between the command lines and that rows do not name: " warmup_steps=2"."""
    given = {folder.name: {setting_of(word): word.partition("=")[2] for word in folders[folder]} for folder in folders}
    names = dict.fromkeys(name for settings in given.values() for name in settings)
    swept = {name: last for name in names if (last := name.rpartition(".")[2]) not in NAMED_BY_ROWS}
    differing = [name for name in swept if len({settings.get(name) for settings in given.values()}) > 1]
    return {
        run: "".join(f" {swept[name]}={settings[name]}" for name in differing if name in settings)
        for run, settings in given.items()
    }


def print_comparison(inputs: "Inputs", console: Console | None = None) -> None:
    # Imported here: it loads torch, and commands check their settings first.
    from attnbench.report.sections.effects import factorial_tables

    protocol, console = inputs.protocol, console or Console()
    if protocol.factors:
        factorial = Factorial.of(protocol.variants, protocol.factors)
        for table in factorial_tables(factorial, inputs.figures, inputs.primaries):
            print_table(table, console)
        if inputs.imported:
            console.print(printable(inputs.imported), markup=False, highlight=False)
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
    print_table(replace(table, lines=lines, notes=notes), console)


def _leaving_out(cell: str | TableCell, notes: Set[str]) -> str | TableCell:
    if isinstance(cell, str):
        return cell
    return replace(cell, notes=tuple(note for note in cell.notes if note not in notes))
