"""Removal of runs and checkpoints: the plan, its losses, and the removal.

Only files with names of attnbench are removed, in folders that identify themselves as runs. Links are not followed,
held folders and finished results stay, and so does a run with a file of the user's in a checkpoint.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnbench.machine.locks import folder_holder, folder_lock
from attnbench.results.checkpoint_files import CHECKPOINT, is_own_file, remove_checkpoint
from attnbench.results.files import FILES, half_replaced, is_file
from attnbench.results.runs import RESULTS, Run, read_run
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_YAML_BYTES, read_bounded

CONFIG = "config.yaml"

LOST = {
    "unfinished": "what they have trained so far: the same command begins anew",
    "failed": "what they have trained so far, and why they failed: the same command begins anew",
    "checkpoints": "nothing that a command reads: their results are complete, and stay",
    "weights": "attnbench evaluate and generate refuse these runs, and what needs a model trains it anew; results stay",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One folder and its files to remove."""

    run: Run
    paths: list[Path]
    """Files, and folders with everything in them."""
    num_bytes: int
    loss: str
    """Loss, in words."""
    remains: list[str]
    """Other files, for which the folder stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Removals, and runs that stay although they were meant."""

    removals: list[Removal]
    kept: dict[str, list[Run]]
    """By reason."""


def plan_pruning(runs: Sequence[Run], kind: str, outputs: Path) -> Pruning:
    """Plan the removal of a kind, see settings.runs.PRUNED."""
    removals, kept = [], {}
    holders = {name: folder_holder(outputs / name) for name in dict.fromkeys(run.experiment for run in runs)}
    for run in (run for run in runs if _is_meant(run, kind)):
        holder = run.reason if run.status == "running" else holders[run.experiment]
        reason = f"in use by {holder}" if holder else _obstacle(run, kind)
        if reason:
            kept.setdefault(reason, []).append(run)
        else:
            removals.append(_removal(run, kind))
    return Pruning(removals=removals, kept=kept)


def _is_meant(run: Run, kind: str) -> bool:
    if kind in ("unfinished", "failed"):
        return run.status in (kind, "running")
    has_checkpoints = (run.folder / "checkpoint").is_symlink() or _checkpoints(run) != []
    return run.is_cell == (kind == "checkpoints") and has_checkpoints


def _obstacle(run: Run, kind: str) -> str:
    if not _is_ours(run):
        return "no config.yaml or results file in it says that attnbench made it"
    # Results behind a link are not read, so that a finished run looks unfinished.
    for path in (run.folder / "results", run.folder / "checkpoint", *_checkpoints(run)):
        if path.is_symlink():
            return f"{path.relative_to(run.folder)} is a link, and links are not followed"
    if run.status == "damaged":
        return "its results were altered, or cannot be read"
    if kind in ("unfinished", "failed") and (run.scores or (run.folder / "checkpoint" / "final").exists()):
        return "it holds results, or a finished training"
    if kind in ("checkpoints", "weights") and run.status != "finished":
        return f"{run.status}: the same command may go on from its checkpoint"
    for path in (path for folder in _checkpoints(run) for path in sorted(folder.iterdir())):
        if not (is_own_file(path) and is_file(path)):
            return f"{path.relative_to(run.folder)} is not attnbench's; once it is moved, the rest can be removed"
    return ""


def _is_ours(run: Run) -> bool:
    """Tell if the folder's own files say that it is the run that its name says."""
    if any((found := RESULTS.fullmatch(path.name)) and found["hash"] == run.hash for path in _inside(run, "results")):
        return True
    try:
        config = read_bounded(run.folder / CONFIG, MAX_YAML_BYTES)
    except (OSError, ValueError, UserError):
        return False
    return re.search(rf"^ *config_hash: '?{run.hash}'?$", config, flags=re.MULTILINE) is not None


def _inside(run: Run, name: str) -> list[Path]:
    folder = run.folder / name
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _removal(run: Run, kind: str) -> Removal:
    paths = _checkpoints(run)
    remains = []
    if kind in ("unfinished", "failed"):
        paths += [path for path in _inside(run, "results") if RESULTS.fullmatch(path.name) and is_file(path)]
        files = [path for path in sorted(run.folder.iterdir()) if FILES.fullmatch(path.name) and is_file(path)]
        # config.yaml goes last: it identifies the folder if the removal is interrupted.
        paths += [*half_replaced(run.folder), *sorted(files, key=lambda path: path.name == CONFIG)]
        remains = _remains(run, paths)
    num_bytes = sum(map(_size, paths))
    return Removal(run=run, paths=paths, num_bytes=num_bytes, loss=_loss(run, kind), remains=remains)


def _loss(run: Run, kind: str) -> str:
    if kind in ("checkpoints", "weights"):
        return "weights"
    step = f"{run.step} steps" if run.step is not None else "no step kept"
    return f"{step}; {run.reason}" if run.reason else step


def _remains(run: Run, paths: Sequence[Path]) -> list[str]:
    """Name the files that are not attnbench's."""
    gone = {*paths, run.folder / ".lock"}
    left = []
    for parent, folders, names in os.walk(run.folder):
        folders[:] = [name for name in folders if Path(parent, name) not in gone]
        left += [Path(parent, name) for name in [*names, *folders] if Path(parent, name) not in gone]
    is_ours = {run.folder / "results", run.folder / "checkpoint"}
    return sorted(path.relative_to(run.folder).as_posix() for path in left if path not in is_ours or path.is_symlink())


def _checkpoints(run: Run) -> list[Path]:
    named = [path for path in _inside(run, "checkpoint") if CHECKPOINT.fullmatch(path.name)]
    return [path for path in named if path.is_dir() or path.is_symlink()]


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(Path(parent, name).lstat().st_size for parent, _, names in os.walk(path) for name in names)


def remove(pruning: Pruning, kind: str, outputs: Path) -> Iterator[tuple[Removal, str]]:
    """Carry out the removals, and yield each with the reason why it stays; empty: it is gone.

    Each folder is locked and checked again.
    """
    for removal in pruning.removals:
        run = removal.run
        try:
            with folder_lock(outputs / run.experiment, waits=False), folder_lock(run.folder, waits=False):
                now = read_run(run.folder, run.experiment, is_held=True)
                reason = _obstacle(now, kind) if _is_meant(now, kind) else "another command has gone on with it"
                for path in _removal(now, kind).paths if not reason else ():
                    _remove(path)
        except (UserError, OSError) as error:
            reason = str(error) if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"
        if not reason:
            # Not while the lock lies in it; a folder with anything left stays.
            for folder in (run.folder / "checkpoint", run.folder / "results", run.folder):
                with suppress(OSError):
                    folder.rmdir()
        yield removal, reason


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_checkpoint(path)
    else:
        path.unlink()
