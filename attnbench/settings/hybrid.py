"""Hybrids: different mixers in different layers, by a list of names with counts that is repeated over the depth.

A hybrid is one MixerSettings of the target HYBRID, with the options of each mixer by its name.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MixerSettings

HYBRID = "attnbench.settings.hybrid.Hybrid"
"""`_target_` of conf/attn/hybrid.yaml."""

TARGET = "_target_"


@dataclass(slots=True, kw_only=True)
class Hybrid:
    """Schema of conf/attn/hybrid.yaml."""

    layers: list[str]
    """Names of yamls of attn/, with a count for several layers in a row: [gated_deltanet*3, window]."""
    options: dict[str, dict[str, Any]]
    """Options of each mixer by its name that replace its yaml's; once read, all options and `_target_`."""


def is_hybrid(settings: MixerSettings) -> bool:
    return settings.target == HYBRID


def pattern(layers: Sequence[str]) -> list[str]:
    names = []
    for word in layers:
        entry = re.fullmatch(r"([\w.-]+)(?:\*(\w+))?", word)
        if entry is None:
            raise UserError(f"attn.layers={_shown(layers)}: {word} must be NAME or NAME*COUNT")
        name, count = entry[1], entry[2] or "1"
        if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= MAX_COUNT:
            raise UserError(f"attn.layers={_shown(layers)}: {word}: the count must be 1 to {MAX_COUNT}")
        names += [name] * int(count)
    if not names:
        raise UserError("attn.layers=[]: must name at least one mixer")
    if "hybrid" in names:
        raise UserError(f"attn.layers={_shown(layers)}: names a hybrid; a layer has one mixer")
    return names


MAX_COUNT = 1000


def with_parts(settings: MixerSettings, yaml_of: Callable[[str], Mapping[str, Any]]) -> MixerSettings:
    """Complete a command line's hybrid with all options of its mixers; `yaml_of` returns `_target_` and options of a
    yaml of attn/."""
    options = {"options": {}, **settings.options}
    check_options(Hybrid, options)
    layers, given = options["layers"], options["options"]
    names = list(dict.fromkeys(pattern(layers)))
    for name, values in given.items():
        if name not in names:
            raise UserError(
                f"attn.options.{name}: attn.layers={_shown(layers)} has no {name}; it has {', '.join(names)}"
            )
        if TARGET in values:
            raise UserError(f"attn.options.{name}.{TARGET}={values[TARGET]}: its yaml has the class")
    parts = {name: {**yaml_of(name), **given.get(name, {})} for name in names}
    for name, values in parts.items():
        missing = next((option for option, value in values.items() if value == "???"), None)
        if missing is not None:
            raise UserError(f"attn.options.{name}.{missing}: must be given")
    return replace(settings, options={"layers": list(layers), "options": parts})


def each(settings: MixerSettings, change: Callable[[MixerSettings, str], MixerSettings]) -> MixerSettings:
    """Return the settings with every mixer changed: those of a hybrid, or the only one. `change` gets a mixer's
    settings and the prefix of its options, "" or "options.window."."""
    if not is_hybrid(settings):
        return change(settings, "")
    changed = {}
    for name, part in parts_of(settings).items():
        with naming(name):
            part = change(part, f"options.{name}.")
        changed[name] = {TARGET: part.target, **part.options}
    return replace(settings, options={**settings.options, "options": changed})


def parts_of(settings: MixerSettings) -> dict[str, MixerSettings]:
    """Return the settings of a hybrid's mixers, or of the only mixer, by name."""
    if not is_hybrid(settings):
        return {settings.name: settings}
    try:
        parts = {}
        for name in pattern(settings.options["layers"]):
            options = dict(settings.options["options"][name])
            parts[name] = MixerSettings(name=name, target=str(options.pop(TARGET)), options=options)
        return parts
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"attn={settings.name}: not the settings of a hybrid ({error!r})") from None


def layers_of(settings: MixerSettings, num_layers: int) -> list[MixerSettings]:
    if not is_hybrid(settings):
        return [settings] * num_layers
    parts, names = parts_of(settings), pattern(settings.options["layers"])
    if num_layers % len(names):
        raise UserError(
            f"attn.layers={_shown(settings.options['layers'])}: {len(names)} layers, repeated, do not make "
            f"num_layers={num_layers}; a list that divides it does"
        )
    return [parts[name] for name in names] * (num_layers // len(names))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name options in errors as options of the hybrid."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if f"attn.options.{name}." not in text:
            text = re.sub(r"\battn\.(?=\w)", f"attn.options.{name}.", text)
        raise UserError(text if name in text else f"attn.options.{name}: {text}") from None


def classes_of(mixers: Sequence[MixerSettings]) -> str:
    """Return the different classes of the layers' mixers for tables: GatedDeltaNet+Window."""
    return "+".join(dict.fromkeys(mixer.target.rpartition(".")[2] for mixer in mixers))


def backends_of(mixers: Sequence[MixerSettings]) -> str:
    """Return the layers' backend, or the backend of each layer if they differ: torch+torch+triton."""
    backends = [mixer.options["backend"] for mixer in mixers]
    return backends[0] if len(set(backends)) == 1 else "+".join(backends)


def with_backends(mixers: Sequence[MixerSettings], backends: str) -> list[MixerSettings]:
    each_one = backends.split("+")
    if len(each_one) == 1:
        each_one *= len(mixers)
    if len(each_one) != len(mixers):
        raise UserError(f"backend={backends}: names {len(each_one)} for {len(mixers)} layers")
    return [
        replace(mixer, options={**mixer.options, "backend": backend})
        for mixer, backend in zip(mixers, each_one, strict=True)
    ]


def _shown(layers: Sequence[str]) -> str:
    return f"[{','.join(map(str, layers))}]"
