"""Export of finished runs to one file: rows, settings and environments, no weights, no code. imports.py reads it.

The file is compressed if its name ends in .gz, to about a thirtieth.
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
from attnbench.settings.escape import without_paths
from attnbench.settings.untrusted import MAX_JSON_BYTES, open_regular, parse_json, parse_yaml, read_bounded

CELLS = "cells.jsonl.gz"
"""Name of such a file beside a published page, or in the folder of a finding."""

CARRIED = re.compile(
    r"(comparison|freeze)\.json|(?P<folder>(cells/)?[^/]+-[0-9a-f]{8})/"
    r"(?P<name>results/[^/]+-[0-9a-f]{8}\.jsonl|environment(-[0-9a-f]{8})?\.json|config\.yaml)"
)
"""Paths that such a file may hold. Former files have comparison.json, which is ignored."""

MAX_CELLS_BYTES = 2**28
"""Longest file, unpacked; hundreds of runs take about ten megabytes."""

MAX_CHARACTERS = {".jsonl": 2**23, ".json": 2**14, ".yaml": 2**15}
"""Longest file of a run by suffix, several times the longest published ones."""


@dataclass
class CarriedCells:
    """Content of a file that `export_cells` wrote."""

    source: Path
    sha256: str
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    """Texts of files, by run folder (relative to the experiment) and file name."""
    line_of: dict[str, int] = field(default_factory=dict)
    """Line of each path."""
    freeze: str | None = None
    """Text of freeze.json."""
    parsed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parsed contents by path, filled on demand."""

    def where(self, path: str) -> str:
        """File, line and path for an error message."""
        return f"{self.source}:{self.line_of[path]}: {path}"


def export_cells(experiment: Path, target: Path) -> int:
    """Write all results of an experiment with their configs and environments as JSON lines; return their number."""
    files = [*experiment.glob("*/results/*.jsonl"), *experiment.glob("cells/*/results/*.jsonl")]
    # Files of the user have other names.
    results = [path for path in sorted(files) if _carried(path.relative_to(experiment))]
    if not results:
        raise UserError(f"export={target}: {experiment} has no complete results")
    folders = dict.fromkeys(path.parents[1] for path in results)
    beside = [path for folder in folders for name in ("environment*.json", "config.yaml") for path in folder.glob(name)]
    beside = [path for path in beside if _carried(path.relative_to(experiment))]
    for path in (folder / name for folder in folders for name in ("environment.json", "config.yaml")):
        if path not in beside:
            raise UserError(f"export={target}: {path} is missing, and import= takes no run without; remove its folder")
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
    """Match a path that such a file may hold."""
    text = path if isinstance(path, str) else path.as_posix()
    # Longer names fail on most file systems.
    is_legal = text.isprintable() and all(len(part.encode()) < 240 for part in text.split("/"))
    return CARRIED.fullmatch(text) if is_legal else None


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON allows and a file does not."""
    return text.encode(errors="ignore").decode() == text


def _text(path: Path) -> str:
    """Read a file without absolute paths, which would name the user."""
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
    """Join the rows of a results file and its last record, with a new checksum."""
    checked = {"sha256": hashlib.sha256(rows.encode()).hexdigest()} if "sha256" in ending else {}
    return rows + to_line(ending | checked)


def read_cells(source: Path) -> CarriedCells:
    """The files of runs are not parsed yet. Refused are a torn file or one of another kind, a path outside of a cell's
    folder, and a text that is too long."""
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
        # The yaml parser takes seconds for a longer text.
        if len(text) > MAX_CHARACTERS[Path(name).suffix]:
            raise UserError(
                f"{cells.where(path)}: longer than the {MAX_CHARACTERS[Path(name).suffix]} characters of such"
            )
        cells.folders.setdefault(folder, {})[name] = text
    return cells
