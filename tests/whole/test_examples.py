"""The files that docs/ show, as a user's own package and as part of attnbench."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import EXAMPLES, files, write_files
from probe_settings import smoke_words
from scripts_here import run_here
from small import TINY_RUN, compose_once, python_path

from attnbench.evals.base import Probe
from attnbench.settings.registry import build

ROOMS_OF = {"attn": "mixers", "eval": "evals", "bench": "bench"}
"""Rooms that the classes of a folder of conf/ live in."""

ADDED = {"attn": "fading", "eval": "parity", "bench": "norm"}
HELD_BY = [
    *("mixers/test_mixers.py", "model/test_model.py", "evals/test_evals.py", "bench/test_bench.py"),
    *("whole/test_readme.py", "whole/test_structure.py", "settings/test_config.py"),
]
"""Tests that take the names of mixers, evaluations and benches from conf/."""


def add_to(copy: Path) -> None:
    """Add the examples to a copy of the repository: a Python file and a yaml each."""
    shown = {name: content for page in EXAMPLES for name, content in files(page).items()}
    for group, name in ADDED.items():
        (copy / "attnbench" / ROOMS_OF[group] / f"{name}.py").write_text(shown[f"{name}.py"], encoding="utf-8")
        target = shown[f"my_conf/{group}/{name}.yaml"].replace("_target_: ", f"_target_: attnbench.{ROOMS_OF[group]}.")
        (copy / "conf" / group / f"{name}.yaml").write_text(target, encoding="utf-8")


@pytest.mark.slow
def test_one_more_of_each_is_two_new_files_and_no_edit(root, tmp_path):
    ignored = shutil.ignore_patterns(".*", "outputs", "wandb", "data", "__pycache__", "*.egg-info")
    copy = shutil.copytree(root, tmp_path / "copy", ignore=ignored, symlinks=True)
    shutil.copytree(root / "attnbench" / "data", copy / "attnbench" / "data", ignore=ignored)
    shutil.copytree(root / "conf" / "data", copy / "conf" / "data")
    shutil.copytree(root / "tests" / "data", copy / "tests" / "data")
    add_to(copy)
    chosen = " or ".join([*ADDED.values(), "readme", "structure"])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rA",
            "-m",
            "not slow",
            "-k",
            chosen,
            *(f"tests/{path}" for path in HELD_BY),
        ],
        cwd=copy,
        env=python_path(copy),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    for name, least in {"fading": 25, "parity": 3, "norm": 1, "test_structure": 5, "test_readme": 5}.items():
        assert len(re.findall(rf"^PASSED .*{name}", done.stdout, re.MULTILINE)) >= least, done.stdout


@pytest.fixture
def package(root, tmp_path, monkeypatch) -> Path:
    """A user's own folder, with the files that the pages show and a text."""
    write_files(tmp_path, *EXAMPLES)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path)["PYTHONPATH"])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def call(package: Path, script: str, *words: str) -> str:
    given = ["--config-dir", "my_conf", *words, "device=cpu"]
    code, output, errors = run_here(script, *given, cwd=package)
    assert code == 0, output + errors
    return output + errors


def compared(package: Path, variant: str, evaluations: list[str], *overrides: str) -> Path:
    """Carry out a plan of one variant; return the experiment's folder."""
    plan = {
        "overrides": ["experiment=demo", *TINY_RUN, "data.path=text.txt", *overrides],
        "variants": {variant: [f"attn={variant}"]},
        "evaluations": evaluations,
        **{"seeds": [0], "probe_seeds": [0], "learning_rates": [1e-3]},
    }
    (package / "my_conf" / "plan" / "little.yaml").write_text(yaml.safe_dump(plan))
    call(package, "compare.py", "plan=little", "logger=none")
    folder = package / "outputs" / "little"
    record = json.loads((folder / "comparison.json").read_text())
    assert record["failures"] == []
    assert {Path(name).name.split("-")[0] for name in record["files"]} == {"training", *evaluations}
    return folder


@pytest.mark.slow
def test_the_example_mixer_goes_through_compare_into_the_report(package):
    folder = compared(package, "fading", ["perplexity", "copy"], *smoke_words("perplexity", "copy"))
    assert "fading" in (folder / "report" / "index.html").read_text()


@pytest.mark.slow
def test_the_example_evaluations_go_through_compare_into_the_report(package):
    few = ["eval.parity.lengths=[12]", "eval.parity.num_steps=3", "eval.parity.learning_rates=[1e-3]"]
    folder = compared(package, "linear", ["parity", "next_character"], *few)
    assert "--config-dir my_conf" in json.loads((folder / "comparison.json").read_text())["command"]
    page = (folder / "report" / "index.html").read_text()
    for words in ("Parity</h2>", "whether the ones so far are odd", "Next character</h2>", "most likely ones"):
        assert words in page, words
    figures = {path.stem for path in (folder / "report" / "figures").glob("*.svg")}
    assert figures == {"parity-accuracy-length", "next_character-accuracy-checkpoint"}


def test_the_example_mixer_takes_all_that_evaluations_put_around_every_mixer():
    """Hold that no setting stands beside its scores as one that it did not get."""
    settings = yaml.safe_load(files("docs/adding_a_mixer.md")["my_conf/attn/fading.yaml"])
    for probe in ("recall", "copy"):
        evaluation = compose_once([f"eval=[{probe}]"]).evaluations[0]
        for task in build(evaluation.target, evaluation.options, Probe).tasks():
            assert task.mixer_options
            assert task.mixer_options.keys() <= settings.keys()
