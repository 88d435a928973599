"""Axes: the settings of a row that identify its measurement, not the run that made it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attnbench.results.protocol import PROTOCOL
from attnbench.results.rows import (
    EVALUATION_OPTIONS,
    IMPORTED,
    MIXER_OPTIONS,
    REFERENCE,
    REFERENCE_RATIO,
    Identity,
    ResultRow,
)

PER_RUN = (
    *("learning_rate", "recipe", "not_applicable", "rate_at_edge", "backend"),
    *("stack", "stack_too_large", "compiled", "load_average", REFERENCE, REFERENCE_RATIO),
    *(MIXER_OPTIONS, EVALUATION_OPTIONS, PROTOCOL, IMPORTED),
)
"""Settings of a run, which may differ between the seeds of one figure. Options of an evaluation that differ become axes
first (`with_options_as_axes`)."""

Item = TypeVar("Item")
Group = TypeVar("Group")
Key = tuple[str, str, str]
"""One metric at one setting: evaluation, metric, settings as JSON."""


def grouped(items: Iterable[Item], key: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """Group items by a key, in order of appearance."""
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def axes(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in PER_RUN}


def is_chance(name: str) -> bool:
    return name == "chance" or name.startswith("chance_")


def key_of(row: ResultRow) -> Key:
    settings = axes(row.measurement.settings)
    return row.identity.evaluation, row.measurement.metric, json.dumps(settings, sort_keys=True)


def distinguish_variants(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Rename models of one variant that differ in length, size, precision or options: "linear conv_size=4"."""
    rows = with_options_as_axes(rows)
    of_mixers = [row for row in rows if row.identity.mixer]
    measured = grouped(of_mixers, lambda row: (row.identity.variant, row.identity.seed, key_of(row)))
    differing: dict[str, set[str]] = {}
    for (variant, *_), group in measured.items():
        if len(group) > 1:
            differing.setdefault(variant, set()).update(_differing([_endings(row) for row in group]))

    def renamed(row: ResultRow) -> Identity:
        names = differing.get(row.identity.variant, set()) if row.identity.mixer else set()
        if not names:
            return row.identity
        endings = {name: ending for tier in _endings(row) for name, ending in tier.items() if name in names}
        return replace(row.identity, variant=" ".join((row.identity.variant, *endings.values())))

    return [replace(row, identity=renamed(row)) for row in rows]


def _endings(row: ResultRow) -> list[dict[str, str]]:
    """Possible endings of a variant's name, by setting; later dicts serve only ties."""
    identity, settings = row.identity, row.measurement.settings
    options = settings.get(MIXER_OPTIONS)
    # A hybrid has a list of options.
    options = options if isinstance(options, dict) else {}
    return [
        {"model": identity.model, "seq_len": f"T{identity.seq_len}", "precision": identity.precision},
        {"recipe": settings.get("recipe", "without a recipe")},
        {f"attn.{name}": f"{name}={it if isinstance(it, str) else json.dumps(it)}" for name, it in options.items()},
        {"backend": identity.backend},
        {"config_hash": identity.config_hash},
    ]


def _differing(endings: Sequence[list[dict[str, str]]]) -> list[str]:
    names: list[str] = []
    told: list[tuple[str, ...]] = [() for _ in endings]
    for tier in zip(*endings, strict=True):
        if len({*told}) == len(told):
            break
        for name in dict.fromkeys(name for ending in tier for name in ending):
            values = [ending.get(name, "") for ending in tier]
            if len({*values}) > 1:
                names.append(name)
                told = [(*before, value) for before, value in zip(told, values, strict=True)]
    return names


def with_precision(rows: list[ResultRow]) -> list[ResultRow]:
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
    """Make differing options of an evaluation settings: trainings of 500 and of 1,500 steps are neither averaged nor
    compared."""
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

    def with_axes(row: ResultRow) -> ResultRow:
        settings = row.measurement.settings
        names = differing.get(row.identity.evaluation, {})
        added = {name: settings.get(EVALUATION_OPTIONS, {}).get(name) for name in names}
        return _with_settings(row, {**added, **settings}) if added else row

    return [with_axes(row) for row in rows]


def _with_settings(row: ResultRow, settings: dict[str, Any]) -> ResultRow:
    return replace(row, measurement=replace(row.measurement, settings=settings))
