"""Source files of the package as the tests of its structure read them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import, wherever it stands."""

    file: str
    line: int
    name: str
    """In full: `from package import name` gives package.name."""

    @property
    def room(self) -> str:
        return self.name.split(".")[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


@cache
def imports(package: Path) -> list[Import]:
    """All imports of a package's files, from a name of the package itself (its __init__) none."""
    found = [found for path in sorted(package.rglob("*.py")) for found in imports_of(path, package)]
    assert found, f"{package}: nothing is imported there, so nothing is looked at"
    return found


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    file = path.relative_to(package).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are written in full"
            yield from (Import(file, node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
