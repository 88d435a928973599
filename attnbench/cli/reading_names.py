"""Settings of the commands whose plain words are names: attnbench findings and attnbench runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from attnbench.cli.plain import plain, typed
from attnbench.cli.reading import read_plan
from attnbench.settings.check import check_outputs_dir, check_value, read, setting_of
from attnbench.settings.combinations import check_runs
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.schema import (
    CONF,
    FINDINGS,
    ComparisonSettings,
    LoggerSettings,
    PlanSettings,
    RunsSettings,
)

TAKING_A_WORD = ("--config-path", "--config-name", "--config-dir", "--package", "--cfg", "--info")
"""Options of Hydra that take the next word; Hydra accepts any beginning of their names."""

TAKING_A_WORD_SHORT = ("-cp", "-cn", "-cd", "-p", "-c", "-i")


def named_words(words: Sequence[str], setting: str = "names") -> list[str]:
    """`parity nope_copy` becomes `names=[parity,nope_copy]`."""
    names: list[str] = []
    others: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        is_long = len(last) > 2 and last.startswith("--")
        is_taken = last in TAKING_A_WORD_SHORT or (is_long and any(it.startswith(last) for it in TAKING_A_WORD))
        is_name = "=" not in word and word[:1] not in "-+~" and not is_taken
        (names if is_name else others).append(word)
    return [*others, f"{setting}=[{','.join(names)}]"] if names else others


def read_findings(config: DictConfig, hydra_config: Any) -> list[ComparisonSettings]:
    values, known = plain(config, hydra_config), _known_findings()
    chosen = hydra_config.runtime.choices.get("finding")
    if chosen is not None:
        raise UserError(f"finding={chosen}: findings are named as plain words, {chosen}, or by names=[{chosen}]")
    names = values["names"]
    check_value("names", names, kind=list[str], distinct=True)
    for name in names or []:
        if name not in known:
            raise UserError(f"names: {name} is no finding{did_you_mean(name, known)}; there are {', '.join(known)}")
    words = [word for word in hydra_config.overrides.task if setting_of(word) != "names"]
    command = typed("findings", hydra_config)
    settings = [_finding(name, words, command) for name in names or known]
    exported, imported, is_frozen = settings[0].exported, settings[0].imported, settings[0].freeze
    for name, folder in (("export", exported), ("import", imported)):
        if folder == "":
            raise UserError(f"{name}='': name a folder")
        if folder is not None and is_frozen:
            raise UserError(f"freeze=true with {name}={folder}: do one after the other")
    if exported is not None and imported is not None:
        raise UserError(f"export={exported} with import={imported}: do one after the other")
    if imported is not None and not Path(imported).is_dir():
        raise UserError(f"import={imported}: no such folder; export={imported} writes one")
    return settings


def every_finding() -> list[PlanSettings]:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return [_finding(name).plan for name in _known_findings()]


def _known_findings() -> list[str]:
    return sorted(GlobalHydra.instance().config_loader().get_group_options("finding"))


def _finding(name: str, words: Sequence[str] = (), command: str = "") -> ComparisonSettings:
    config = hydra.compose("findings", [f"finding={name}", *words], return_hydra_config=True)
    values = plain(config, config.hydra)
    plan = read_plan(Path(name).name, values.pop("plan"), config.hydra)
    if plan.claim is None:
        raise UserError(f"finding/{name}.yaml: a finding has a claim")
    check_outputs_dir(values["outputs_dir"])
    values |= {"exported": values.pop("export"), "imported": values.pop("import")}
    values |= {"outputs_dir": str(Path(values["outputs_dir"]) / FINDINGS)}
    del values["names"]
    return read(
        ComparisonSettings, values, given={"plan": plan, "logger": LoggerSettings(mode="none"), "command": command}
    )


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
    settings = read(RunsSettings, plain(config, hydra_config))
    check_outputs_dir(settings.outputs_dir)
    check_runs(settings)
    return settings
