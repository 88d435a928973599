"""Source files of an exported model: the definitions of the package that it runs.

Names used in a definition are followed to their own definitions, from the classes of the model on. Of an nn.Module,
methods are copied if copied code mentions their name or torch defines it. A definition that equals its torch form is
copied with its comments; others are written anew.

The files are in one folder, attnbench/ops/common/scan.py as ops_common_scan.py, with relative imports, as the loader of
transformers expects.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import itertools
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from torch import nn

from attnbench.export.syntax import attributes_in, defined, first_line, grouped, imports_of, moved, names_in
from attnbench.export.torch_form import TorchForm
from attnbench.settings.errors import UserError

ROOT = "attnbench"
WHOLE = "attnbench.export."
"""Modules written for export, which are copied with all their methods."""
HEADER, LICENSED = "# {}, as far as this model runs it.", " attnbench's, under the MIT licence: see LICENSE."


class Group:
    """A definition in a file or class, with the string that documents it, and its torch form.

    A class inside a class (`is_member`) is copied as a whole.
    """

    def __init__(self, statements: list[ast.stmt], form: TorchForm, *, is_member: bool = False) -> None:
        self.statements, first = statements, statements[0]
        self.cls = first if isinstance(first, ast.ClassDef) and not is_member else None
        members = grouped(self.cls.body) if self.cls is not None else []
        self.members = [Group(statements, form, is_member=True) for statements in members]
        self.changed = [] if self.cls else [form.visit(copy.deepcopy(statement)) for statement in statements]
        self.names = defined(first)

    @functools.cached_property
    def registers_at(self) -> str | None:
        """Name of the definition at which it registers something: `scan` in `@scan.register_fake`."""
        first = self.statements[0]
        calls = first.decorator_list if isinstance(first, ast.FunctionDef) else [getattr(first, "value", None)]
        for call in calls if not self.names else []:
            function = call.func if isinstance(call, ast.Call) else call
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                return function.value.id
        return None


class Source:
    def __init__(self, name: str, text: str, own: frozenset[str]) -> None:
        self.name, self.lines, self.form = name, text.splitlines(), TorchForm(own)
        statements = ast.parse(text).body
        self.docstring = statements[0] if ast.get_docstring(ast.Module(statements, [])) is not None else None
        self.groups = [Group(statements, self.form) for statements in grouped(statements)]
        self.imports = dict(imports_of(statements, name))
        # The copy imports copied modules at its top, rather than in functions.
        for local, source in imports_of(self.form.own_imports, name):
            if self.imports.setdefault(local, source) != source:
                raise UserError(f"{name}: imports two things as {local}, so it cannot be exported; rename one")
        self.statements = {
            (type(node), first_line(node), node.col_offset): node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.stmt)
        }
        self.definitions = {name: group for group in self.groups for name in group.names}
        self.called: dict[str, frozenset[str] | None] = {}

    def is_kept(self, group: Group, names: set[str]) -> bool:
        """True for a needed definition, or a registration at one."""
        return any(name in names for name in group.names) or group.registers_at in names

    def torch_form(self, group: Group, mentioned: set[str]) -> list[ast.stmt]:
        """Return the copy of a group; of an nn.Module, only with needed members."""
        if group.cls is None:
            return group.changed
        trimmed = copy.copy(group.cls)
        trimmed.body = [it for member in self.members(group, mentioned) for it in member.changed]
        return [trimmed]

    def members(self, group: Group, mentioned: set[str]) -> list[Group]:
        called = self._called_by_torch(group.names[0])
        if called is None:
            return group.members
        return [it for it in group.members if not it.names or any(name in mentioned | called for name in it.names)]

    def _called_by_torch(self, class_name: str) -> frozenset[str] | None:
        """Return the names of a module's outside bases and its fields; None for classes that are not modules."""
        if class_name not in self.called:
            is_whole = self.name.startswith(WHOLE)
            cls = object if is_whole else getattr(importlib.import_module(self.name), class_name)
            outside = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in self.form.own]
            # A dataclass's fields are the keywords of its constructor, which calls __post_init__.
            options = {it.name for it in fields(cls)} | {"__post_init__"} if is_dataclass(cls) else set()
            names = frozenset(options.union(*(vars(base) for base in outside)))
            self.called[class_name] = names if issubclass(cls, (nn.Module, torch.autograd.Function)) else None
        return self.called[class_name]

    def text(self, names: set[str], mentioned: set[str], flat: dict[str, str]) -> str:
        """Return the exported file with the needed definitions `names`; `flat` has file names by copied module."""
        kept = [group for group in self.groups if self.is_kept(group, names)]
        used = names_in([it for group in kept for it in self.torch_form(group, mentioned)]) - set(self.definitions)
        licence = LICENSED if self.name.partition(".")[0] == ROOT else ""
        head = [HEADER.format(self.name.replace(".", "/") + ".py") + licence]
        head += self._verbatim(self.docstring) if self.docstring is not None else []
        written = (line for group in kept for line in self._written(group, mentioned))
        return "\n".join([*head, "", *self._import_lines(used, flat), *written]) + "\n"

    def _import_lines(self, used: set[str], flat: dict[str, str]) -> list[str]:
        lines, named = [], dict[str, list[str]]()
        for local, (module, name) in self.imports.items():
            if local not in used:
                continue
            alias = f" as {local}" if local not in (name, module) else ""
            if name is None:
                lines.append(f"import {module}{alias}")
            else:
                named.setdefault(f".{flat[module]}" if module in flat else module, []).append(f"{name}{alias}")
        for module in sorted(named, key=lambda module: (module.startswith("."), module)):
            line = f"from {module} import {', '.join(named[module])}"
            broken = [f"from {module} import (", *(f"    {name}," for name in named[module]), ")"]
            lines += [line] if len(line) <= 120 else broken
        return lines

    def _written(self, group: Group, mentioned: set[str]) -> list[str]:
        """Return the lines of a definition, with empty lines and comments above it."""
        first = group.statements[0]
        if group.cls is None:
            return [line for statement in group.changed for line in self._statement(statement, first.col_offset)]
        head = self._head(group.cls)
        members = [self._written(member, mentioned) for member in self.members(group, mentioned)]
        return [*self._above(first), *head, *(itertools.chain(*members) if members else ["    pass"])]

    def _statement(self, statement: ast.stmt, indent: int) -> list[str]:
        """Return the lines of a statement, copied if it is in the file, otherwise written anew."""
        is_new = not hasattr(statement, "lineno")
        original = (
            None if is_new else self.statements.get((type(statement), first_line(statement), statement.col_offset))
        )
        if original is not None and ast.dump(original) == ast.dump(statement):
            return moved([*self._above(original), *self._verbatim(original)], indent - original.col_offset)
        if isinstance(original, ast.FunctionDef) and isinstance(statement, ast.FunctionDef):
            body = (line for inner in statement.body for line in self._statement(inner, indent + 4))
            decorators = [" " * indent + "@" + ast.unparse(it) for it in statement.decorator_list]
            head = self._head(original)[original.lineno - first_line(original) :]
            return [*self._above(original), *decorators, *moved(head, indent - original.col_offset), *body]
        return [" " * indent + line for line in ast.unparse(ast.fix_missing_locations(statement)).splitlines()]

    def _head(self, definition: ast.FunctionDef | ast.ClassDef) -> list[str]:
        first = definition.body[0]
        return self.lines[first_line(definition) - 1 : first_line(first) - 1 - len(self._above(first))]

    def _verbatim(self, statement: ast.stmt) -> list[str]:
        return self.lines[first_line(statement) - 1 : statement.end_lineno]

    def _above(self, statement: ast.stmt) -> list[str]:
        start = end = first_line(statement) - 1
        while start and self.lines[start - 1].strip().startswith("#"):
            start -= 1
        while start and not self.lines[start - 1].strip():
            start -= 1
        return self.lines[start:end]


