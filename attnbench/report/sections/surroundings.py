"""Words on what stands around the mixers: options in which variants differ beyond the mixer itself, and all of them."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from attnbench.report.sections import words
from attnbench.report.sections.verdicts import MANY
from attnbench.results.corpora import split_name
from attnbench.results.rows import MIXER_OPTIONS, ResultRow, is_search
from attnbench.results.tables import NOTHING, Table
from attnbench.settings.schema import RecipeSettings

PARTS = tuple(entry.name for entry in fields(RecipeSettings) if entry.name != "name")
"""Options of mixers that are parts around them."""

ALIKE = "Alike around all mixers, in every option that more than one mixer has."


def surroundings(rows: Sequence[ResultRow]) -> list[str]:
    """Say in which options that several mixers have their variants differ, evaluations that are alike together.

    An option that one mixer alone has is part of that mixer; one that a mixer has not is listed as such.

    Returns:
        No sentence where the rows do not carry their options, as former ones do not.
    """
    options = _options(rows)
    if not any(len(by_variant) > 1 for by_variant in options.values()):
        return []
    texts: dict[str, list[str]] = {}
    for evaluation, by_variant in options.items():
        differing = [text for name in _shared(by_variant) if (text := _differing(name, by_variant))]
        if differing:
            texts.setdefault("; ".join(differing), []).append(evaluation)
    if not texts:
        return [ALIKE]
    return [f"In {words.listed(names)} the variants differ in {text}." for text, names in texts.items()]


def surroundings_table(rows: Sequence[ResultRow]) -> Table | None:
    """Write what stands around each variant, evaluations that have it alike in one line; None where no row says so."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for evaluation, by_variant in _options(rows).items():
        for variant, (_, options) in by_variant.items():
            values = (_shown(options[name]) if name in options else "has none" for name in PARTS)
            lines.setdefault((variant, *values), []).append(evaluation)
    if not lines:
        return None
    return Table(
        headers=["Variant", "In", *(name.replace("_", " ") for name in PARTS)],
        lines=[[variant, words.listed(names), *values] for (variant, *values), names in sorted(lines.items())],
        num_labels=2,
    )


def _options(rows: Sequence[ResultRow]) -> dict[str, dict[str, tuple[str, dict[str, Any]]]]:
    """Take mixer and options of each variant from its first row of an evaluation."""
    by_evaluation: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
    for row in rows:
        options, identity = row.measurement.settings.get(MIXER_OPTIONS), row.identity
        if isinstance(options, dict) and not is_search(identity.seed):
            by_variant = by_evaluation.setdefault(split_name(identity.evaluation)[0], {})
            by_variant.setdefault(identity.variant, (identity.mixer, options))
    return by_evaluation


def _shared(by_variant: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """List options that variants of several mixers have, or in which those of one mixer differ."""
    names = dict.fromkeys(name for _, options in by_variant.values() for name in options)
    shared = []
    for name in names:
        mixers = [mixer for mixer, options in by_variant.values() if name in options]
        if len(set(mixers)) > 1 or len(mixers) > 1:
            shared.append(name)
    return shared


def _differing(name: str, by_variant: dict[str, tuple[str, dict[str, Any]]]) -> str:
    """Write "conv_size (4: gated_deltanet; 0: softmax, linear)"; empty where all that have the option are alike.

    Of more than MANY variants the largest group is "all others"."""
    values: dict[str, list[str]] = {}
    for variant, (_, options) in by_variant.items():
        values.setdefault(_shown(options[name]) if name in options else "", []).append(variant)
    lacking = values.pop("", [])
    if len(values) < 2:
        return ""
    groups = values | ({"has none": lacking} if lacking else {})
    if len(by_variant) > MANY:
        largest = max(groups, key=lambda value: len(groups[value]))
        del groups[largest]
        groups[largest] = ["all others"]
    parts = [f"{value}: {', '.join(variants)}" for value, variants in groups.items()]
    return f"{name} ({'; '.join(parts)})"


def _shown(value: Any) -> str:
    named = {None: "none", True: "on", False: "off"}
    if value is None or isinstance(value, bool):
        return named[value]
    return words.shown_value(value) if isinstance(value, int | float | str) else json.dumps(value) or NOTHING
