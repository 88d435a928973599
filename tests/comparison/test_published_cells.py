"""Published cells are taken over by the plans that made them, every one, whatever version and device they are of."""

import gzip
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from small import comparison_settings

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.cli.reading_names import every_finding
from attnbench.comparison.imports import import_for
from attnbench.results.folder import ROOT
from attnbench.settings.schema import ComparisonSettings
from attnbench.training import prepare

RESULTS = ROOT / "docs" / "results"
FAST = "published-h100"

CHARACTERS = {"wikitext2": 10_780_437, "books": 119732932}
"""Characters of the training split of each corpus that is not part of the repository."""

PAGES = sorted(path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.glob("**/cells.jsonl.gz"))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A machine that says that it has an H100, as far as a plan asks before it runs anything."""
    properties = SimpleNamespace(major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)
    answers = {
        "device_count": 1,
        "is_available": True,
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "current_device": 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def settings_of(page: str, outputs: Path) -> ComparisonSettings:
    """The settings that the page's own command gives."""
    table, _, name = page.partition("/")
    if name:
        [plan] = (it for it in every_finding() if it.name == name)
        return comparison_settings(plan, outputs, device="cpu" if table.endswith("cpu") else "cuda")
    words = shlex.split(json.loads((RESULTS / page / "comparison.json").read_text())["command"])[2:]
    words = [word for word in words if not word.startswith(("import=", "plan.devices="))]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("compare", words, return_hydra_config=True)
        return replace(read_comparison(config, config.hydra), outputs_dir=str(outputs))


def corpus_of(texts: dict[str, str]) -> SimpleNamespace | None:
    """Stand-in for the corpus of the cells, which is not on this machine; None: they read none."""
    configs = (yaml.load(text, yaml.CSafeLoader) for path, text in texts.items() if path.endswith("config.yaml"))
    config = next((it for it in configs if "resolved" in it and it["data"]["name"] in CHARACTERS), None)
    if config is None:
        return None
    name, _, fingerprint = config["resolved"]["corpus"].partition("@")
    return SimpleNamespace(
        name=name,
        fingerprint=fingerprint,
        vocabulary_size=config["resolved"]["vocabulary_size"],
        # The steps of an epoch follow from them.
        tokens={"train": torch.empty(CHARACTERS[config["data"]["name"]], dtype=torch.uint8)},
        splits={split: SimpleNamespace(num_bytes=number) for split, number in config["resolved"]["num_bytes"].items()},
        num_unknown=config["resolved"]["num_unknown"],
        tokenizer=SimpleNamespace(kind=config["data"]["tokenizer"]),
    )


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    "page", [page if page == FAST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_published_cells_are_all_found(page, tmp_path, monkeypatch):
    source = RESULTS / page / "cells.jsonl.gz"
    with gzip.open(source, "rt") as file:
        texts = {line["path"]: line["text"] for line in map(json.loads, file)}
    known, load = corpus_of(texts), prepare.load_corpus
    monkeypatch.setattr(
        prepare,
        "load_corpus",
        lambda settings, *others: known if settings.name in CHARACTERS else load(settings, *others),
    )
    given = settings_of(page, tmp_path)
    import_for(given, compose, source)
    folder = Path(given.outputs_dir) / given.plan.name
    taken = {path.parent.relative_to(folder).as_posix() for path in folder.glob("**/config.yaml")}
    there = {path.removesuffix("/config.yaml") for path in texts if path.endswith("/config.yaml")}
    assert (len(taken), taken) == (len(there), there)
    results = [path for path in texts if path.endswith(".jsonl")]
    assert len([*folder.glob("**/results/*.jsonl")]) == len(results)
