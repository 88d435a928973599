"""Parts around the mixers: options in which variants differ apart from the mixer, and a table of all parts."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from attnbench.report.sections import words
from attnbench.results.corpora import split_name
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS, TRAINING, ResultRow, is_search
from attnbench.results.tables import NOTHING, Table
from attnbench.settings.registry import own_targets, resolve
from attnbench.settings.schema import RecipeSettings
from attnbench.verdict.axes import grouped
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import Figure

if TYPE_CHECKING:
    from attnbench.mixers.base import Mixer

PARTS = tuple(entry.name for entry in fields(RecipeSettings) if entry.name != "name")
"""Options that are parts around a mixer."""

PART_NAMES = {"rotary_theta": "rotary positions", "conv_size": "convolution", "qk_norm": "norm of query and key"}

Options = dict[str, tuple[str, dict[str, Any]]]

ACTIVATION = "activation of query, key and value"
"""Activation applied after projection and convolution: fixed by the mixer's class, but compared like an option."""

OFF = {"none", "0", "off"}
"""Shown values of a part that is off, which equals having no such part."""

LACKS = "has none"

EQUAL = "Equal for all variants: "

COSTS = {"forward_flops_per_token": "forward FLOPs per token", "state_bytes": "bytes of decoding state"}
"""Metrics of costs that may differ."""

MOST_NAMED, MOST_VALUES = 3, 3
"""Most variants with one value, and most values, that the sentence on what differs names behind a part."""

MATCHED = 2.0
"""Largest difference of parameters, in percent, that is called equal."""


def surroundings(rows: Sequence[ResultRow]) -> list[str]:
    """Return sentences on options that undo a mixer, or that its paper has otherwise."""
    options = _options(rows)
    return [*_undone(options), *_beside_papers(options)]


def equal_parts(rows: Sequence[ResultRow], figures: Sequence[Figure], rates: Sequence[Choice]) -> str:
    """Say what all variants have alike, and what differs."""
    options = _options(rows)
    equal, apart = ["data"], [f"{_plain(name)}{_whose(options, name)}" for name in _differing(options)]
    steps: dict[str, dict[str, set[int | None]]] = {}
    seeds: dict[str, dict[str, set[int | str]]] = {}
    sizes: dict[tuple[str, str], set[int]] = {}
    for it, settings in ((row.identity, row.measurement.settings) for row in rows if not is_search(row.identity.seed)):
        num_steps = settings.get(EVALUATION_OPTIONS, {}).get("num_steps")
        steps.setdefault(it.evaluation, {}).setdefault(it.variant, set()).add(num_steps)
        seeds.setdefault(it.evaluation, {}).setdefault(it.variant, set()).add(it.seed)
        if it.parameters:
            sizes.setdefault((it.evaluation, it.model), set()).add(it.parameters)
    has_same_steps = all(len({*map(frozenset, by_variant.values())}) == 1 for by_variant in steps.values())
    (equal if has_same_steps else apart).append("budget of steps")
    has_same_seeds = all(len({*map(frozenset, by_variant.values())}) == 1 for by_variant in seeds.values())
    (equal if has_same_seeds else apart).append("seeds")
    if any(len(it.grid) > 1 for it in rates):
        equal.append("search of the learning rate")
    elif rates:
        tasks = grouped(rates, lambda it: json.dumps([it.evaluation, it.settings])).values()
        is_one = all(len({it.chosen for it in group}) == 1 for group in tasks)
        (equal if is_one else apart).append("learning rate (not searched)")
    if sizes:
        most = 100 * max(max(group) / min(group) - 1 for group in sizes.values())
        within = f" (within {f'{most:.2g}' if most < 10 else f'{most:.0f}'} %)" * (most > 0)
        (equal if most <= MATCHED else apart).append(f"parameters{within}")
    if alike := _alike(rows):
        equal.append(f"around each mixer {words.listed(alike)}")
    for metric, name in COSTS.items():
        costs = [it for it in figures if it.metric == metric]
        of_text = [it for it in costs if split_name(it.evaluation)[0] == TRAINING]
        model = " of the language model" * bool(of_text)
        first = next(iter(of_text or costs), None)
        taken = [it for it in of_text or costs if first and it.key == first.key and it.mean is not None]
        alike = grouped(taken, lambda it: it.mean or 0.0)
        if len(alike) > 1:
            least, most = (_cost(alike[end(alike)]) for end in (min, max))
            apart.append(f"{name}{model} ({least} to {most})")
    return f"{'; '.join(equal)}." + f" Different: {'; '.join(apart)}." * bool(apart)


