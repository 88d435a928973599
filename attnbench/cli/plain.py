"""A composed configuration as plain values, resolved, with nothing deleted or missing, and read into settings."""

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
    """Return the configuration without Hydra's part, resolved, with nothing deleted or missing.

    The classes that the command line's --config-dir names may be built from here on.
    """
    for override in hydra_config.overrides.task:
        if override.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; null or another value turns it off")
    _refuse_unused(hydra_config)
    trust(_outside_classes(hydra_config))
    # The hydra node is left out before resolving: some of its values exist only inside a job.
    names = [str(name) for name in config if name != "hydra"]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, names), resolve=True, throw_on_missing=True)
    return values


def _refuse_unused(hydra_config: Any) -> None:
    """Raise UserError for settings of a sweep that Hydra ignores here: one job would run where several were asked for.

    Hydra reads the sweep of a yaml before it knows the yamls that the sweep itself chooses, and only with -m.
    """
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
    """Call settings.check.read; the message about an unknown setting names the commands that have it."""

    def hint(name: str) -> str:
        commands = commands_with(name)
        return f"; {' and '.join(commands)} has it" if commands else ""

    return read(cls, values, given=given, hint=hint)


def opened(group: str, name: str | None, values: Any) -> dict[str, Any]:
    """Split a `_target_` yaml of an open group into target and options.

    Args:
        name: of the yaml; None where none was chosen.
    """
    # An empty yaml is null.
    if not isinstance(values, dict) and (name is None or values is not None):
        raise UserError(f"{group}={values}: must name a yaml of {group}/")
    options = dict(values or {})
    target = options.pop("_target_", None)
    if not isinstance(target, str):
        # Several evaluations are chosen, and each is a group of settings.
        word = f"eval.{name}" if group == "eval" else f"{group}={name}"
        raise UserError(f"{word}: names no class; {group}/{name}.yaml needs the line _target_: PACKAGE.CLASS")
    return {"target": target, "options": options}


def typed(command: str, hydra_config: Any) -> str:
    """Return the command line as a reader would type it again."""
    folders = [f"--config-dir {os.path.relpath(folder)}" for folder in _config_dirs(hydra_config)]
    return " ".join([f"attnbench {command}", *folders, *map(shlex.quote, hydra_config.overrides.task)])


def _config_dirs(hydra_config: Any) -> list[Path]:
    """Return the command line's --config-dir, if it has one."""
    sources = hydra_config.runtime.config_sources
    return [Path(source.path) for source in sources if source.provider == "command-line"]


def _outside_classes(hydra_config: Any) -> Iterator[str]:
    """Yield the classes that yamls under the command line's --config-dir name."""
    paths = [path for folder in _config_dirs(hydra_config) for path in folder.glob("*/*.yaml")]
    for path in (path for path in paths if path.parent.name in ("attn", "eval", "bench")):
        try:
            target = OmegaConf.select(OmegaConf.load(path), "_target_")
        except (YAMLError, OmegaConfBaseException, OSError, ValueError):
            # The command line that chooses it is told what is wrong with it.
            continue
        if isinstance(target, str):
            yield target