def copied_sources(roots: dict[str, str], own: frozenset[str]) -> dict[str, str]:
    """Return the files of a model by name.

    Args:
        roots: text by name of modules that are copied as a whole: `attnbench.export.modeling`.
        own: root packages that are copied.
    """
    sources = {name: Source(name, text, own) for name, text in roots.items()}
    wanted = {name: set(source.definitions) for name, source in sources.items()}
    mentioned: set[str] = set()
    before = -1
    while before != (before := sum(map(len, wanted.values())) + len(mentioned)):
        for module in list(wanted):
            source = _source(module, sources, own)
            groups = [group for group in source.groups if source.is_kept(group, wanted[module])]
            kept = [it for group in groups for it in source.torch_form(group, mentioned)]
            mentioned |= attributes_in(kept)
            for name in names_in(kept):
                if name in source.definitions:
                    wanted[module].add(name)
                elif name in source.imports:
                    defined_in, defined_as = _origin(source, name, sources)
                    if defined_as is not None and defined_in.partition(".")[0] in own:
                        wanted.setdefault(defined_in, set()).add(defined_as)
    flat = {name: file_of(name) for name in wanted}
    return {f"{flat[name]}.py": sources[name].text(wanted[name], mentioned, flat) for name in wanted}


def _source(module: str, sources: dict[str, Source], own: frozenset[str]) -> Source:
    if module not in sources:
        sources[module] = Source(module, read_source(module), own)
    return sources[module]


def _origin(source: Source, name: str, sources: dict[str, Source]) -> tuple[str, str | None]:
    """Return the module that defines an imported name, and import it from there, so that files that only pass it on are
    not copied."""
    module, name_there = source.imports[name]
    own, full_name = source.form.own, module if name_there is None else f"{module}.{name_there}"
    if not source.form.may_import(full_name):
        raise UserError(
            f"{source.name}: imports {module} outside a function, so it cannot be exported; kernels and libraries "
            "are imported where they are called"
        )
    while module.partition(".")[0] in own:
        passing_on = _source(module, sources, own) if name_there is not None else None
        if passing_on is not None and name_there in passing_on.definitions:
            break
        if passing_on is None or name_there not in passing_on.imports:
            raise UserError(
                f"{source.name}: imports {full_name}, which is no class, function or value of a file, so it cannot be "
                "exported; from MODULE import NAME names what it needs"
            )
        module, name_there = passing_on.imports[name_there]
    source.imports[name] = (module, name_there)
    return source.imports[name]


def file_of(module: str) -> str:
    """A name such as `ops_common_scan`."""
    if module.startswith(WHOLE):
        return f"{module.removeprefix(WHOLE)}_{ROOT}"
    return module.removeprefix(f"{ROOT}.").replace(".", "_")


def read_source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin if spec is not None and spec.origin is not None else "")
    if path.suffix != ".py":
        raise UserError(f"{module}: has no source file, so it cannot be exported")
    return path.read_text(encoding="utf-8")
