"""Structure of attnbench/: its folders are the packages, imports point one way, and names in docstrings exist."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from sources import imports, imports_of, is_defined, references

from attnbench import PACKAGES

DOORS = {
    "hydra": {
        "cli/compose.py",
        "cli/launch.py",
        "cli/mistakes.py",
        "cli/mixer.py",
        "cli/reading_names.py",
        "cli/sweeps.py",
    },
    "omegaconf": {
        "cli/compose.py",
        "cli/launch.py",
        "cli/mistakes.py",
        "cli/mixer.py",
        "cli/plain.py",
        "cli/reading.py",
        "cli/reading_names.py",
        "cli/sweeps.py",
    },
    "wandb": {"training/wandb.py"},
    "wandb_workspaces": {"report/workspace.py"},
    "datasets": {"data/hub.py"},
    "huggingface_hub": set(),
    "altair": {"report/results.py"},
    "vl_convert": {"report/charts/engine.py"},
    "transformers": {"export/modeling.py"},
    "lm_eval": {"export/harness.py", "export/lm_eval.py"},
    "benchmarks": set(),
}
"""Libraries that some files alone may import."""

WITHOUT_TORCH = ("settings/*.py", "results/identity.py")
"""What reads settings, which must be quick and need no device."""


def wrong_folders(package: Path) -> list[str]:
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    loose = [path.name for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    return sorted(folders ^ set(PACKAGES)) + loose


def wrong_ways(package: Path) -> list[str]:
    inside = [found for found in imports(package) if "/" in found.file and found.name.startswith("attnbench.")]
    order = {name: index for index, name in enumerate(PACKAGES)}
    named = [found for found in inside if found.package in order]
    return [str(found) for found in named if order[found.package] > order[found.file.split("/")[0]]]


def undefined(package: Path) -> list[str]:
    return [str(found) for found in references(package) if not is_defined(found.name, package)]


def test_the_folders_are_the_packages(root):
    assert not wrong_folders(root / "attnbench")


def test_imports_point_one_way(root):
    assert not wrong_ways(root / "attnbench")


def test_no_package_outgrows_its_limit(root):
    limits = dict(re.findall(r"^\| (\w+) \| ([\d,]+) \|$", (root / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert set(limits) == set(PACKAGES)
    for name, limit in limits.items():
        lines = sum(len(path.read_text().splitlines()) for path in (root / "attnbench" / name).rglob("*.py"))
        assert lines <= int(limit.replace(",", "")), f"attnbench/{name} has {lines} lines: see CHANGELOG.md"


def test_names_in_docstrings_exist(root):
    assert not undefined(root / "attnbench")


def test_what_is_in_the_wrong_place_is_named(root, tmp_path):
    package = shutil.copytree(root / "attnbench", tmp_path / "attnbench", symlinks=True)
    (package / "helpers.py").touch()
    (package / "data" / "late.py").write_text("def f():\n    from attnbench.cli import compose\n")
    shutil.rmtree(package / "verdict")
    assert wrong_folders(package) == ["verdict", "helpers.py"]
    assert wrong_ways(package) == ["data/late.py:2 imports attnbench.cli.compose"]


def test_names_that_moved_are_found(tmp_path):
    package = tmp_path / "attnbench"
    (package / "model").mkdir(parents=True)
    (package / "settings").mkdir()
    (package / "settings" / "schema.py").write_text("class ModelSettings:\n    dim: int\n")
    (package / "model" / "__init__.py").touch()
    (package / "model" / "loss.py").write_text(
        "from attnbench.settings.schema import ModelSettings\n\nA, B = 1, 2\n\n\nclass Loss:\n    mean: int\n"
        '    """As `model.loss.B`, `model.loss.Loss.mean`, `attnbench.model.loss` and `model.dim`.\n\n'
        '    Not `model.loss.C`, `model.loss.ModelSettings`, `model.loss.Loss.sum`, `model.losses`, `model.width`."""\n'
    )
    wrong = ("loss.C", "loss.ModelSettings", "loss.Loss.sum", "losses", "width")
    assert undefined(package) == [f"model/loss.py:8 names model.{name}" for name in wrong]


def test_an_empty_package_is_an_error(tmp_path):
    assert wrong_folders(tmp_path) == sorted(PACKAGES)
    with pytest.raises(AssertionError, match="no docstring names anything"):
        references(tmp_path)
    with pytest.raises(AssertionError, match="nothing is imported"):
        imports(tmp_path)


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(root, library):
    users = {found.file for found in imports(root / "attnbench") if found.name.split(".")[0] == library}
    assert users == DOORS[library]


def test_settings_know_no_torch(root):
    package = root / "attnbench"
    todo = [path for pattern in WITHOUT_TORCH for path in package.glob(pattern)]
    reached: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in reached:
            continue
        reached.add(path)
        for found in imports_of(path, package):
            assert found.name.split(".")[0] != "torch", found
            module = root.joinpath(*found.name.split(".")[:-1]).with_suffix(".py")
            todo += [module] if found.name.startswith("attnbench.") and module.is_file() else []
    assert len(reached) > len(WITHOUT_TORCH)


def test_scripts_are_doors_without_logic(root):
    scripts = [*(root / "scripts").glob("*.py")]
    assert scripts
    for path in scripts:
        assert len(path.read_text().splitlines()) < 60, path.name


def test_the_reading_path_is_short():
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    path = re.findall(r"^\| (\w+/\w+\.py) \| (.+?) \|", page, re.MULTILINE)
    num_lines = 0
    for file, parts in path:
        text = (Path("attnbench") / file).read_text(encoding="utf-8")
        named = re.findall(r"`(\w+)`", parts)
        spans = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert named or parts == "all"
        assert spans.keys() >= {*named}, file
        num_lines += sum((spans[name].end_lineno or 0) - spans[name].lineno + 1 for name in named) or len(
            text.splitlines()
        )
    assert len(path) == 12
    assert num_lines <= 1500
