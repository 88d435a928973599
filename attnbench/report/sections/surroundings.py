"""Parts around the mixers: options in which variants differ apart from the mixer, and a table of all parts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from attnbench.report.sections import words
from attnbench.report.sections.verdicts import MANY
from attnbench.results.corpora import split_name
from attnbench.results.rows import MIXER_OPTIONS, ResultRow, is_search
from attnbench.results.tables import NOTHING, Table
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF, RecipeSettings

if TYPE_CHECKING:
    from attnbench.mixers.base import Mixer

PARTS = tuple(entry.name for entry in fields(RecipeSettings) if entry.name != "name")
"""Options that are parts around a mixer."""

Options = dict[str, tuple[str, dict[str, Any]]]

ACTIVATION = "activation of query, key and value"
"""Activation applied after projection and convolution: fixed by the mixer's class, but compared like an option."""

OFF = {"none", "0", "off"}
"""Shown values of a part that is off, which equals having no such part."""

LACKS = object()

ALIKE = "All variants agree in every option that more than one mixer has."


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    name: str
    values: dict[str, list[str]]
    lacking: list[str]

    @property
    def is_lacked(self) -> bool:
        """True for a part that is on in some variants and does not exist in others."""
        return self.name in PARTS and bool(self.lacking) and not self.values.keys() <= OFF


def surroundings(rows: Sequence[ResultRow]) -> list[str]:
    """Return sentences on options in which variants differ; evaluations that agree share a sentence.

    An option that only one mixer has belongs to that mixer, unless it is one of PARTS.
    """
    options = _options(rows)
    if not any(len(by_variant) > 1 for by_variant in options.values()):
        return []
    groups: list[tuple[list[str], Options]] = []
    for evaluation, by_variant in options.items():
        for names, known in groups:
            if _agree(known, by_variant):
                names.append(evaluation)
                known.update(by_variant)
                break
        else:
            groups.append(([evaluation], dict(by_variant)))
    # In the report's order, with variants that the first evaluation lacks.
    order = dict.fromkeys(row.identity.variant for row in rows)
    ordered = [(names, {it: known[it] for it in order if it in known}) for names, known in groups]
    told = [(names, "; ".join(map(_groups_text, _differing(known)))) for names, known in ordered]
    where = "In {} the" if len(groups) > 1 else "The"
    texts = [f"{where.format(words.listed(names))} variants differ in {text}." for names, text in told if text]
    return [*(texts or [ALIKE]), *_undone(options), *_beside_papers(options)]


def surroundings_table(rows: Sequence[ResultRow]) -> Table | None:
    lines: dict[tuple[str, ...], list[str]] = {}
    for evaluation, by_variant in _options(rows).items():
        for variant, (_, options) in by_variant.items():
            values = [_shown(options[name]) if name in options else "has none" for name in PARTS]
            values.append(_shown(options.get(ACTIVATION, "unknown")))
            lines.setdefault((variant, *values), []).append(evaluation)
    if not lines:
        return None
    return Table(
        headers=["Variant", "In", *(name.replace("_", " ") for name in (*PARTS, ACTIVATION))],
        lines=[[variant, words.listed(names), *values] for (variant, *values), names in sorted(lines.items())],
        num_labels=2,
    )


def _options(rows: Sequence[ResultRow]) -> dict[str, Options]:
    by_evaluation: dict[str, Options] = {}
    for row in rows:
        options, identity = row.measurement.settings.get(MIXER_OPTIONS), row.identity
        if isinstance(options, dict | list) and not is_search(identity.seed):
            by_variant = by_evaluation.setdefault(split_name(identity.evaluation)[0], {})
            if identity.variant not in by_variant:
                joined = _of_all_layers(options if isinstance(options, list) else [options])
                classes = _known(identity.mixer)
                activations = dict.fromkeys("silu" if cls.activates(joined) else "none" for cls in classes)
                joined |= {ACTIVATION: words.listed(activations)} if activations else {}
                by_variant[identity.variant] = identity.mixer, joined
    return by_evaluation


