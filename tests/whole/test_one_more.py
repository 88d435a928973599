"""A mixer, an evaluation and a bench are added by two new files each, and no edit."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import EXAMPLES, files
from small import python_path

from attnbench.cli.new import OPTIONS

ROOMS_OF = {"attn": "mixers", "eval": "evals", "bench": "bench"}
"""Packages of the classes of a folder of conf/."""

ADDED = {"fading": "attn", "fades": "attn", "echo": "eval", "norm": "bench"}
HELD_BY = [
    *("mixers/test_mixers.py", "model/test_model.py"),
    *("evals/test_evals.py", "bench/test_bench.py", "comparison/test_plans.py", "settings/test_recipes.py"),
    *("whole/test_readme.py", "whole/test_structure.py", "settings/test_config.py", "settings/test_options.py"),
]
"""Tests that take the names of mixers, evaluations and benches from conf/."""


def add_to(copy: Path) -> None:
    """Add the examples to a copy of the repository: a Python file and a yaml each, which write_yamls.py completes."""
    shown = {name: content for page in EXAMPLES for name, content in files(page).items()}
    shown["my_conf/attn/fades.yaml"] = OPTIONS.substitute(name="fades", Class="Fades")
    for name, group in ADDED.items():
        (copy / "attnbench" / ROOMS_OF[group] / f"{name}.py").write_text(shown[f"{name}.py"], encoding="utf-8")
        target = shown[f"my_conf/{group}/{name}.yaml"].replace("_target_: ", f"_target_: attnbench.{ROOMS_OF[group]}.")
        (copy / "conf" / group / f"{name}.yaml").write_text(target, encoding="utf-8")
    subprocess.run([sys.executable, "tools/write_yamls.py"], cwd=copy, env=python_path(copy), check=True)


@pytest.mark.slow
def test_one_more_of_each_is_two_new_files_and_no_edit(root, tmp_path):
    ignored = shutil.ignore_patterns(".*", "outputs", "wandb", "data", "__pycache__", "*.egg-info")
    copy = shutil.copytree(root, tmp_path / "copy", ignore=ignored, symlinks=True)
    shutil.copytree(root / "attnbench" / "data", copy / "attnbench" / "data", ignore=ignored)
    shutil.copytree(root / "conf" / "data", copy / "conf" / "data")
    shutil.copytree(root / "tests" / "data", copy / "tests" / "data")
    add_to(copy)
    chosen = " or ".join([*ADDED, "readme", "structure", "battery"])
    passed = run_tests(copy, "not slow", chosen) + run_tests(copy, "slow", "fading or fades")
    for name, least in {"fading": 20, "fades": 20, "echo": 3, "norm": 1, "test_structure": 5, "test_readme": 5}.items():
        assert sum(name in line for line in passed) >= least, passed


def run_tests(copy: Path, marked: str, chosen: str) -> list[str]:
    """Run the chosen tests, and return a line for each that passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-m", marked, "-k", chosen]
    command += [f"tests/{path}" for path in HELD_BY]
    done = subprocess.run(command, cwd=copy, env=python_path(copy), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return re.findall(r"^PASSED .*", done.stdout, re.MULTILINE)
