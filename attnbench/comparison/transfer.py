"""Transfer of finished cells to another machine: rows, settings and environments in one file, no weights, no code.

The file is compressed if its name ends in .gz: rows repeat their settings, and it is then a thirtieth as long.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

from attnbench.results.files import read_json_lines, replace_file, to_line
from attnbench.results.row_files import is_complete, parse_results
from attnbench.settings.errors import UserError
from attnbench.settings.text import MAX_JSON_BYTES, parse_json, parse_yaml, read_bounded

CELLS = "cells.jsonl.gz"
"""Such a file in a published page's folder, of findings in a folder a finding."""

CARRIED = re.compile(
    r"(comparison|freeze)\.json|(cells/)?[^/]+/(results/[^/]+\.jsonl|environment[^/]*\.json|config\.yaml)"
)
"""Paths in an experiment's folder that such a file may hold."""

MAX_CELLS_BYTES = 2**29
"""Longest file, unpacked: hundreds of cells have some ten megabytes."""


def export_cells(experiment: Path, target: Path) -> int:
    """Write all complete results of an experiment's folder, with what made them, as JSON lines; return their number.

    Raises:
        UserError: there are none, or the file cannot be written.
    """
    files = [*experiment.glob("*/results/*.jsonl"), *experiment.glob("cells/*/results/*.jsonl")]
    results = [path for path in sorted(files) if is_complete(path)]
    if not results:
        raise UserError(f"export={target}: {experiment} has no complete results")
    folders = dict.fromkeys(path.parents[1] for path in results)
    beside = [path for folder in folders for name in ("environment*.json", "config.yaml") for path in folder.glob(name)]
    beside += [path for name in ("comparison.json", "freeze.json") for path in experiment.glob(name)]
    lines = [
        to_line({"path": path.relative_to(experiment).as_posix(), "text": read_bounded(path, MAX_JSON_BYTES)})
        for path in (*beside, *results)
    ]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, "".join(lines))
    except OSError as error:
        raise UserError(f"export={target}: {error.strerror}; name a file that can be written") from None
    return len(results)


def import_cells(source: Path, experiment: Path) -> int:
    """Take over what `export_cells` wrote, but for results that are complete here; return the number of new ones.

    Everything is checked before anything is written: a file that is refused leaves the experiment as it was.

    Raises:
        UserError: the file is torn or no such file, names a path outside a cell's own folder, or holds what is none of
            a cell's files.
    """
    lines = read_json_lines(source, MAX_CELLS_BYTES)
    if lines.torn or not lines.objects:
        raise UserError(f"{source}: {'its last line is torn' if lines.torn else 'is empty'}; export it again")
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as staging:
        for index, content in enumerate(lines.objects):
            path, text = _entry(content)
            if path is None or text is None or path in texts:
                raise UserError(f"{lines.where(index)}: not a line that export= writes")
            link = _link(experiment, path)
            if link is not None:
                raise UserError(f"{lines.where(index)}: {link} is a symbolic link, over which nothing is written")
            try:
                _check(Path(path), text, Path(staging))
            except (UserError, ValueError) as error:
                raise UserError(f"{lines.where(index)}: {path} is not what its name says ({_brief(error)})") from None
            texts[path] = text
    new = {path: text for path, text in texts.items() if not _is_there(experiment / path)}
    # Results last: what is complete then has its environment beside it.
    for path in sorted(new, key=lambda path: path.endswith(".jsonl")):
        (experiment / path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(experiment / path, new[path])
    return sum(path.endswith(".jsonl") for path in new)


def _entry(content: dict[str, Any]) -> tuple[str | None, str | None]:
    """Path and text of a line; None for what cannot be one."""
    path, text = content.get("path"), content.get("text")
    if not (isinstance(path, str) and path.isprintable() and CARRIED.fullmatch(path)):
        return None, None
    # Names longer than file systems have would only be found out while writing.
    is_legal = all(part not in (".", "..") and len(part.encode()) < 240 for part in path.split("/"))
    return (path if is_legal else None), (text if isinstance(text, str) else None)


def _link(experiment: Path, path: str) -> Path | None:
    """First symbolic link on the path, which might lead out of the experiment."""
    parts = path.split("/")
    paths = [experiment.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return next((path for path in paths if path.is_symlink()), None)


def _check(path: Path, text: str, staging: Path) -> None:
    """Refuse a text that is no results file of this folder and name, and no JSON or yaml of a cell."""
    if path.suffix == ".jsonl":
        copy = staging / "results.jsonl"
        copy.write_text(text, encoding="utf-8")
        names = {f"{row.identity.evaluation}-{row.identity.config_hash}" for row in parse_results(copy)}
        if names != {path.stem}:
            raise ValueError(f"rows of {', '.join(sorted(names)) or 'nothing'}")
    else:
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        if not isinstance(content, dict):
            raise ValueError("no names and values")


def _is_there(path: Path) -> bool:
    """True where the file stays; a results file that was cut off is replaced."""
    return is_complete(path) if path.suffix == ".jsonl" else path.exists()


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
