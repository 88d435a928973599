"""List and compare runs: tables on a terminal, tab-separated columns elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from attnbench.machine.signals import answering
from attnbench.report.run_pair import comparison_tables, score_text
from attnbench.report.sections.words import metric_name
from attnbench.results.metrics import is_timed
from attnbench.results.rows import MIXER_OPTIONS, TRAINING, ResultRow, is_search
from attnbench.results.runs import Run, find_runs, keep, select
from attnbench.results.tables import NOTHING, Table, print_table, sittings_line
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.escape import printable
from attnbench.settings.schema import SELECTION_SEED, STATUSES, RunsSettings
from attnbench.verdict.axes import grouped

MIB = 2**20
HALF_A_YEAR = 183 * 86400
MAX_NOTES = 10


def show_runs(settings: RunsSettings) -> Path:
    """List or compare runs; return the outputs folder."""
    outputs, filters = Path(settings.outputs_dir), settings.filters()
    show = _print_to_terminal if sys.stdout.isatty() else _print_columns
    sort = (settings.sort or "").removeprefix("-").replace(" ", "_")
    runs = keep(find_runs(outputs, filters.get("experiments"), metric=sort), filters)
    runs = _sorted(runs, sort, descending=(settings.sort or "").startswith("-")) if sort else runs
    if settings.compare is not None:
        chosen = [select(runs, name) for name in settings.compare]
        if twice := [run.folder for run in chosen if [it.folder for it in chosen].count(run.folder) > 1]:
            raise UserError(f"compare={settings.compare}: {twice[0]} is named twice; name another")
        show(comparison_tables(chosen, show_all=settings.all, in_full=show is _print_columns))
    elif show is _print_columns:
        show([_columns(runs) if filters or sort else overview(runs, in_full=True)])
    else:
        show(list_tables(runs) if filters or sort else [overview(runs)])
    return outputs


SORTS: dict[str, Callable[[Run], Any]] = {
    "when": lambda run: run.modified,
    "size": lambda run: run.num_bytes,
    "seed": lambda run: (run.seed is None, run.seed),
    "what": lambda run: run.what,
}
"""Columns that runs can be sorted by, besides metrics."""


def _sorted(runs: Sequence[Run], by: str, *, descending: bool) -> list[Run]:
    if by in SORTS:
        return sorted(runs, key=SORTS[by], reverse=descending)
    values = {run.folder: value for run in runs if (value := _value_of(run, by)) is not None}
    if not values:
        known = [*SORTS, *dict.fromkeys(row.measurement.metric for run in runs for row in run.scores.values())]
        raise UserError(f"sort={by}: no run has it{did_you_mean(by, known)}; there is {', '.join(known)}, and others")
    measured = [run for run in runs if run.folder in values]
    ordered = sorted(measured, key=lambda run: values[run.folder], reverse=descending)
    return [*ordered, *(run for run in runs if run.folder not in values)]


def _value_of(run: Run, metric: str) -> float | None:
    measured = [row.measurement for row in run.scores.values() if row.measurement.metric == metric]
    return next((it.value for it in measured if it.value is not None), None)


def _print_to_terminal(tables: Iterable[Table]) -> None:
    with answering() as output:
        console = Console(file=output)
        for table in tables:
            print_table(table, console)


def _print_columns(tables: Iterable[Table]) -> None:
    for table in tables:
        with answering() as output:
            for line in [table.headers, *table.lines]:
                print("\t".join(printable(str(cell)) for cell in line), file=output)
        for note in table.notes:
            print(printable(note), file=sys.stderr)


def overview(runs: Sequence[Run], *, in_full: bool = False) -> Table:
    groups = grouped(runs, lambda run: run.experiment)
    states = [status for status in STATUSES[1:] if in_full or any(run.status == status for run in runs)]
    ordered = sorted(groups.items(), key=lambda entry: max(run.modified for run in entry[1]))
    lines = [
        [
            name,
            str(sum(not run.is_cell for run in group)),
            str(sum(run.is_cell for run in group)),
            *(str(sum(run.status == status for run in group)) for status in states),
            _when(max(run.modified for run in group), in_full=in_full),
            _size(sum(run.num_bytes for run in group), in_full=in_full),
        ]
        for name, group in ordered
    ]
    headers = ["experiment", "language models", "other runs", *states, "last change", "bytes" if in_full else "MiB"]
    total = sum(run.num_bytes for run in runs)
    notes = [f"{len(runs)} runs, {_size(total)} MiB; attnbench runs NAME lists those of one experiment."]
    return Table(headers=headers, lines=lines, notes=[] if in_full else notes)


def list_tables(runs: Sequence[Run]) -> list[Table]:
    groups = grouped(runs, lambda run: (run.experiment, ", ".join(filter(None, (_kind(run), _corpus(run))))))
    if not groups:
        return [Table(headers=["run"], lines=[], notes=["No run matches."])]
    return [_list(f"{experiment}: {kind}", group) for (experiment, kind), group in groups.items()]


def _kind(run: Run) -> str:
    evaluation = next(iter(run.scores), None)
    if run.is_cell or (evaluation is not None and TRAINING not in run.scores):
        return evaluation or run.what.partition("-")[0]
    return "language models"


def _corpus(run: Run) -> str:
    return next((row.identity.corpus for row in run.scores.values() if row.identity.corpus is not None), "")


def _list(title: str, runs: Sequence[Run]) -> Table:
    by_run = [{_score_key(name, row): score_text(row) for name, row in _shown(run).items()} for run in runs]
    columns = list(dict.fromkeys(key for scores in by_run for key in scores))
    with_state = any(run.status != "finished" for run in runs)
    lines = []
    for run, scores in zip(runs, by_run, strict=True):
        at_step = run.status in ("unfinished", "running") and run.step is not None
        state = [f"{run.status}, step {run.step:,}" if at_step else run.status] if with_state else []
        lines.append([*_labels(run), *state, *(scores.get(column, NOTHING) for column in columns)])
    headers = [*LABELS, *(["state"] if with_state else []), *map(_score_name, columns)]
    timed: dict[str, list[str]] = {}
    for name, row in (entry for run in runs for entry in _shown(run).items()):
        measurement = row.measurement
        if measurement.value is not None and is_timed(measurement.metric, measurement.unit):
            timed.setdefault(_score_name(_score_key(name, row)), []).append(row.measured_in)
    searches = ["s0, s1: seeds of a search of the learning rate."] if any(is_search(_seed(run)) for run in runs) else []
    reasons = [f"{run.hash} {run.status}: {run.reason}" for run in runs if run.reason]
    more = [f"{len(reasons) - MAX_NOTES} more have a reason."] if len(reasons) > MAX_NOTES else []
    return Table(
        title=title,
        lead=sittings_line(timed),
        headers=headers,
        lines=lines,
        notes=[*searches, *reasons[:MAX_NOTES], *more],
        num_labels=2,
    )


LABELS = ("run", "what", "seed", "when", "MiB")


def _labels(run: Run) -> list[str]:
    seed = NOTHING if run.seed is None else str(run.seed)
    seed = f"s{_seed(run) - SELECTION_SEED}" if is_search(_seed(run)) else seed
    # A terminal breaks lines between words.
    what = _what(run).replace("-", " ").replace("sequence_length", "length") if run.is_cell else _what(run)
    return [run.hash, what, seed, _when(run.modified), _size(run.num_bytes)]


def _what(run: Run) -> str:
    """Return a run's name, with the class of a layer from outside: module-tiny-T256 (my_layer:MyLayer)."""
    options = next((row.measurement.settings.get(MIXER_OPTIONS) for row in run.scores.values()), None)
    named = (options.get("path") or options.get("layer")) if isinstance(options, dict) else None
    return f"{run.what} ({named})" if named else run.what


