"""Compare two runs: settings that differ, and scores."""

import json
from collections.abc import Sequence
from typing import Any

from attnbench.report.sections.words import metric_name, status_name, where
from attnbench.results.metrics import is_timed
from attnbench.results.numbers import format_number
from attnbench.results.rows import ResultRow
from attnbench.results.runs import Run
from attnbench.results.tables import NOTHING, Table, read_folders, sittings_line
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import MAX_JSON_BYTES, MAX_YAML_BYTES, parse_json, parse_yaml, read_bounded
from attnbench.verdict.axes import axes

MAX_CHARACTERS = 60

NAMES_RUN = ("config_hash", "resolved.config_hash")


def score_text(row: ResultRow, *, in_full: bool = False) -> str:
    """Format the number of a row, or its status; `in_full` is for programs."""
    value = row.measurement.value
    if value is None:
        return row.measurement.status if in_full else status_name(row.measurement.status)
    return repr(value) if in_full else format_number(value)


def comparison_tables(first: Run, second: Run, *, in_full: bool = False) -> list[Table]:
    pair = (first, second)
    names = [run.hash if first.hash != second.hash else str(run.folder) for run in pair]
    settings = [_described(run) for run in pair]
    known = list(dict.fromkeys([*settings[0], *settings[1]]))
    differing = [name for name in known if settings[0].get(name) != settings[1].get(name)]

    def brief(text: str) -> str:
        return text if in_full or len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."

    lines = [[name, *(brief(values.get(name, NOTHING)) for values in settings)] for name in differing]
    rows = [read_folders([run.folder], last_only=True) for run in pair]
    corpora = [{row.identity.corpus for row in group if row.identity.corpus is not None} for group in rows]
    is_alike = corpora[0] == corpora[1]
    notes = [
        f"{len(known) - len(differing)} of {len(known)} settings are equal.",
        *(f"{name} is {run.folder}, {run.status}." for name, run in zip(names, pair, strict=True)),
        *([] if is_alike else ["They have different corpora: scores are listed without a difference."]),
    ]
    configuration = Table(title="configuration", headers=["setting", *names], lines=lines, notes=notes)
    return [configuration, *_score_tables(rows, names, with_difference=is_alike, in_full=in_full)]


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


def _score_tables(
    rows: Sequence[Sequence[ResultRow]], names: Sequence[str], *, with_difference: bool, in_full: bool
) -> list[Table]:
    groups: dict[str, dict[tuple[str, str], list[ResultRow | None]]] = {}
    for index, group in enumerate(rows):
        for row in group:
            measurement = row.measurement
            axis_text = json.dumps(axes(measurement.settings), sort_keys=True)
            beside = groups.setdefault(row.identity.evaluation, {}).setdefault(
                (measurement.metric, axis_text), [None, None]
            )
            beside[index] = row
    return [
        Table(
            title=evaluation,
            lead=sittings_line({_score_label(pair): _sittings(pair) for pair in by_score.values()}),
            headers=["score", *names, "difference"],
            lines=[
                [
                    _score_label(pair),
                    *(_number(row, in_full) for row in pair),
                    _difference(pair, with_difference, in_full),
                ]
                for pair in by_score.values()
            ],
        )
        for evaluation, by_score in groups.items()
    ]


def _score_label(pair: Sequence[ResultRow | None]) -> str:
    measurement = next(row.measurement for row in pair if row is not None)
    text = where(measurement.settings)
    name = metric_name(measurement.metric, measurement.unit)
    return f"{name}, {text}" if text else name


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
