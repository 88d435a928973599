"""Runs and cells under outputs/, read without torch and without writing.

A run's folder ends in the eight hex digits of its identity and holds what attnbench writes there; others are passed by.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from attnbench.machine.locks import folder_holder
from attnbench.results.files import read_json_lines
from attnbench.results.row_files import begun, by_age, check_sum, sitting_of
from attnbench.results.rows import TRAINING, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_YAML_BYTES, read_bounded

NAME = re.compile(r"(?P<what>.+?)(-seed(?P<seed>[0-9]{1,10}))?-(?P<hash>[0-9a-f]{8})")
"""Name of a run's or a cell's folder."""

RESULTS = re.compile(r"(?P<evaluation>.+)-(?P<hash>[0-9a-f]{8}|[0-9]{4})\.jsonl")
"""Name of a results file; of operator tables it has the number of its cell."""

STEP = re.compile(r"step-([0-9]{8,})")

MAX_DEPTH = 4
"""Folders between outputs/ and a cell: outputs/findings/parity/cells/NAME."""

MAX_NEAR = 4
"""Names that a message about an unknown or ambiguous one lists."""

PREFERRED = (
    *({"split": "test"}, {"split": "validation"}, {"checkpoint": "best"}, {"context": "full"}),
    {"beyond_training": False},
)
"""Settings of the row that stands for a results file, applied in turn as long as a row has them."""

TIMED = ("tokens_per_second", "decode_tokens_per_second", "training_peak_mib", "step_milliseconds")
"""Metrics that stand for a file of timings: the first that it has, at the last setting with a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    experiment: str
    """Folder under outputs/ that it belongs to."""
    what: str
    """Its name without seed and hash: variant, model and length, or evaluation, variant, task and rate."""
    hash: str
    seed: int | None
    is_cell: bool
    """It lies in cells/."""
    status: str
    """See settings.runs.STATUSES."""
    reason: str = ""
    """Holder, error or fault, by status."""
    step: int | None = None
    """Step of the last checkpoint to resume from."""
    modified: float
    """Last change of a file, in seconds since 1970."""
    num_bytes: int
    """Size of all files; links do not count."""
    scores: Mapping[str, ResultRow] = field(default_factory=dict)
    """The row that stands for each evaluation."""


def find_runs(outputs: Path, experiments: Collection[str] | None = None, *, metric: str = "") -> list[Run]:
    """List the runs under outputs/ by experiment, the oldest first; links are skipped.

    Args:
        experiments: names; None: all.
        metric: stands for each results file that has it.
    """
    if not outputs.is_dir():
        what = "is a file" if outputs.exists() else "no such folder"
        raise UserError(f"outputs_dir={outputs}: {what}; what attnbench train and attnbench compare make lies there")
    folders = list(_run_folders(outputs, MAX_DEPTH))
    by_experiment: dict[str, list[Path]] = {}
    for folder in folders:
        by_experiment.setdefault(experiment_of(folder, outputs), []).append(folder)
    for name in experiments or ():
        if name not in by_experiment:
            raise UserError(f"experiment={name}: no runs in {outputs / name}{_near(name, by_experiment)}")
    wanted = sorted(by_experiment) if experiments is None else list(dict.fromkeys(experiments))
    return [
        run
        for name in wanted
        for run in sorted(
            (read_run(folder, name, metric=metric) for folder in by_experiment[name]), key=lambda run: run.modified
        )
    ]


