"""Command lines of small probes, for the tests of what carries them out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from small import compose_once

from attnbench.cli.compose import CONF
from attnbench.evals.base import Evaluation
from attnbench.settings.registry import resolve
from attnbench.settings.schema import RunSettings

LISTS = ("battery", "ladder")
EVALUATIONS = sorted(path.stem for path in (CONF / "eval").glob("*.yaml") if path.stem not in LISTS)
"""The names of conf/eval, without the yamls that list several of them."""

BATTERY: list[str] = sorted(yaml.safe_load((CONF / "eval" / "battery.yaml").read_text())["defaults"])


def evaluation_class(name: str) -> type[Evaluation]:
    return resolve(yaml.safe_load((CONF / "eval" / f"{name}.yaml").read_text())["_target_"], Evaluation)


def smoke(name: str) -> dict[str, Any]:
    return evaluation_class(name).smoke


def smoke_words(*names: str, **changed: Any) -> list[str]:
    """Return overrides to the smoke settings of evaluations, some changed, as by copy_num_steps=20."""
    given = {f"{name}_{key}": (f"eval.{name}.{key}", value) for name in names for key, value in smoke(name).items()}
    for word, value in changed.items():
        owner = next(name for name in EVALUATIONS if word.startswith(f"{name}_"))
        given[word] = (f"eval.{owner}.{word.removeprefix(f'{owner}_')}", value)
    return [f"{path}={json.dumps(value, separators=(',', ':'))}" for path, value in given.values()]


def probe_task(name: str, **options: Any) -> Any:
    """Return the first task of a probe at its smoke settings, over those of its yaml."""
    content = yaml.safe_load((CONF / "eval" / f"{name}.yaml").read_text()) | smoke(name) | options
    del content["_target_"]
    return evaluation_class(name)(**content).tasks()[0]


def probe_settings(outputs: Path, *overrides: str, attn: str = "softmax", name: str = "copy", **changed) -> RunSettings:
    return compose_once([*probe_words(outputs, [name], **changed), f"attn={attn}", *overrides])


def probe_words(outputs: Path, names: Sequence[str], **changed: Any) -> list[str]:
    common = ["experiment=demo", "device=cpu", "logger=none", f"outputs_dir={outputs}"]
    return [*common, f"eval=[{','.join(names)}]", *smoke_words(*names, **changed)]