@cache
def _targets() -> dict[str, str]:
    """Return `_target_` of attnbench's mixers by class name."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CONF / "attn").glob("*.yaml"))]
    targets = [content["_target_"] for content in files]
    return {it.rpartition(".")[2]: it for it in targets if it.startswith("attnbench.mixers.")}


def _known(mixer: str) -> "list[type[Mixer]]":
    """Return the classes of a mixer's names, or none. Imported here: mixers load torch, and commands answer signals
    before that."""
    from attnbench.mixers.base import Mixer

    names, targets = mixer.split("+"), _targets()
    return [resolve(targets[name], Mixer) for name in names] if all(name in targets for name in names) else []


def _undone(options: dict[str, Options]) -> list[str]:
    from attnbench.mixers.recipe import undone

    found = {
        f"{name} ({_shown(given[name])}) undoes the mixer of {variant}: {reason}.": None
        for by_variant in options.values()
        for variant, (mixer, given) in by_variant.items()
        for cls in _known(mixer)
        for name, reason in undone(cls, given).items()
    }
    return list(found)


def _beside_papers(options: dict[str, Options]) -> list[str]:
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for by_variant in options.values():
        for variant, (mixer, given) in by_variant.items():
            for cls in _known(mixer):
                for name, value in cls.paper_options.items():
                    if name in given and given[name] != value:
                        found.setdefault((name, _shown(given[name]), _shown(value)), {})[variant] = None
    return [
        f"{name} is {own} for {words.listed(variants)}, where the mixer's paper has {paper}."
        for (name, own, paper), variants in found.items()
    ]


def _of_all_layers(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined = {}
    for name in dict.fromkeys(name for of_layer in options for name in of_layer):
        values = [of_layer[name] for of_layer in options if name in of_layer]
        shown = dict.fromkeys(map(_shown, values))
        joined[name] = values[0] if len(shown) == 1 else words.listed(shown)
    return joined


def _agree(known: Options, others: Options) -> bool:
    """Return True if variants in both have equal values of every option in which variants of the union differ."""
    names = {it.name for union in ({**known, **others}, {**others, **known}) for it in _differing(union)}
    return all(
        known[variant][1].get(name, LACKS) == others[variant][1].get(name, LACKS)
        for variant in known.keys() & others.keys()
        for name in names
    )


def _differing(by_variant: Options) -> list[Differing]:
    found = []
    for name in dict.fromkeys(name for _, options in by_variant.values() for name in options):
        values: dict[str, list[str]] = {}
        for variant, (_, options) in by_variant.items():
            if name in options:
                values.setdefault(_shown(options[name]), []).append(variant)
        having = [variant for group in values.values() for variant in group]
        option = Differing(name=name, values=values, lacking=[it for it in by_variant if it not in having])
        if len(values) > 1 or option.is_lacked:
            found.append(option)
    return found


def _groups_text(differing: Differing) -> str:
    """Return "conv_size (4: gated_deltanet; 0: softmax, linear)".

    With more than MANY variants, the largest group is "all others", and variants without the option are named only if
    it is a part that is on in others.
    """
    groups, lacking = dict(differing.values), differing.lacking
    is_many = sum(map(len, groups.values())) + len(lacking) > MANY
    if differing.is_lacked or (lacking and not is_many):
        groups["has none"] = lacking
    if is_many:
        largest = max(groups, key=lambda value: len(groups[value]))
        del groups[largest]
        groups[largest] = ["all others that have it" if lacking and not differing.is_lacked else "all others"]
    parts = [f"{value}: {', '.join(variants)}" for value, variants in groups.items()]
    return f"{differing.name} ({'; '.join(parts)})"


def _shown(value: Any) -> str:
    named = {None: "none", True: "on", False: "off"}
    if value is None or isinstance(value, bool):
        return named[value]
    return words.shown_value(value) if isinstance(value, int | float | str) else json.dumps(value) or NOTHING
