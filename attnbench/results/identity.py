"""The identity of a result: a hash of its settings and of the code that decides its numbers.

The code is represented by NUMBERS_VERSION for attnbench, by its source for a class from elsewhere, and by the library's
version for a layer of flash-linear-attention.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import attnbench
from attnbench.settings.errors import UserError
from attnbench.settings.registry import import_module, is_own

TRAINED = ("data", "mixers", "model", "training")
"""Parts of the code that decide a training's numbers."""

LIBRARY = "flash-linear-attention"

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""


def config_hash(identity: Any) -> str:
    """Return eight hex digits. Neutral values (null, false) are left out, so that a new option changes no old hash."""

    def without_neutral(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_neutral(item) for key, item in value.items() if item is not None and item is not False}
        return [without_neutral(item) for item in value] if isinstance(value, list) else value

    return hashlib.sha256(json.dumps(without_neutral(identity), sort_keys=True).encode()).hexdigest()[:8]


def hashed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out "none", the neutral value of a choice."""
    return {name: value for name, value in options.items() if value != "none"}


def hash_with_code(content: list[Any], code: dict[str, Any]) -> str:
    return config_hash([*content, code] if code else content)


def code_of(targets: Iterable[str], parts: Iterable[str]) -> dict[str, Any]:
    """Describe the code in an identity:

        {"numbers_version": {"model": 1}, "sources": {"average.Average": "6dc9...e1"}}

    Args:
        targets: classes, for mixers those of `class_named`.
        parts: entries of NUMBERS_VERSION; 0 is left out.
    """
    versions = {part: attnbench.NUMBERS_VERSION[part] for part in parts if attnbench.NUMBERS_VERSION[part]}
    sources = {target: _code(target) for target in targets if not is_own(target)}
    return {name: part for name, part in (("numbers_version", versions), ("sources", sources)) if part}


def _code(target: str) -> str:
    """Return the hash of a source, or the version of flash-linear-attention."""
    if target.startswith("fla.layers."):
        try:
            return f"{LIBRARY} {metadata.version(LIBRARY)}"
        except metadata.PackageNotFoundError:
            raise UserError(
                f"{target}: {LIBRARY} is not installed, whose version is part of a result's identity; run: "
                f"pip install {LIBRARY}"
            ) from None
    return _source(import_module(target))


@functools.cache
def _source(module: ModuleType) -> str:
    """Kept with the module object: a file that is edited later is not what runs."""
    return hashlib.sha256(json.dumps(sorted(sources_of(module).items())).encode()).hexdigest()


def sources_of(module: ModuleType) -> dict[str, str]:
    """The sources of a module and of all modules beside it that it imports, directly or not, by name.

    They are written from syntax trees without docstrings, so that comments and layout change nothing.
    """
    name = getattr(getattr(module, "__spec__", None), "name", module.__name__)
    path = Path(getattr(module, "__file__", None) or "")
    is_package = path.name == "__init__.py"
    root = path.parents[name.count(".") + is_package] if path.suffix == ".py" else path
    if root.name in INSTALLED:
        # Only its own package counts, not every installed one.
        root, prefix = root / name.partition(".")[0], (name.partition(".")[0],)
    else:
        prefix = ()
    sources: dict[str, str] = {}
    todo = [(name, path, is_package)]
    while todo:
        name, path, is_package = todo.pop()
        if name in sources:
            continue
        tree = _syntax_tree(name, path)
        package = name.split(".") if is_package else name.split(".")[:-1]
        todo += _beside(tree, package, root, prefix)
        sources[name] = ast.unparse(_without_docstrings(tree))
    return sources


def _syntax_tree(name: str, path: Path) -> ast.Module:
    try:
        if path.suffix != ".py":
            raise OSError(None, "no .py file")
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{name}: its source cannot be read ({what}); results are kept under the source of classes from outside "
            "attnbench, so that those of an edited one are not taken for its own"
        ) from None


def _beside(
    tree: ast.Module, package: list[str], root: Path, prefix: tuple[str, ...]
) -> Iterator[tuple[str, Path, bool]]:
    """Yield name, file and is_package of the modules under `root` that a module imports, and of their parent
    packages."""
    for name in _imported(tree, package):
        parts = tuple(name.split("."))
        if parts[0] == "attnbench" or parts[: len(prefix)] != prefix:
            continue
        for depth in range(len(prefix) or 1, len(parts) + 1):
            path, full_name = root.joinpath(*parts[len(prefix) : depth]), ".".join(parts[:depth])
            if (path / "__init__.py").is_file():
                yield full_name, path / "__init__.py", True
            elif path.with_suffix(".py").is_file():
                yield full_name, path.with_suffix(".py"), False


def _imported(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Yield full names of imports anywhere in a module; the last part may be a name inside a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*whole, alias.name]) for alias in node.names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body[0] = ast.Pass()
    return tree
