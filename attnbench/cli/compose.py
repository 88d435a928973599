"""Settings composed from overrides, checked like those of a command line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from attnbench.cli.mistakes import explain
from attnbench.cli.mixer import read_mixer
from attnbench.cli.reading import read_settings
from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF, MixerSettings, RunSettings
from attnbench.settings.text import user_path

MAX_WORD_CHARACTERS = 2**14
"""Longest word of a command line: Hydra's parser takes a second for each hundred thousand characters."""


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", *, config_dir: Path | str | None = None
) -> RunSettings:
    """Return the settings that a command line with these overrides gives, checked in the same way.

    In a job of attnbench's own scripts the yamls are those of its command line, its --config-dir included. A program
    that uses Hydra itself keeps its own configuration.

    Args:
        config_dir: the command line's --config-dir, a folder of yamls; the classes that they name are then trusted.

    Raises:
        UserError: the error that the command line would have printed.
    """
    for word in overrides:
        if re.match(r"[+~]*(@[^=]*)?(=|$)", word):
            raise UserError(f"{word}: names no setting; NAME=VALUE does")
        if len(word) > MAX_WORD_CHARACTERS:
            raise UserError(f"{word}: longer than the {MAX_WORD_CHARACTERS} characters of a word; put it into a yaml")
    overrides = prepared_words(overrides)
    in_job = _in_own_job()
    if in_job and config_dir is not None:
        raise UserError(f"config_dir={config_dir}: inside a job the command line's --config-dir is what counts")
    with nullcontext() if in_job else _own_hydra():
        keep_environment_out()
        if config_dir is not None:
            _search_also(user_path(config_dir))
        try:
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            return read_settings(config, config.hydra)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
            raise UserError(explain(error, overrides)) from error


def composed(config_name: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Return the configuration of a command line, Hydra's own node included, unchecked."""
    with _own_hydra():
        if config_dir is not None:
            _search_also(user_path(config_dir))
        return hydra.compose(config_name, list(overrides), return_hydra_config=True)


def _in_own_job() -> bool:
    """True where Hydra has been started with the yamls of conf/, and not by a program with yamls of its own."""
    hydra_here = GlobalHydra.instance()
    return hydra_here.is_initialized() and any(
        source.provider == "main" and Path(source.path.removeprefix("file://")) == CONF
        for source in hydra_here.config_loader().get_search_path().get_path()
    )


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Start Hydra with the yamls of conf/; afterwards restore the program's own Hydra and its access to variables."""
    program, base = GlobalHydra.instance().hydra, VersionBase.instance().getbase()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        if program is not None and base is not None:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(program)
            VersionBase.instance().setbase(base)


def _search_also(folder: Path) -> None:
    """Make Hydra look for yamls in this folder after conf/, as it does for a command line with --config-dir."""
    if not folder.is_dir():
        raise UserError(f"config_dir={folder}: there is no such folder")
    loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(path)


def prepared_words(words: Sequence[str]) -> list[str]:
    """Return a command line's words as Hydra takes them: an option of a hybrid's mixer is one that its yaml lacks.

    Raises:
        UserError: several mixers where one is chosen.
    """
    for word in words:
        if word.startswith("attn=["):
            raise UserError(
                f"{word}: attn names one yaml; attn=hybrid 'attn.layers={word[5:]}' puts several into different layers"
            )
    return [f"++{word}" if word.startswith("attn.options.") else word for word in words]


def compose_mixers(names: Sequence[str] | None) -> list[MixerSettings]:
    """Return mixers with the settings of their yamls in attn/, those of a --config-dir included; inside a job.

    Args:
        names: of yamls; None for all that are a mixer as they stand, with nothing that must be given.
    """
    every = sorted(GlobalHydra.instance().config_loader().get_group_options("attn")) if names is None else names
    configs = [hydra.compose("train", [f"attn={name}"], return_hydra_config=True) for name in every]
    if names is None:
        configs = [config for config in configs if not OmegaConf.missing_keys(config.attn)]
    return [read_mixer(config, config.hydra) for config in configs]


def keep_environment_out() -> None:
    """Refuse environment variables in a configuration: keys there must not get into the run's folder and to wandb."""

    def refuse(*words: str) -> None:
        raise UserError("a configuration may not read environment variables, which hold keys")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
