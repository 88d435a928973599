"""Composed configurations as plain values, read into settings."""

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from attnbench.cli.help import commands_with
from attnbench.settings.check import read, setting_of
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust

Settings = TypeVar("Settings")


def plain(config: DictConfig, hydra_config: Any) -> dict[str, Any]:
    """Return the resolved configuration without Hydra's node; trust the classes that --config-dir names."""
    for override in hydra_config.overrides.task:
        if override.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; null or another value turns it off")
    _refuse_unused(hydra_config)
    trust(_outside_classes(hydra_config))
    # Hydra's node goes before resolving: some of its values exist only inside a job.
    values: Any = OmegaConf.to_container(without_hydra(config), resolve=True, throw_on_missing=True)
    return values


def without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])


def _refuse_unused(hydra_config: Any) -> None:
    """Refuse a sweep that Hydra ignores: it reads the sweep of a yaml only with -m, and not of yamls that the sweep
    chooses."""
    given = {setting_of(word) for word in hydra_config.overrides.task}
    swept = OmegaConf.select(hydra_config, "sweeper.params") or {}
    unused = [f"{name}={value}" for name, value in swept.items() if setting_of(name) not in given]
    if unused:
        raise UserError(
            f"hydra.sweeper.params: {' '.join(unused)}: Hydra ignores this sweep of a yaml; a command with -m that "
            f"chooses this yaml alone runs it, and {setting_of(unused[0])}=VALUE on the command line replaces it"
        )
    launcher = hydra_config.runtime.choices.get("hydra/launcher")
    if getattr(hydra_config.mode, "name", None) == "RUN" and launcher not in (None, "basic"):
        raise UserError(f"hydra/launcher={launcher}: starts the jobs of a sweep only; add -m behind the script")


def read_plain(cls: type[Settings], values: Mapping[str, Any], **given: Any) -> Settings:
    """Read as settings.check.read does; errors about unknown settings name the commands that have them."""

    def hint(name: str) -> str:
        commands = commands_with(name)
        return f"; {' and '.join(commands)} has it" if commands else ""

    return read(cls, values, given=given, hint=hint)


def opened(group: str, name: str | None, values: Any) -> dict[str, Any]:
    """Split a `_target_` yaml of an open group into target and options; `name` is None if none was chosen."""
    if not isinstance(values, dict) and (name is None or values is not None):
        raise UserError(f"{group}={values}: must name a yaml of {group}/")
    options = dict(values or {})
    target = options.pop("_target_", None)
    if not isinstance(target, str):
        word = f"eval.{name}" if group == "eval" else f"{group}={name}"
        raise UserError(f"{word}: names no class; {group}/{name}.yaml needs the line _target_: PACKAGE.CLASS")
    return {"target": target, "options": options}


def typed(command: str, hydra_config: Any) -> str:
    folders = [f"--config-dir {os.path.relpath(folder)}" for folder in _config_dirs(hydra_config)]
    return " ".join([f"attnbench {command}", *folders, *map(shlex.quote, hydra_config.overrides.task)])


def _config_dirs(hydra_config: Any) -> list[Path]:
    sources = hydra_config.runtime.config_sources
    return [Path(source.path) for source in sources if source.provider == "command-line"]


def _outside_classes(hydra_config: Any) -> Iterator[str]:
    paths = [path for folder in _config_dirs(hydra_config) for path in folder.glob("*/*.yaml")]
    for path in (path for path in paths if path.parent.name in ("attn", "eval", "bench")):
        try:
            target = OmegaConf.select(OmegaConf.load(path), "_target_")
        except (YAMLError, OmegaConfBaseException, OSError, ValueError):
            # A command line that chooses this yaml gets an error.
            continue
        if isinstance(target, str):
            yield target
