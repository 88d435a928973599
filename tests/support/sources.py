"""Source files of the package as the tests of its structure read them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attnbench import PACKAGES

REFERENCE = re.compile(rf"`((?:attnbench|{'|'.join(PACKAGES)})(?:\.\w+)+)`")
SETTINGS = {"model": "ModelSettings", "data": "DataSettings"}
"""Packages that are groups of settings too, and the classes of those."""


class Import(NamedTuple):
    """One import, wherever it stands."""

    file: str
    line: int
    name: str
    """In full: `from package import name` gives package.name."""

    @property
    def package(self) -> str:
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


class Reference(NamedTuple):
    """One dotted name of the package in a docstring, as `results.rows.ResultRow`."""

    file: str
    line: int
    """First line of the docstring."""
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} names {self.name}"


def references(package: Path) -> list[Reference]:
    found = [
        Reference(path.relative_to(package).as_posix(), node.lineno, name)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for name in REFERENCE.findall(node.value.value)
    ]
    assert found, f"{package}: no docstring names anything, so nothing is looked at"
    return found


def is_defined(name: str, package: Path) -> bool:
    """True for a module, for a name that one defines itself and does not import, and for a setting."""
    parts = name.removeprefix("attnbench.").split(".")
    group = SETTINGS.get(parts[0])
    return _has(package, parts) or (group is not None and _has(package, ["settings", "schema", group, *parts[1:]]))


def _has(folder: Path, parts: list[str]) -> bool:
    while parts and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    module = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").is_file():
        module, parts = folder / f"{parts[0]}.py", parts[1:]
    body: list[ast.stmt] = ast.parse(module.read_text()).body
    for part in parts:
        names = _names(body)
        if part not in names:
            return False
        body = names[part]
    return True


def _names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Names that a module or a class defines, those of classes with their content."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id: [] for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names
