"""A comparison as a published folder: docs/results/<table>-<machine>/, from which report.py makes its page again.

README.md results.csv comparison.json environment-<id>.json cells.jsonl
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.comparison.transfer import export_cells
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.summary import Cell, Summary, families, figures, summary, to_rows
from attnbench.results.files import replace_file
from attnbench.results.rows import write_csv, write_environments
from attnbench.results.tables import format_number
from attnbench.settings.documents import read_object
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import markdown_text, printable


def publish_comparison(experiment: Path, target: Path, *, title: str, note: str = "") -> None:
    """Writes what a comparison has found so far, and what is missing of it.

    Args:
        experiment: outputs/<plan>, with its comparison.json.
        note: what a reader must know besides; a paragraph of its own.

    Raises:
        UserError: there is no comparison, or it has no rows.
    """
    record = experiment / "comparison.json"
    if not record.exists():
        raise UserError(f"{record}: is not there; compare.py writes it")
    inputs = read_inputs(experiment)
    summed = figures(inputs.rows, inputs.protocol.shared)
    ranked = families(summed, rank=inputs.protocol.rank, reference=inputs.protocol.reference)
    target.mkdir(parents=True, exist_ok=True)
    write_csv([*inputs.rows, *to_rows(summed)], target / "results.csv")
    content = read_object(record)
    # The rows stand in results.csv here.
    content.pop("files", None)
    replace_file(target / "comparison.json", json.dumps(content, indent=1) + "\n")
    write_environments(target, {name: stamp for name, stamp in inputs.environments.items() if stamp is not None})
    export_cells(experiment, target / "cells.jsonl")
    replace_file(target / "README.md", _page(title, note, inputs, summary(summed, ranked, inputs.protocol.variants)))


def _page(title: str, note: str, inputs: Inputs, content: Summary) -> str:
    protocol, identities = inputs.protocol, [row.identity for row in inputs.rows]
    devices, commits, corpora = (
        ", ".join(
            dict.fromkeys(
                markdown_text(f"{getattr(identity, name)}") for identity in identities if getattr(identity, name)
            )
        )
        for name in ("device", "commit", "corpus")
    )
    corpus = f", corpus `{corpora}`" if corpora else ""
    corpus = f", corpus `{corpora}`" if corpora else ""
    parts = [
        f"# {title}",
        summary_table(content),
        "Brackets are 95 % Student intervals over seeds, for timings the 20th and 80th percentile, unadjusted. Bold is "
        "best where it is separated from every other variant: two-sided paired t-test, Holm-adjusted p < 0.05, and at "
        "least the smallest difference that matters (0.01 in accuracy, 1 % in perplexity).",
        f"Made by\n\n    {printable(protocol.command)}\n\non {devices}{corpus}, at commit {commits}. "
        "results.csv has every row and every figure over seeds, comparison.json the learning rates and how they were "
        "chosen, environment-*.json the machines. `python scripts/report.py` on this folder makes the page "
        "with all plots, and "
        "`compare.py ... import=cells.jsonl` goes on from these cells.",
        note,
        *_listed("Failed", [f"{entry['cell']}: {entry['reason']}" for entry in protocol.failures]),
        *_listed("Not run yet", protocol.missing),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary_table(content: Summary) -> str:
    """A line an evaluation's score, a column a variant, as Markdown."""
    variants = [line[0].text for line in content.lines]
    rows = [
        [header, *(_shown(line[index]) for line in content.lines)]
        for index, header in enumerate(content.headers[1:], start=1)
    ]
    marks = ["---", *("--:" for _ in variants)]
    lines = [["", *variants], marks, *rows]
    return "\n".join(f"| {' | '.join(markdown_text(cell) for cell in line)} |" for line in lines)


def _shown(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.is_best else cell.text
    interval = (
        "" if cell.low is None or cell.high is None else f"[{format_number(cell.low)}, {format_number(cell.high)}]"
    )
    return " ".join(filter(None, (text, interval, cell.without)))


def _listed(what: str, labels: Sequence[Any]) -> list[str]:
    if not labels:
        return []
    return [f"{what}, of the plan's cells:", "\n".join(f"- {markdown_text(str(label))}" for label in labels)]
