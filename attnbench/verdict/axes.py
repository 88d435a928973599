"""Axes: the settings of a row that tell what it is of, and which those of a run are that do not."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from attnbench.results.protocol import PROTOCOL
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS, Identity, ResultRow

PER_RUN = (
    *("learning_rate", "recipe", "not_applicable", "rate_at_edge", "backend"),
    *("stack", "stack_too_large", "compiled"),
    *(MIXER_OPTIONS, EVALUATION_OPTIONS, PROTOCOL),
)
"""Settings of a run that are no axis, and may differ between the seeds of one figure. Options of an evaluation that do
differ become axes first, see `with_options_as_axes`."""

ENDINGS = {"model": " {}", "seq_len": " T{}", "precision": " {}"}
"""Columns that make another variant of one, and how they follow its name."""

Key = tuple[str, str, str]
"""One metric at one setting: evaluation, metric, settings as JSON."""


def axes(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings without those that belong to a run."""
    return {name: value for name, value in settings.items() if name not in PER_RUN}


def is_chance(name: str) -> bool:
    """Tell if a setting is a level to compare with, and no axis."""
    return name == "chance" or name.startswith("chance_")


def key_of(row: ResultRow) -> Key:
    """Tell what rows of several seeds and variants are of."""
    settings = axes(row.measurement.settings)
    return row.identity.evaluation, row.measurement.metric, json.dumps(settings, sort_keys=True)


def distinguish_variants(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Rename models of one variant at several lengths, sizes or precisions, a sweep's say: "softmax T512".

    Where nothing else tells those of a variant and seed apart, their hash does. Of operators, which are no mixer's,
    `figures` takes what differs for a setting.
    """
    rows = with_options_as_axes(rows)
    measured: dict[tuple[Any, ...], list[Identity]] = {}
    for row in (row for row in rows if row.identity.mixer):
        measured.setdefault((row.identity.variant, row.identity.seed, *key_of(row)), []).append(row.identity)
    endings: dict[str, dict[str, str]] = {}
    for (variant, *_), identities in measured.items():
        if len(identities) > 1:
            ending = endings.setdefault(variant, {})
            for column, form in ENDINGS.items():
                if len({getattr(identity, column) for identity in identities}) > 1:
                    ending[column] = form
            if not ending:
                ending["config_hash"] = " {}"

    def renamed(identity: Identity) -> Identity:
        forms = endings.get(identity.variant, {}) if identity.mixer else {}
        ending = "".join(form.format(getattr(identity, column)) for column, form in forms.items())
        return replace(identity, variant=identity.variant + ending)

    return [replace(row, identity=renamed(row.identity)) for row in rows]


def with_precision(rows: list[ResultRow]) -> list[ResultRow]:
    """Put the precision of operators, which are no mixer's, among their settings if it varies."""
    precisions = {row.identity.precision for row in rows if not row.identity.mixer}
    if len(precisions) < 2:
        return rows
    return [
        row
        if row.identity.mixer
        else _with_settings(row, {**row.measurement.settings, "precision": row.identity.precision})
        for row in rows
    ]


def with_options_as_axes(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Put those options of their evaluation among the axes in which rows of one metric and setting differ.

    What was trained for 500 steps is then at another setting than what was trained for 1,500, and neither averaged nor
    compared with it.
    """
    by_key: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        options = row.measurement.settings.get(EVALUATION_OPTIONS)
        if isinstance(options, dict):
            by_key.setdefault(key_of(row), []).append(options)
    differing: dict[str, dict[str, None]] = {}
    for (evaluation, *_), group in by_key.items():
        for name in dict.fromkeys(name for options in group for name in options):
            if len({json.dumps(options.get(name), sort_keys=True) for options in group}) > 1:
                differing.setdefault(evaluation, {})[name] = None
    return [_with_axes(row, differing.get(row.identity.evaluation, {})) for row in rows]


def _with_axes(row: ResultRow, names: Iterable[str]) -> ResultRow:
    settings = row.measurement.settings
    added = {name: settings.get(EVALUATION_OPTIONS, {}).get(name) for name in names}
    return _with_settings(row, {**added, **settings}) if added else row


def _with_settings(row: ResultRow, settings: dict[str, Any]) -> ResultRow:
    return replace(row, measurement=replace(row.measurement, settings=settings))
