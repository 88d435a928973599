"""Finished cells carried to another machine: rows, settings and environments in one file, no weights and no code."""

import re
from pathlib import Path

from attnbench.errors import UserError
from attnbench.jsonlines import read_json_lines, replace_file, to_line
from attnbench.results import is_complete, read_results

CARRIED = re.compile(r"comparison\.json|(cells/)?[^/]+/(results/[^/]+\.jsonl|environment[^/]*\.json|config\.yaml)")
"""Paths in an experiment's folder that such a file may hold."""


def export_cells(experiment: Path, target: Path) -> int:
    """Writes all complete results of an experiment's folder, with what made them, as JSON lines; returns how many.

    Raises:
        UserError: there are none.
    """
    results = [path for path in sorted(experiment.glob("**/results/*.jsonl")) if is_complete(path)]
    if not results:
        raise UserError(f"export={target}: {experiment} has no complete results")
    folders = dict.fromkeys(path.parents[1] for path in results)
    beside = [path for folder in folders for name in ("environment*.json", "config.yaml") for path in folder.glob(name)]
    beside += experiment.glob("comparison.json")
    lines = [
        to_line({"path": path.relative_to(experiment).as_posix(), "text": path.read_text(encoding="utf-8")})
        for path in (*beside, *results)
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, "".join(lines))
    return len(results)


def import_cells(source: Path, experiment: Path) -> int:
    """Takes over what `export_cells` wrote; results that are complete here are kept. Returns how many came new.

    Raises:
        UserError: the file is no such file, or names a path outside a cell's own folder.
    """
    lines, number = read_json_lines(source), 0
    for index, content in enumerate(lines.objects):
        path, text = content.get("path"), content.get("text")
        if not isinstance(path, str) or not isinstance(text, str) or not CARRIED.fullmatch(path) or ".." in path:
            raise UserError(f"{lines.where(index)}: not a line that export= writes")
        target = experiment / path
        if path.endswith(".jsonl"):
            if is_complete(target):
                continue
            number += 1
        elif target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text)
        if path.endswith(".jsonl"):
            _check(target)
    if lines.torn:
        raise UserError(f"{source}: its last line is torn; export it again")
    return number


def _check(path: Path) -> None:
    """Removes again what is no results file."""
    try:
        read_results(path)
    except UserError:
        path.unlink()
        raise
