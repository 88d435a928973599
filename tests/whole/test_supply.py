"""What is installed: bounded above, and pinned to versions that were run."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement


def requirements(root: Path) -> list[Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def pins(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if re.match(r"[a-z]", line))


def test_every_dependency_is_bounded_above(root):
    loose = [str(own) for own in requirements(root) if not any(s.operator in ("<", "==") for s in own.specifier)]
    assert not loose


def test_every_dependency_is_pinned_within_its_bounds(root):
    pinned = pins(root)
    for own in requirements(root):
        assert own.name in pinned, f"{own.name} is not in constraints.txt"
        assert own.specifier.contains(pinned[own.name]), own


@pytest.mark.parametrize("target", ["fuzz", "audit"])
def test_the_makefile_has_what_the_documentation_names(root, target):
    assert re.search(rf"^{target}: ", (root / "Makefile").read_text(), re.MULTILINE)
