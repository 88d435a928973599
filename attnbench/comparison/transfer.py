"""Transfer of finished cells to another machine: rows, settings and environments in one file, no weights, no code.

The file is compressed if its name ends in .gz: rows repeat their settings, and it is then a thirtieth as long.
comparison/imports.py takes over what such a file holds.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from attnbench.comparison.freeze import FREEZE
from attnbench.results.files import read_json_lines, replace_file, to_line
from attnbench.settings.errors import UserError
from attnbench.settings.text import MAX_JSON_BYTES, open_regular, parse_json, parse_yaml, read_bounded, without_paths

CELLS = "cells.jsonl.gz"
"""Such a file in a published page's folder, of findings in a folder a finding."""

CARRIED = re.compile(
    r"(comparison|freeze)\.json|(?P<folder>(cells/)?[^/]+-[0-9a-f]{8})/"
    r"(?P<name>results/[^/]+-[0-9a-f]{8}\.jsonl|environment(-[0-9a-f]{8})?\.json|config\.yaml)"
)
"""Paths in an experiment's folder that such a file may hold. A file of a former version has comparison.json, which is
made anew here."""

MAX_CELLS_BYTES = 2**28
"""Longest file, unpacked: hundreds of cells have some ten megabytes."""

MAX_CHARACTERS = {".jsonl": 2**23, ".json": 2**14, ".yaml": 2**15}
"""Longest file of a cell, by its kind: several times the longest that are published."""


@dataclass
class CarriedCells:
    """Content of a file that `export_cells` wrote."""

    source: Path
    sha256: str
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    """By cell's folder, relative to the experiment's, the texts of its files by their names in the folder."""
    line_of: dict[str, int] = field(default_factory=dict)
    """By path the line that it stands on."""
    freeze: str | None = None
    """Text of freeze.json."""
    parsed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path the content of what was parsed by now."""

    def where(self, path: str) -> str:
        """File and line of a path, and the path, as error messages name them."""
        return f"{self.source}:{self.line_of[path]}: {path}"


def export_cells(experiment: Path, target: Path) -> int:
    """Write all complete results of an experiment's folder, with what made them, as JSON lines; return their number.

    Raises:
        UserError: there are none, or the file cannot be written.
    """
    files = [*experiment.glob("*/results/*.jsonl"), *experiment.glob("cells/*/results/*.jsonl")]
    # The user's own files lie there too, under other names.
    results = [path for path in sorted(files) if _carried(path.relative_to(experiment))]
    if not results:
        raise UserError(f"export={target}: {experiment} has no complete results")
    folders = dict.fromkeys(path.parents[1] for path in results)
    beside = [path for folder in folders for name in ("environment*.json", "config.yaml") for path in folder.glob(name)]
    beside = [path for path in beside if _carried(path.relative_to(experiment))]
    for path in (folder / name for folder in folders for name in ("environment.json", "config.yaml")):
        if path not in beside:
            raise UserError(f"export={target}: {path} is missing, and import= takes no cell without; remove its folder")
    texts = {path: _text(path) for path in (*beside, *experiment.glob(FREEZE), *results)}
    for path, text in texts.items():
        if path.name != FREEZE and len(text) > MAX_CHARACTERS[path.suffix]:
            raise UserError(
                f"export={target}: {path} is longer than the {MAX_CHARACTERS[path.suffix]} characters of such"
            )
    lines = [to_line({"path": path.relative_to(experiment).as_posix(), "text": text}) for path, text in texts.items()]
    if sum(map(len, lines)) > MAX_CELLS_BYTES:
        raise UserError(f"export={target}: longer than the {MAX_CELLS_BYTES} bytes that such a file may have")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, "".join(lines))
    except OSError as error:
        raise UserError(f"export={target}: {error.strerror}; name a file that can be written") from None
    return len(results)


def _carried(path: str | Path) -> re.Match[str] | None:
    """Match a path in an experiment's folder that such a file may hold; None for any other."""
    text = path if isinstance(path, str) else path.as_posix()
    # Names longer than file systems have would only be found out while writing.
    is_legal = text.isprintable() and all(len(part.encode()) < 240 for part in text.split("/"))
    return CARRIED.fullmatch(text) if is_legal else None


def _is_unicode(text: str) -> bool:
    """False where half of a character that takes two stands alone, as it can in JSON and in no file."""
    return text.encode(errors="ignore").decode() == text


def _text(path: Path) -> str:
    """Read a file as it is exported: without absolute paths, which name the user and nothing on another machine."""
    text = read_bounded(path, MAX_JSON_BYTES)
    if path.suffix == ".yaml":
        content = parse_yaml(text)
        shown = without_paths(content)
        return text if shown == content else yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    if path.suffix == ".json":
        content = parse_json(text)
        shown = without_paths(content)
        return text if shown == content else json.dumps(shown, indent=1) + "\n"
    objects = [json.loads(line) for line in text.splitlines()]
    shown = without_paths(objects)
    return text if shown == objects else with_ending("".join(map(to_line, shown[:-1])), shown[-1])


def with_ending(rows: str, ending: dict[str, Any]) -> str:
    """Write the text of a results file from the lines of its rows and its last record, whose checksum is made anew."""
    checked = {"sha256": hashlib.sha256(rows.encode()).hexdigest()} if "sha256" in ending else {}
    return rows + to_line(ending | checked)


def read_cells(source: Path) -> CarriedCells:
    """Read a file that `export_cells` wrote; of a cell's files nothing is parsed yet.

    Raises:
        UserError: the file is torn or no such file, names a path outside a cell's own folder, or holds a text that is
            longer than any of a cell.
    """
    lines = read_json_lines(source, MAX_CELLS_BYTES, MAX_CELLS_BYTES)
    if lines.torn or not lines.objects:
        raise UserError(f"{source}: {'its last line is torn' if lines.torn else 'is empty'}; export it again")
    with open_regular(source) as file:
        cells = CarriedCells(source=source, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    for index, content in enumerate(lines.objects):
        path, text = content.get("path", ""), content.get("text")
        found = _carried(path) if isinstance(path, str) else None
        if found is None or not isinstance(text, str) or not _is_unicode(text) or path in cells.line_of:
            raise UserError(f"{lines.where(index)}: not a line that export= writes")
        cells.line_of[path] = index + 1
        folder, name = found["folder"], found["name"]
        if path == FREEZE:
            cells.freeze = text
        if folder is None:
            continue
        # The parser of yaml takes seconds for what is as long as a run's may be.
        if len(text) > MAX_CHARACTERS[Path(name).suffix]:
            raise UserError(
                f"{cells.where(path)}: longer than the {MAX_CHARACTERS[Path(name).suffix]} characters of such"
            )
        cells.folders.setdefault(folder, {})[name] = text
    return cells
