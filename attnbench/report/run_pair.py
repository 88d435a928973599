"""Compare runs: scores, the primary ones first, and settings that differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.report.sections.words import capitalized, heading, metric_name, status_name, where
from attnbench.results.metrics import is_timed
from attnbench.results.numbers import format_number
from attnbench.results.rows import ResultRow
from attnbench.results.runs import Run
from attnbench.results.tables import NOTHING, Table, read_folders, sittings_line
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_JSON_BYTES, MAX_YAML_BYTES, parse_json, parse_yaml, read_bounded
from attnbench.verdict.axes import axes

MAX_CHARACTERS = 60

MOST_SCORES = 5
"""Scores that are shown without all=true."""

NAMES_RUN = ("config_hash", "resolved.config_hash")


def score_text(row: ResultRow, *, in_full: bool = False) -> str:
    """Format the number of a row, or its status; `in_full` is for programs."""
    value = row.measurement.value
    if value is None:
        return row.measurement.status if in_full else status_name(row.measurement.status)
    return repr(value) if in_full else format_number(value)


def comparison_tables(runs: Sequence[Run], *, show_all: bool = False, in_full: bool = False) -> list[Table]:
    """Return the scores of the runs side by side, and the settings in which they differ.

    Args:
        show_all: all scores, and also settings that a run lacks, of its environment, or resolved from others; otherwise
            MOST_SCORES scores.
        in_full: for programs: all of it, with every digit.
    """
    show_all |= in_full
    names = [run.hash if len({it.hash for it in runs}) == len(runs) else str(run.folder) for run in runs]
    rows = [read_folders([run.folder], last_only=True) for run in runs]
    corpora = [{row.identity.corpus for row in group if row.identity.corpus is not None} for group in rows]
    is_alike = all(of_run == corpora[0] for of_run in corpora)
    scores = _ordered(rows)
    shown = scores if show_all else scores[:MOST_SCORES]
    left = len(scores) - len(shown)
    notes = [
        *(f"{name} is {run.folder}, {run.status}." for name, run in zip(names, runs, strict=True)),
        *([] if is_alike else ["They have different corpora: scores are listed without a difference."]),
        *([f"{left} scores more: all=true shows them."] if left else []),
    ]
    with_difference = len(runs) == 2
    table = Table(
        title="scores",
        lead=sittings_line({_score_label(beside): _sittings(beside) for beside in shown}),
        headers=["score", *names, *["difference"] * with_difference],
        lines=[
            [
                _score_label(beside),
                *(_number(row, in_full) for row in beside),
                *[_difference(beside, is_alike, in_full)] * with_difference,
            ]
            for beside in shown
        ],
        notes=notes,
    )
    return [table, _configuration(runs, names, show_all=show_all, in_full=in_full)]


def _configuration(runs: Sequence[Run], names: Sequence[str], *, show_all: bool, in_full: bool) -> Table:
    settings = [_described(run) for run in runs]
    known = list(dict.fromkeys(name for values in settings for name in values))
    differing = [name for name in known if len({values.get(name) for values in settings}) > 1]
    shown = [name for name in differing if show_all or _is_chosen(name, settings)]

    def brief(text: str) -> str:
        return text if in_full or len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."

    lines = [[name, *(brief(values.get(name, NOTHING)) for values in settings)] for name in shown]
    notes = [f"{len(known) - len(differing)} of {len(known)} settings are equal."]
    left = len(differing) - len(shown)
    notes += [f"{left} more differ: all=true shows them."] if left else []
    return Table(title="configuration", headers=["setting", *names], lines=lines, notes=notes)


def _is_chosen(name: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Tell if all runs have a setting that a command line gives."""
    is_given = not name.startswith(("environment.", "resolved.")) and name != "named_options"
    return is_given and all(name in values for values in settings)


def _described(run: Run) -> dict[str, str]:
    try:
        config = parse_yaml(read_bounded(run.folder / "config.yaml", MAX_YAML_BYTES))
        path = run.folder / "environment.json"
        environment = parse_json(read_bounded(path, MAX_JSON_BYTES)) if path.exists() else None
        if not isinstance(config, dict):
            raise ValueError("no names and values")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(
            f"compare: {run.folder}: its config.yaml or environment.json cannot be read ({reason}); name another run"
        ) from None
    flat = {**_flat(config, ""), **(_flat(environment, "environment.") if environment is not None else {})}
    return {name: text for name, text in flat.items() if name not in NAMES_RUN}


def _flat(values: Any, prefix: str) -> dict[str, str]:
    if not isinstance(values, dict) or not values:
        return {prefix.removesuffix("."): values if isinstance(values, str) else json.dumps(values, default=str)}
    return {name: text for key, value in values.items() for name, text in _flat(value, f"{prefix}{key}.").items()}


def _ordered(rows: Sequence[Sequence[ResultRow]]) -> list[list[ResultRow | None]]:
    """Return each score with its row of every run: primary metrics first, then headlines, then all others."""
    # Imported here: these load torch.
    from attnbench.verdict.seeds import figures
    from attnbench.verdict.summary import headline_columns, primary_metrics

    scores: dict[tuple[str, str, str], list[ResultRow | None]] = {}
    for index, row in ((index, row) for index, group in enumerate(rows) for row in group):
        metric, settings = row.measurement.metric, axes(row.measurement.settings)
        key = (row.identity.evaluation, metric, json.dumps(settings, sort_keys=True))
        scores.setdefault(key, [None] * len(rows))[index] = row
    evaluations = list(dict.fromkeys(evaluation for evaluation, _, _ in scores))
    measured, primaries = [it for group in rows for it in figures(group)], primary_metrics(evaluations)
    columns = [column for evaluation in evaluations for column in headline_columns(measured, evaluation)]
    columns.sort(key=lambda it: it.evaluation not in primaries or it.judged_by != primaries[it.evaluation].metric)
    first = [(it.evaluation, it.metric, json.dumps(it.settings, sort_keys=True)) for it in columns]
    return [scores[key] for key in dict.fromkeys([*(key for key in first if key in scores), *scores])]


def _score_label(pair: Sequence[ResultRow | None]) -> str:
    measurement = next(row.measurement for row in pair if row is not None)
    text = where(measurement.settings)
    name = metric_name(measurement.metric, measurement.unit)
    evaluation = next(row.identity.evaluation for row in pair if row is not None)
    named = capitalized(name) if name.startswith(evaluation) else f"{heading(evaluation)}: {name}"
    return f"{named}, {text}" if text else named


def _number(row: ResultRow | None, in_full: bool) -> str:
    if row is None:
        return "" if in_full else NOTHING
    return score_text(row, in_full=in_full)


def _sittings(pair: Sequence[ResultRow | None]) -> list[str]:
    rows = [row for row in pair if row is not None and is_timed(row.measurement.metric, row.measurement.unit)]
    return [row.measured_in for row in rows if row.measurement.value is not None]


def _difference(pair: Sequence[ResultRow | None], with_difference: bool, in_full: bool) -> str:
    values = [row.measurement.value if row is not None else None for row in pair]
    if not with_difference or len({*_sittings(pair)}) > 1 or values[0] is None or values[1] is None:
        return "" if in_full else NOTHING
    difference = values[1] - values[0]
    return repr(difference) if in_full else f"{'+' * (difference > 0)}{format_number(difference)}"
