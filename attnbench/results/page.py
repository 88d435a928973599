"""Published pages: docs/results/<table>-<machine>/ with README.md, results.csv and environments."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.results.files import replace_file
from attnbench.results.row_tables import PACKED_TABLE, TABLE, write_csv, write_environments
from attnbench.results.rows import ResultRow
from attnbench.results.tables import Table, to_markdown
from attnbench.settings.errors import UserError
from attnbench.settings.escape import markdown_text, printable, without_paths


def check_target(target: Path, sources: Sequence[Path]) -> None:
    """Neither page nor source may lie in the other: results.csv would be read twice."""
    for source in sources:
        if not source.is_dir():
            raise UserError(f"{source}: {'is no folder' if source.exists() else 'no such folder'}")
        ours, theirs = target.resolve(), source.resolve()
        if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
            raise UserError(
                f"{target}: must lie beside {source}, where a page's results.csv would pass for the experiment's; name "
                "a folder of docs/results"
            )


def write_page(
    target: Path,
    *,
    title: str,
    parts: Iterable[str | Table],
    rows: Iterable[ResultRow],
    environments: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    is_packed: bool = False,
) -> None:
    """Write a published page; other files in `target` stay.

    Args:
        parts: paragraphs of Markdown and tables; empty ones are left out.
        environments: by fingerprint, each written as environment-<fingerprint>.json.
        files: further texts by file name.
        is_packed: write results.csv.gz.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = (PACKED_TABLE, TABLE) if is_packed else (TABLE, PACKED_TABLE)
    write_csv(rows, target / names[0])
    # The other form would hold older rows.
    (target / names[1]).unlink(missing_ok=True)
    write_environments(target, environments)
    for name, text in (files or {}).items():
        replace_file(target / name, text)
    shown = (to_markdown(part) if isinstance(part, Table) else part for part in parts)
    replace_file(target / "README.md", "\n\n".join(filter(None, (f"# {title}", *shown))) + "\n")


def made_by(commands: Iterable[str], sentences: str) -> str:
    """Name the commands that made a page, without absolute paths, and where they ran."""
    lines = (f"    {printable(without_paths(line))}" for command in commands for line in command.split("\n"))
    return "Made by\n\n" + "\n".join(lines) + f"\n\n{sentences}"


def listed_values(rows: Iterable[ResultRow], column: str) -> str:
    values = dict.fromkeys(getattr(row.identity, column) for row in rows)
    return ", ".join(markdown_text(str(value)) for value in values if value)


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)
