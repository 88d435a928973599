"""Mixer of a configuration, with the parts of its recipe."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from attnbench.cli.plain import opened, plain
from attnbench.settings.check import setting_of
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import each, is_hybrid, parts_of, with_parts
from attnbench.settings.registry import MODULE, class_named, trust
from attnbench.settings.schema import MixerSettings, RunSettings


def read_mixer(config: DictConfig, hydra_config: Any) -> MixerSettings:
    return mixer_of(plain(config, hydra_config), hydra_config)


def mixer_of(values: dict[str, Any], hydra_config: Any) -> MixerSettings:
    name = hydra_config.runtime.choices.get("attn")
    mixer = MixerSettings(name=name, **opened("attn", name, values.pop("attn", None)))
    mixer = with_parts(mixer, _yaml_of) if is_hybrid(mixer) else mixer
    # The command line, or a yaml that it chooses, names these classes.
    trust(class_named(part) for part in parts_of(mixer).values() if part.target == MODULE)
    return mixer


def _yaml_of(name: str) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(hydra.compose("train", [f"attn={name}"]).attn)
    return values


def named_options(hydra_config: Any) -> list[str]:
    """Return the mixer's options that the command line or its yaml of experiment/ names."""
    words = [setting_of(word).split(".", 1) for word in hydra_config.overrides.task]
    named = {parts[1] for parts in words if parts[0] == "attn" and len(parts) > 1}
    folders = [Path(source.path, "experiment") for source in hydra_config.runtime.config_sources]
    todo = [str(hydra_config.runtime.choices.get("experiment"))]
    for name in todo:
        for path in (folder / f"{name}.yaml" for folder in folders):
            content = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
            chosen = OmegaConf.select(content, "attn") or {}
            named |= set(_dotted(OmegaConf.to_container(chosen) if OmegaConf.is_dict(chosen) else {}))
            # Experiments that this one includes; a choice in another group is a mapping.
            begun = [entry for entry in OmegaConf.select(content, "defaults") or () if isinstance(entry, str)]
            todo += [entry for entry in begun if entry not in todo]
    return sorted(named)


def _dotted(options: Any) -> Iterator[str]:
    for name, value in options.items():
        if name == "options" and isinstance(value, dict):
            yield from (f"{name}.{part}.{option}" for part, given in value.items() for option in given or ())
        else:
            yield str(name)


def recipe_of(values: Any, hydra_config: Any) -> dict[str, Any] | None:
    for word in hydra_config.overrides.task:
        if setting_of(word).startswith("recipe."):
            raise UserError(
                f"{word}: a recipe stands as its yaml has it; attn.NAME=VALUE names an option of the mixer, which wins"
            )
    chosen = hydra_config.runtime.choices.get("recipe")
    return None if chosen is None or values is None else {"name": Path(chosen).name, **values}


def with_recipe(settings: RunSettings) -> RunSettings:
    """Give the mixer the parts of its recipe that the command line does not name, as if it did."""
    if settings.recipe is None:
        return settings
    # Loading torch takes longer than the checks before.
    from attnbench.mixers.recipe import recipe_options

    recipe, named = settings.recipe, set(settings.named_options)

    def equip(mixer: MixerSettings, prefix: str) -> MixerSettings:
        given = recipe_options(mixer, recipe)
        options = {name: value for name, value in given.items() if prefix + name not in settings.named_options}
        named.update(prefix + name for name in options)
        return replace(mixer, options={**mixer.options, **options})

    return replace(settings, mixer=each(settings.mixer, equip), named_options=sorted(named))