def _cost(alike: Sequence[Figure]) -> str:
    names = words.listed(it.label for it in alike) if len(alike) < 3 else f"{len(alike)} variants"
    return f"{names} {words.outcome(alike[0])}"


def surroundings_table(rows: Sequence[ResultRow]) -> Table | None:
    options = _options(rows)
    columns = dict.fromkeys([*PARTS, ACTIVATION, *_differing(options)])
    lines: dict[tuple[str, ...], list[str]] = {}
    for evaluation, by_variant in options.items():
        for variant, (_, given) in by_variant.items():
            values = [_shown(given[name]) if name in given else LACKS for name in columns]
            lines.setdefault((variant, *values), []).append(evaluation)
    if not lines:
        return None
    return Table(
        headers=["Variant", "In", *(name.replace("_", " ") for name in columns)],
        lines=[[variant, words.listed(names), *values] for (variant, *values), names in sorted(lines.items())],
        num_labels=2,
    )


def _plain(name: str) -> str:
    return PART_NAMES.get(name, name.replace("_", " "))


def _values(by_variant: Options, name: str) -> dict[str, None]:
    return dict.fromkeys(_shown(given[name]) if name in given else LACKS for _, given in by_variant.values())


def _alike(rows: Sequence[ResultRow]) -> list[str]:
    """Name the parts that are on and equal around every mixer."""
    found = {name: {it for by in _options(rows).values() for it in _values(by, name)} for name in PARTS}
    alike = [(name, *values) for name, values in found.items() if len(values) == 1 and not values & {*OFF, LACKS}]
    return [f"{_plain(name)}{f' ({value})' * (value != 'on')}" for name, value in alike]


def _differing(options: dict[str, Options]) -> list[str]:
    """Name the options in which variants differ. One that only some mixers have belongs to them, unless it is a part
    that is on."""
    found: dict[str, None] = {}
    for by_variant in options.values():
        for name in dict.fromkeys(name for _, given in by_variant.values() for name in given):
            values = _values(by_variant, name).keys()
            of_mixers = values if name in PARTS and not values <= {*OFF, LACKS} else values - {LACKS}
            if len(of_mixers) > 1:
                found[name] = None
    return [*found]


def _whose(options: dict[str, Options], name: str) -> str:
    """Name the variants with each value of a part, as " (silu: linear and gated_deltanet only)"; empty for options of
    mixers, whose null is a default, and for many values."""
    found: dict[str, dict[str, None]] = {}
    for by_variant in options.values():
        for variant, (_, given) in by_variant.items():
            value = _shown(given[name]) if name in given else LACKS
            found.setdefault(variant, {})["none" if value in {*OFF, LACKS} else value] = None
    by_value = grouped(found, lambda variant: words.listed(found[variant]))
    if len(by_value) > MOST_VALUES or name not in {*PARTS, ACTIVATION}:
        return ""
    off = by_value.get("none", [])
    if len(by_value) > 2 or not off:
        return f" ({', '.join(f'{value}: {_counted(names)}' for value, names in by_value.items())})"
    [(value, on)] = [it for it in by_value.items() if it[0] != "none"]
    shown = "" if value == "on" or name == "rotary_theta" else f"{value}: "
    is_short = len(off) <= MOST_NAMED < len(on)
    return f" ({shown}{f'all but {_counted(off)}' if is_short else f'{_counted(on)} only'})"


def _counted(names: Sequence[str]) -> str:
    return words.listed(names) if len(names) <= MOST_NAMED else f"{len(names)} variants"


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


def _known(mixer: str) -> "list[type[Mixer]]":
    """Return the classes of a mixer's names, or none. Imported here: mixers load torch, and commands answer signals
    before that."""
    from attnbench.mixers.base import Mixer

    targets = {it.rpartition(".")[2]: it for it in own_targets("attn").values() if it.startswith("attnbench.mixers.")}
    names = mixer.split("+")
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


def _shown(value: Any) -> str:
    named = {None: "none", True: "on", False: "off"}
    if value is None or isinstance(value, bool):
        return named[value]
    return words.shown_value(value) if isinstance(value, int | float | str) else json.dumps(value) or NOTHING
