"""The tables of recipes in docs/protocol.md, built from conf/recipe, conf/attn and the mixers' classes.

python tools/recipe_table.py prints them.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import yaml

from attnbench.mixers.recipe import recipe_options
from attnbench.settings.schema import CONF, MixerSettings, RecipeSettings

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from mixer_building import read
from mixer_table import listed

PARTS = {
    "rotary_theta": "positions",
    "conv_size": "short convolution",
    "qk_norm": "query/key norm",
    "output_norm": "output norm",
    "output_gate": "output gate",
}
RECIPES = ("bare", "equipped", "own")
NEEDED = {
    "rotary_theta": "rotary, where a mixer has no order of its own",
    "qk_norm": "where the recurrence needs it",
    "output_norm": "where the output has no bound of its own",
}


def recipe(name: str) -> RecipeSettings:
    return RecipeSettings(name=name, **yaml.safe_load((Path(CONF) / "recipe" / f"{name}.yaml").read_text()))


def recipe_tables() -> str:
    """Return the table of what each recipe asks for, and the table of what each mixer gets by it."""
    recipes = {name: recipe(name) for name in RECIPES}
    asked = [
        [title, *(_asked(part, getattr(entry, part)) for entry in recipes.values())] for part, title in PARTS.items()
    ]
    got = []
    for mixer in listed():
        cls, options = read(mixer)
        settings = MixerSettings(name=mixer, target=f"{cls.__module__}.{cls.__name__}", options=options)
        known = inspect.signature(cls).parameters
        given = [recipe_options(settings, entry) for entry in recipes.values()]
        got.append(
            [mixer, *(", ".join(_shown(by[part]) for by in given) if part in known else "has none" for part in PARTS)]
        )
    tables = [["part", *RECIPES], *asked], [[f"`attn=`: {', '.join(RECIPES)}", *PARTS.values()], *got]
    return "\n\n".join(map(_markdown, tables))


def _asked(part: str, value: Any) -> str:
    if value == "own":
        return "the paper's"
    return NEEDED[part] if value == "needed" else _shown(value)


def _shown(value: Any) -> str:
    if value is True:
        return "yes"
    if not value:
        return "none"
    return "rotary" if isinstance(value, float) else str(value)


def _markdown(table: list[list[str]]) -> str:
    headers, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in (headers, ["---"] * len(headers), *lines))


if __name__ == "__main__":
    print(recipe_tables())