def experiment_of(folder: Path, outputs: Path) -> str:
    """Return the experiment of a run's folder: demo, findings/parity."""
    parent = folder.parent.parent if folder.parent.name == "cells" else folder.parent
    return parent.relative_to(outputs).as_posix()


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = [entry for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in inside:
        path = Path(entry.path)
        if NAME.fullmatch(entry.name) and any(
            (path / name).exists() for name in ("config.yaml", "train.log", "results")
        ):
            yield path
        elif depth > 1:
            yield from _run_folders(path, depth - 1)


def read_run(folder: Path, experiment: str, *, metric: str = "") -> Run:
    """Read one folder, also a locked or altered one; `metric`: see `find_runs`."""
    named = NAME.fullmatch(folder.name)
    assert named is not None, folder
    sizes = dict(_files(folder))
    scores, fault = _scores(folder, sizes, metric)
    steps = [STEP.fullmatch(path.name) for path in {path.parent for path in sizes}]
    holder, failure = folder_holder(folder), _first_line(folder / "failed.txt")
    status, reason = (
        ("running", holder)
        if holder
        else ("damaged", fault)
        if fault
        else ("failed", failure)
        if failure
        else ("finished" if scores else "unfinished", "")
    )
    return Run(
        folder=folder,
        experiment=experiment,
        what=named["what"],
        hash=named["hash"],
        seed=int(named["seed"]) if named["seed"] is not None else None,
        is_cell=folder.parent.name == "cells",
        status=status,
        reason=reason,
        step=max((int(match[1]) for match in steps if match), default=None),
        modified=max((stat.st_mtime for stat in sizes.values()), default=0.0),
        num_bytes=sum(stat.st_size for stat in sizes.values()),
        scores=scores,
    )


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                yield path, path.lstat()
            except OSError:
                continue


def _scores(folder: Path, files: Mapping[Path, os.stat_result], metric: str) -> tuple[dict[str, ResultRow], str]:
    """Read the row that stands for each evaluation, and the fault of an altered file."""
    found, fault = [], ""
    for path in sorted(files):
        named = RESULTS.fullmatch(path.name)
        if named is None or path.parent != folder / "results" or not S_ISREG(files[path].st_mode):
            continue
        try:
            lines = read_json_lines(path)
            started = begun(lines)
            check_sum(lines)
            if len(lines.objects) > 1:
                row = replace(ResultRow.from_dict(_chosen(lines.objects[:-1], metric)), sitting=sitting_of(lines))
                found.append((by_age(path, started), named["evaluation"], row))
        except (UserError, ValueError) as error:
            fault = str(error)
    return {evaluation: row for _, evaluation, row in sorted(found, key=lambda it: it[0])}, fault


def _chosen(objects: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Choose the row that stands for a file: of `metric` if it has it; see PREFERRED and TIMED; or the first."""
    objects = [content for content in objects if content.get("metric") == metric] or objects
    scores = objects
    for wanted in PREFERRED:
        preferred = [content for content in scores if _has(content.get("settings"), wanted)]
        scores = preferred or scores
    if scores is not objects or objects[0].get("evaluation") == TRAINING:
        alike = [content for content in scores if content.get("metric") == scores[0].get("metric")]
        return max(alike, key=_trained_length)
    for metric in TIMED:
        timed = [content for content in objects if content.get("metric") == metric]
        if timed:
            return next((content for content in reversed(timed) if content.get("value") is not None), timed[0])
    return objects[0]


def _trained_length(content: Mapping[str, Any]) -> float:
    settings = content.get("settings")
    length = settings.get("length") if isinstance(settings, dict) and settings.get("beyond_training") is False else 0
    return length if isinstance(length, int | float) else 0


def _has(settings: Any, wanted: Mapping[str, Any]) -> bool:
    return isinstance(settings, dict) and wanted.items() <= settings.items()


def _first_line(path: Path) -> str:
    try:
        return next(iter(read_bounded(path, MAX_YAML_BYTES).splitlines()), "no reason was kept")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, UserError) as error:
        return f"{path.name} cannot be read ({getattr(error, 'strerror', error)})"


def keep(runs: Iterable[Run], filters: Mapping[str, Collection[str]]) -> list[Run]:
    """Keep the runs that match all filters."""
    runs = list(runs)
    for name, is_of, names_of in (("variant", _is_of_variant, _variants), ("evaluation", _is_of_evaluation, _scored)):
        for value in filters.get(name, ()):
            if not any(is_of(run, value) for run in runs):
                raise UserError(
                    f"{name}={value}: no run of it{_near(value, {it for run in runs for it in names_of(run)})}"
                )
        if name in filters:
            runs = [run for run in runs if any(is_of(run, value) for value in filters[name])]
    return [run for run in runs if "status" not in filters or run.status in filters["status"]]


def _variants(run: Run) -> set[str]:
    return {row.identity.variant for row in run.scores.values()}


def _scored(run: Run) -> set[str]:
    return {*run.scores}


def _is_of_variant(run: Run, variant: str) -> bool:
    # Without results nothing but the folder's name says whose it is.
    return variant in _variants(run) if run.scores else f"-{variant}-" in f"-{run.what}-"


def _is_of_evaluation(run: Run, evaluation: str) -> bool:
    if run.scores:
        return evaluation in run.scores
    return run.what.startswith(f"{evaluation}-") if run.is_cell else evaluation == TRAINING


def select(runs: Sequence[Run], name: str) -> Run:
    """Find a run by its path, name or hash, or the beginning of these.

    Raises:
        UserError: there is none, or several.
    """
    path = Path(name).resolve()
    exact = [run for run in runs if run.folder.resolve() == path or name in (run.folder.name, run.hash)]
    named = [run for run in runs if run.folder.name.startswith(name) or run.hash.startswith(name)] if name else []
    meant = exact or named
    if len(meant) == 1:
        return meant[0]
    if meant:
        shown = [f"{run.experiment}/{run.folder.name}" for run in meant[:MAX_NEAR]]
        more = [f"{len(meant) - MAX_NEAR} more"] if len(meant) > MAX_NEAR else []
        way_out = "a longer beginning, or the path of one, says which" if not exact else "the path of one says which"
        raise UserError(f"compare: {name} is {', '.join([*shown, *more])}; {way_out}")
    beginnings = {text[: len(name)]: text for run in runs for text in (run.folder.name, run.hash)}
    near = difflib.get_close_matches(name, beginnings, n=MAX_NEAR, cutoff=0.6)
    shown = f"near it: {', '.join(beginnings[it] for it in near)}" if near else "attnbench runs lists them"
    raise UserError(f"compare: {name} is no run; {shown}")


def _near(name: str, known: Iterable[str]) -> str:
    """Name similar names, or some that exist."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=MAX_NEAR, cutoff=0.6)
    if near:
        return f"; near it: {', '.join(near)}"
    shown = [*known[:MAX_NEAR], *([f"{len(known) - MAX_NEAR} more"] if len(known) > MAX_NEAR else [])]
    return f"; there is {', '.join(shown)}" if shown else "; there is none"