def _seed(run: Run) -> int:
    return run.seed or 0


def _shown(run: Run) -> Mapping[str, ResultRow]:
    return {name: row for name, row in run.scores.items() if name != TRAINING} or run.scores


def _score_key(evaluation: str, row: ResultRow) -> tuple[str, str]:
    measurement = row.measurement
    settings = measurement.settings
    name = f"{settings.get('split', '')} {metric_name(measurement.metric, measurement.unit)}".strip()
    return evaluation, f"{name}, length {settings['length']:,}" if "beyond_training" in settings else name


def _score_name(key: tuple[str, str]) -> str:
    return key[1]


def _columns(runs: Sequence[Run]) -> Table:
    headers = ["path", "experiment", "what", "seed", "status", "step", "changed", "bytes", "corpus", "scores"]
    lines = [
        [
            str(run.folder),
            run.experiment,
            _what(run),
            "" if run.seed is None else str(run.seed),
            run.status,
            "" if run.step is None else str(run.step),
            _when(run.modified, in_full=True),
            str(run.num_bytes),
            _corpus(run),
            " ".join(
                f"{name}.{row.measurement.metric}={score_text(row, in_full=True)}" for name, row in run.scores.items()
            ),
        ]
        for run in runs
    ]
    return Table(headers=headers, lines=lines)


def _when(seconds: float, *, in_full: bool = False) -> str:
    moment = datetime.fromtimestamp(seconds).astimezone()
    if in_full:
        return moment.isoformat(timespec="seconds")
    is_recent = abs(time.time() - seconds) < HALF_A_YEAR
    return f"{moment.day:>2} {moment:%b %H:%M}" if is_recent else f"{moment.day:>2} {moment:%b  %Y}"


def _size(num_bytes: int, *, in_full: bool = False) -> str:
    if in_full:
        return str(num_bytes)
    return f"{num_bytes / MIB:,.0f}" if num_bytes >= 10 * MIB else f"{num_bytes / MIB:.1f}"
