"""The device, its compilers and the commit of the source."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.export import huggingface
from attnbench.machine.environment import source_commit
from attnbench.results import folder as results_folder

SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy
from attnbench.machine.device import COMPILER, start_afresh
x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8)
linear_cross_entropy(x, weight, torch.arange(4), None, True)[0].backward()
start_afresh(torch.device("cpu"))
assert COMPILER not in sys.modules, "loaded without anything to compile"
torch.compile(lambda x: x)
assert COMPILER in sys.modules
"""


@pytest.mark.slow
def test_a_process_that_compiles_nothing_does_not_load_the_compiler():
    """That takes seconds, of every worker that trains a second model."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def repository(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    # As its own environment has it: a test may run in a hook of git.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ["-c", "user.email=a@b", "-c", "user.name=n", "commit", "-q", "--allow-empty"]
    for command in (["init", "-q"], [*words, "-m", folder.name], ["rev-parse", "--short=12", "HEAD"]):
        result = subprocess.run(
            ["git", *command], cwd=folder, capture_output=True, text=True, env=variables, check=True
        )
    return result.stdout.strip()


def test_the_commit_is_that_of_the_source_whatever_git_s_variables_say(tmp_path, monkeypatch):
    ours, other = repository(tmp_path / "ours"), repository(tmp_path / "other")
    (tmp_path / "ours" / "pyproject.toml").write_text('[project]\nname = "attnbench"\n')
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nothing"))
    assert ours != other
    assert source_commit(tmp_path / "ours") == (ours, False)
    # A repository of a folder above is not ours either, where our own is damaged.
    inner = tmp_path / "other" / "inner"
    (inner / ".git").mkdir(parents=True)
    (inner / "pyproject.toml").write_text('[project]\nname = "attnbench"\n')
    monkeypatch.delenv("GIT_DIR")
    assert source_commit(inner) == (None, None)
    (inner / "COMMIT").write_text("0123456789ab\n")
    source_commit.cache_clear()
    assert source_commit(inner) == ("0123456789ab", None)


@pytest.mark.parametrize("project", ["", "[project]\nname = 'other'\n", "no toml [", "project = 1\n"])
def test_files_of_other_packages_beside_ours_are_not_ours(tmp_path, monkeypatch, project):
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, content in (("pyproject.toml", project), ("COMMIT", "0123456789ab"), ("LICENSE", "theirs")):
        (packages / name).write_text(content)
    assert source_commit(packages) == (None, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results_folder, "ROOT", packages)
    assert results_folder.data_root() == tmp_path
    monkeypatch.setattr(huggingface, "ROOT", packages)
    installed = SimpleNamespace(read_text=lambda name: "ours")
    monkeypatch.setattr(huggingface.metadata, "distribution", lambda name: installed)
    assert huggingface._licence() == "ours"
