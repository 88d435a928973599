"""Finished runs as a published table: docs/results/<table>-<machine>/ with README.md, results.csv, environment.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from attnbench.results.files import replace_file
from attnbench.results.rows import same_corpus, write_csv
from attnbench.results.tables import MetricColumn, markdown_table, read_folders
from attnbench.settings.documents import read_object
from attnbench.settings.errors import UserError
from attnbench.settings.escaping import markdown_text

COLUMNS = (
    MetricColumn(
        header="validation PPL",
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
    MetricColumn(
        header="test bits/char",
        evaluation="perplexity",
        metric="bits_per_character",
        settings={"split": "test", "checkpoint": "best"},
    ),
    MetricColumn(header="token/s", evaluation="training", metric="tokens_per_second"),
    MetricColumn(header="seconds", evaluation="training", metric="train_seconds"),
    MetricColumn(header="first step, s", evaluation="training", metric="first_step_seconds"),
    MetricColumn(header="peak MiB", evaluation="training", metric="peak_memory_mib"),
)


def publish(folders: Sequence[Path], target: Path, *, title: str, command: str, note: str = "") -> None:
    """Writes the table of these runs.

    Args:
        folders: of finished runs on one corpus and one machine.
        command: what made them, as a reader would type it, a line each.
        note: what a reader must know besides.

    Raises:
        UserError: no rows, several corpora, or runs of different environments or commits.
    """
    rows = read_folders(folders)
    if not rows:
        raise UserError(f"{', '.join(map(str, folders))}: no results to publish")
    corpus = same_corpus(rows)
    stamps = [read_object(folder / "environment.json") for folder in folders]
    measured = {row.identity.environment for row in rows}
    if any(stamp != stamps[0] for stamp in stamps) or len(measured) > 1:
        raise UserError(f"{target}: the rows come from several environments or commits; publish one at a time")
    stamp = stamps[0]
    target.mkdir(parents=True, exist_ok=True)
    write_csv(rows, target / "results.csv")
    replace_file(target / "environment.json", json.dumps(stamp, indent=2) + "\n")
    replace_file(target / "README.md", _page(title, corpus, markdown_table(rows, COLUMNS), command, note, stamp))


def _page(title: str, corpus: str | None, table: str, command: str, note: str, stamp: dict[str, Any]) -> str:
    paragraph = f"\n\n{note}" if note else ""
    machine = ", ".join(f"{name} {stamp[name]}" for name in ("torch", "triton", "python") if stamp.get(name))
    return (
        f"# {title}\n\n{table}\n"
        f"Corpus `{markdown_text(str(corpus))}`. "
        "PPL is that of the checkpoint with the lowest validation loss. Seconds and token/s are of "
        "training steps, token/s without the first step, which compiles; peak MiB is all memory reserved on the device."
        f"{paragraph}\n\nMade by\n\n{indent(command, '    ')}\n\n"
        f"at commit `{stamp.get('commit')}` on {stamp.get('device')} ({machine}). results.csv has all rows, among them "
        "other checkpoints, positions in the block and longer blocks; environment.json has the whole environment.\n"
    )
