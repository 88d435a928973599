"""Settings of the commands whose plain words are names: attnbench findings and attnbench runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from attnbench.cli.plain import plain, typed
from attnbench.settings.check import check_outputs_dir, read
from attnbench.settings.combinations import check_runs
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.finding import FindingSettings, FindingsSettings, read_finding
from attnbench.settings.schema import CONF, RunsSettings

TAKING_A_WORD = ("--config-path", "--config-name", "--config-dir", "--package", "--cfg", "--info")
"""Options of Hydra that take the next word; Hydra accepts any beginning of their names."""

TAKING_A_WORD_SHORT = ("-cp", "-cn", "-cd", "-p", "-c", "-i")


def named_words(words: Sequence[str], setting: str = "names") -> list[str]:
    """Replace plain words of a command line: `parity nope_copy` becomes `names=[parity,nope_copy]`."""
    names: list[str] = []
    others: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        is_long = len(last) > 2 and last.startswith("--")
        is_taken = last in TAKING_A_WORD_SHORT or (is_long and any(it.startswith(last) for it in TAKING_A_WORD))
        is_name = "=" not in word and word[:1] not in "-+~" and not is_taken
        (names if is_name else others).append(word)
    return [*others, f"{setting}=[{','.join(names)}]"] if names else others


def read_findings(config: DictConfig, hydra_config: Any) -> tuple[FindingsSettings, list[FindingSettings]]:
    """Check the configuration of attnbench findings; return it and the findings that it asks for."""
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


def names_as_texts(words: Sequence[str]) -> list[str]:
    """Return a command line of attnbench runs whose plain words are experiments, with names of runs as texts.

    `demo` and `experiment=demo`, which Hydra takes for a yaml of experiment/, become `experiments=['demo']`; a hash of
    digits keeps them all: compare=['1234','1e10'].
    """
    words = [f"experiments={word.partition('=')[2]}" if word.startswith("experiment=") else word for word in words]
    return [_as_texts(word) for word in named_words(words, "experiments")]


def _as_texts(word: str) -> str:
    name, _, value = word.partition("=")
    if name not in ("experiments", "compare") or value in ("", "null") or "'" in value or '"' in value:
        return word
    texts = ",".join(f"'{text.strip()}'" for text in value.removeprefix("[").removesuffix("]").split(","))
    return f"{name}=[{texts}]"


def read_runs(config: DictConfig, hydra_config: Any) -> RunsSettings:
    """Check the configuration of attnbench runs."""
    settings = read(RunsSettings, plain(config, hydra_config))
    check_outputs_dir(settings.outputs_dir)
    check_runs(settings)
    return settings
