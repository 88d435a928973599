"""Findings from a command line: which are wanted, and each yaml of conf/finding checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from attnbench.cli.plain import plain, typed
from attnbench.settings.check import check_outputs_dir, read
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.finding import FindingSettings, FindingsSettings, read_finding
from attnbench.settings.schema import CONF

TAKING_A_WORD = ("--config-path", "--config-name", "--config-dir", "--package", "--cfg", "--info")
"""Options of Hydra behind which the next word is theirs; any beginning of a name does for it."""

TAKING_A_WORD_SHORT = ("-cp", "-cn", "-cd", "-p", "-c", "-i")


def named_words(words: Sequence[str], setting: str = "names") -> list[str]:
    """Return a command line whose plain words are the names: `parity nope_copy` as `names=[parity,nope_copy]`.

    A word behind an option that takes one, as the folder behind --config-dir, is the option's.
    """
    names: list[str] = []
    others: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        is_name = "=" not in word and word[:1] not in "-+~" and not _takes_a_word(last)
        (names if is_name else others).append(word)
    return [*others, f"{setting}=[{','.join(names)}]"] if names else others


def _takes_a_word(option: str) -> bool:
    is_long = len(option) > 2 and option.startswith("--")
    return option in TAKING_A_WORD_SHORT or (is_long and any(name.startswith(option) for name in TAKING_A_WORD))


def read_findings(config: DictConfig, hydra_config: Any) -> tuple[FindingsSettings, list[FindingSettings]]:
    """Check the configuration of attnbench findings; return it, and the findings that it asks for.

    Raises:
        UserError: as read_settings; or a finding that is unknown, or whose parts do not fit together.
    """
    values = plain(config, hydra_config)
    chosen = hydra_config.runtime.choices.get("finding")
    if chosen is not None:
        raise UserError(f"finding={chosen}: findings are named as plain words, {chosen}, or by names=[{chosen}]")
    if values.get("stack") == "auto":
        values["stack"] = None
    files = {"exported": values.pop("export", None), "imported": values.pop("import", None)}
    settings = read(FindingsSettings, {**values, **files}, given={"command": typed("findings", hydra_config)})
    for name, folder in (("export", settings.exported), ("import", settings.imported)):
        if folder == "":
            raise UserError(f"{name}='': name a folder")
        if folder is not None and settings.freeze:
            raise UserError(f"freeze=true with {name}={folder}: do one after the other")
    if settings.exported is not None and settings.imported is not None:
        raise UserError(f"export={settings.exported} with import={settings.imported}: do one after the other")
    if settings.imported is not None and not Path(settings.imported).is_dir():
        raise UserError(f"import={settings.imported}: no such folder; export={settings.imported} writes one")
    if settings.names and settings.full:
        raise UserError(f"full=true with names={settings.names}: full runs all there are; give one of them")
    check_outputs_dir(settings.outputs_dir)
    known = _known_findings()
    for name in settings.names or []:
        if name not in known:
            raise UserError(f"names: {name} is no finding{did_you_mean(name, known)}; there are {', '.join(known)}")
    findings = [_finding(name) for name in settings.names or known]
    return settings, [it for it in findings if settings.names or settings.full or it.core]


def every_finding() -> list[FindingSettings]:
    """Read every yaml of conf/finding, outside of a job."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return [_finding(name) for name in _known_findings()]


def _known_findings() -> list[str]:
    return sorted(GlobalHydra.instance().config_loader().get_group_options("finding"))


def _finding(name: str) -> FindingSettings:
    config = hydra.compose("findings", [f"finding={name}"])
    values: Any = OmegaConf.to_container(config.finding, resolve=True, throw_on_missing=True)
    return read_finding(Path(name).name, values)
