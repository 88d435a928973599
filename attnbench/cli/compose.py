"""Settings composed from overrides, checked like those of a command line."""

import gc
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from attnbench.cli.mistakes import explain
from attnbench.cli.mixer import read_mixer
from attnbench.cli.reading import read_settings
from attnbench.settings.check import check_argument
from attnbench.settings.errors import UserError
from attnbench.settings.paths import user_path
from attnbench.settings.schema import CONF, MixerSettings, RunSettings

Settings = TypeVar("Settings")

MAX_WORD_CHARACTERS = 2**14
"""Longest word of a command line: Hydra's parser takes a second for each hundred thousand characters."""


def compose(
    overrides: str | Sequence[str] = (), config_name: str = "train", *, config_dir: Path | str | None = None
) -> RunSettings:
    """Return the settings that a command line with these overrides gives, checked in the same way.

    In a job of attnbench's own commands the yamls are those of its command line, its --config-dir included. A program
    that uses Hydra itself keeps its own configuration.

    Args:
        overrides: one text, "attn=linear seq_len=64", or a list of words.
        config_dir: as --config-dir, a folder of yamls; the classes that they name are then trusted.
    """
    overrides = split_words(overrides) if isinstance(overrides, str) else overrides
    check_argument("overrides", overrides, list | tuple, 'a text, "attn=linear seq_len=64", or a list of words')
    return read_words(read_settings, overrides, config_name, config_dir)


def split_words(text: str) -> list[str]:
    """Split a text into words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {error}; a list of words needs no quotes") from None


def read_words(
    read: Callable[[DictConfig, Any], Settings],
    overrides: Sequence[str],
    config_name: str,
    config_dir: Path | str | None = None,
) -> Settings:
    """Return the settings that `read` makes of a command line's configuration; see `compose`."""
    for word in overrides:
        check_argument("word", word, str, 'a text, "seq_len=64"')
        if re.match(r"[+~]*(@[^=]*)?(=|$)", word):
            raise UserError(f"{word}: names no setting; NAME=VALUE does")
        if len(word) > MAX_WORD_CHARACTERS:
            raise UserError(f"{word}: longer than the {MAX_WORD_CHARACTERS} characters of a word; put it into a yaml")
    overrides = prepared_words(overrides)
    in_job = _in_own_job()
    if in_job and config_dir is not None:
        raise UserError(f"config_dir={config_dir}: inside a job the command line's --config-dir is what counts")
    with uncollected(), nullcontext() if in_job else _own_hydra(config_dir):
        keep_environment_out()
        try:
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            return read(config, config.hydra)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
            raise UserError(explain(error, overrides)) from error


def composed(config_name: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Return the configuration of a command line, with Hydra's own node, unchecked."""
    with _own_hydra(config_dir):
        return hydra.compose(config_name, list(overrides), return_hydra_config=True)


def own_conf() -> Path | None:
    """Return conf/ of the working directory if it has groups of attnbench's, and is not attnbench's."""
    own, groups = Path("conf"), [path.name for path in CONF.iterdir() if path.is_dir()]
    return own if own.resolve() != CONF and any((own / group).is_dir() for group in groups) else None


def _in_own_job() -> bool:
    """Tell if Hydra was started with the yamls of conf/, and not by a program with its own yamls."""
    hydra_here = GlobalHydra.instance()
    return hydra_here.is_initialized() and any(
        source.provider == "main" and Path(source.path.removeprefix("file://")) == CONF
        for source in hydra_here.config_loader().get_search_path().get_path()
    )


@contextmanager
def _own_hydra(config_dir: Path | str | None) -> Iterator[None]:
    """Start Hydra with the yamls of conf/ and then of `config_dir`, as a command line with --config-dir does.
    Afterwards the program has its own Hydra and its access to environment variables again."""
    program, base = GlobalHydra.instance().hydra, VersionBase.instance().getbase()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            if config_dir is not None:
                folder = user_path(config_dir)
                if not folder.is_dir():
                    raise UserError(f"config_dir={folder}: there is no such folder")
                loader: Any = GlobalHydra.instance().config_loader()
                path = loader.get_search_path()
                path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
                loader.repository.initialize_sources(path)
            parse_once()
            yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        if program is not None and base is not None:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(program)
            VersionBase.instance().setbase(base)


class YamlFolder(FileConfigSource):
    """Parses each yaml once in a process as long as its date and size stay the same."""

    parsed: ClassVar[dict[tuple[Any, ...], tuple[Any, dict[str, str | None]]]] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        state = Path(self.path, self._normalize_file_name(config_path)).stat()
        key = (self.path, config_path, state.st_mtime_ns, state.st_size)
        if key not in self.parsed:
            loaded = super().load_config(config_path)
            self.parsed[key] = OmegaConf.to_container(loaded.config), loaded.header
            return loaded
        content, header = self.parsed[key]
        return ConfigResult(self.provider, f"file://{self.path}", OmegaConf.create(content), {**header})


def parse_once() -> None:
    """Have Hydra, once started, keep what it has parsed: half of a composition is parsing the same yamls."""
    loader: Any = GlobalHydra.instance().config_loader()
    loader.repository.sources = [
        YamlFolder(source.provider, f"file://{source.path}") if source.scheme() == "file" else source
        for source in loader.repository.sources
    ]


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside: beside torch a collection takes longer than the composition that triggers it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepared_words(words: Sequence[str]) -> list[str]:
    """Return a command line's words as Hydra takes them: an option of a hybrid's mixer is one that its yaml lacks, and
    a variant may be new to the plan, its words without the quotes that Hydra's grammar asks for."""
    for word in words:
        if word.startswith("attn=["):
            raise UserError(
                f"{word}: attn names one yaml; attn=hybrid 'attn.layers={word[5:]}' puts several into different layers"
            )
    return [f"++{word}" if word.startswith("attn.options.") else _variant(word) for word in words]


def _variant(word: str) -> str:
    if re.match(r"\+*(?:plan\.)?variants\.[^.=]+=attn=", word):
        name, _, words = word.partition("=")
        raise UserError(f"{word}: must be a list of words, '{name}=[{words}]'")
    found = re.fullmatch(r"\+*(?:plan\.)?variants\.([^.=]+)=\[(.*)\]", word, re.DOTALL)
    if found is None:
        return word
    name, listed = found.groups()
    if listed and not re.search(r"[\[\]{}'\"]", listed):
        listed = ",".join(f"'{it.strip()}'" for it in listed.split(","))
    return f"++plan.variants.{name}=[{listed}]"


def compose_mixers(names: Sequence[str] | None) -> list[MixerSettings]:
    """Return mixers with the settings of their yamls in attn/, also of a --config-dir; inside a job.

    Args:
        names: of yamls; None: all but those with an option that must be given.
    """
    every = sorted(GlobalHydra.instance().config_loader().get_group_options("attn")) if names is None else names
    configs = [hydra.compose("train", [f"attn={name}"], return_hydra_config=True) for name in every]
    if names is None:
        configs = [config for config in configs if not OmegaConf.missing_keys(config.attn)]
    return [read_mixer(config, config.hydra) for config in configs]


def keep_environment_out() -> None:
    """Refuse environment variables in a configuration, lest keys reach the run's folder and wandb."""

    def refuse(*words: str) -> None:
        raise UserError("a configuration may not read environment variables, which hold keys")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
