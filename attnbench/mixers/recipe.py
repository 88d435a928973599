"""Recipes: the parts around a mixer, requested of every mixer alike.

A recipe names no mixer. A mixer's class says which parts it needs (`has_order`, `needs_qk_norm`, `needs_output_norm`)
and which would make another mixer of it (`undone_by`).
"""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnbench.mixers.base import Mixer
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import is_hybrid, parts_of
from attnbench.settings.registry import resolve
from attnbench.settings.schema import MixerSettings, RecipeSettings

ROTARY_THETA = 10000.0
"""Base of the rotary positions that `needed` requests (Su et al., 2021)."""

OWN, NEEDED = "own", "needed"


def recipe_options(mixer: MixerSettings, recipe: RecipeSettings) -> dict[str, Any]:
    """Return a recipe's options among those that the mixer has; a part that would undo the mixer stays as in its
    yaml."""
    cls = resolve(mixer.target, Mixer)
    known = inspect.signature(cls).parameters
    asked = {name: value for name, value in _parts(recipe).items() if name in known}
    in_yaml = {name: mixer.options.get(name, known[name].default) for name in asked}
    kept = {name for name, value in asked.items() if value == OWN or name in cls.undone_by}
    return {name: in_yaml[name] if name in kept else _value(cls, name, value) for name, value in asked.items()}


def not_applicable(mixer: MixerSettings, recipe: RecipeSettings | None) -> list[str]:
    """List the requested parts that the mixer, or one of a hybrid's, has no option for or that would undo it."""
    if recipe is None:
        return []
    if is_hybrid(mixer):
        return sorted({name for part in parts_of(mixer).values() for name in not_applicable(part, recipe)})
    cls = resolve(mixer.target, Mixer)
    known = inspect.signature(cls).parameters
    without = {name for name in cls.undone_by if is_off(mixer.options.get(name))}
    asked = {name: value for name, value in _parts(recipe).items() if value != OWN}
    lacking = {name: value for name, value in asked.items() if name not in known or name in without}
    return sorted(name for name, value in lacking.items() if not is_off(_value(cls, name, value)))


def undone(cls: type[Mixer], options: Mapping[str, Any]) -> dict[str, str]:
    return {name: reason for name, reason in cls.undone_by.items() if not is_off(options.get(name))}


def warnings_of(mixer: MixerSettings) -> list[str]:
    if is_hybrid(mixer):
        return [line for part in parts_of(mixer).values() for line in warnings_of(part)]
    cls = resolve(mixer.target, Mixer)
    return [
        f"attn.{name}={mixer.options[name]}: undoes {cls.__name__}, {reason}"
        for name, reason in undone(cls, mixer.options).items()
    ]


def is_off(value: Any) -> bool:
    return value in (None, 0, "none")


def _parts(recipe: RecipeSettings) -> dict[str, Any]:
    return {name: value for name, value in asdict(recipe).items() if name != "name" and value is not None}


def _value(cls: type[Mixer], name: str, value: Any) -> Any:
    if value == NEEDED:
        needs = {
            "rotary_theta": None if cls.has_order else ROTARY_THETA,
            "qk_norm": cls.needs_qk_norm,
            "output_norm": cls.needs_output_norm,
        }
        if name not in needs:
            raise UserError(f"recipe.{name}={NEEDED}: must be a value or {OWN}; mixers say of {', '.join(needs)} alone")
        return needs[name]
    # A null in a recipe leaves a part unchanged; "no positions" needs a word.
    return None if name == "rotary_theta" and value == "none" else value
