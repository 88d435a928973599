"""Syntax trees of source files: names, imports, definitions and positions."""

import ast
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name


def names_in(statements: Sequence[ast.AST]) -> set[str]:
    return {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}


def attributes_in(statements: Sequence[ast.AST]) -> set[str]:
    """Return all attributes in these statements, including `getattr(x, "name")`."""
    found = set()
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found |= {it.value for it in node.args if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    return found


def imports_of(statements: Sequence[ast.stmt], module: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield each imported name with its module and its name there (None for the module itself)."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], (alias.name, None)
        elif isinstance(statement, ast.ImportFrom):
            relative = "." * statement.level + (statement.module or "")
            source = resolve_name(relative, module.rpartition(".")[0]) if statement.level else relative
            yield from ((alias.asname or alias.name, (source, alias.name)) for alias in statement.names)


def grouped(statements: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Keep assignments and the strings that document them together."""
    groups: list[list[ast.stmt]] = []
    for statement in statements:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text and groups and isinstance(groups[-1][0], (ast.Assign, ast.AnnAssign)):
            groups[-1].append(statement)
        else:
            groups.append([statement])
    return groups


def defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines; none for calls and functions named `_`."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name] if statement.name != "_" else []
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [it.id for target in targets if target is not None for it in ast.walk(target) if isinstance(it, ast.Name)]


def moved(lines: list[str], shift: int) -> list[str]:
    """Indent lines by `shift`, which may be negative."""
    return [(" " * shift + line if shift > 0 else line[-shift:]) if line.strip() else line for line in lines]


def first_line(statement: ast.stmt) -> int:
    """Decorators are included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
