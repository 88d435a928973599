"""Options of an open group (attn, eval, bench): fields of a class, each with a default, a help text and a rule.

The class is the schema of its yaml, which tools/write_yamls.py writes from the fields.
"""

import copy
import inspect
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, dataclass_transform

import yaml

from attnbench.settings.check import check_value

LINE = 120
"""Longest line of a yaml that has its help behind the value."""


def option(default: Any = MISSING, help: str = "", **allowed: Any) -> Any:
    """Declare an option.

    Args:
        help: its comment in the yaml and in --help.
        allowed: rules for its value, as in `check_value`: minimum=1, or choices=(...); `yamls`, a group and names of
            its yamls, which the option then has by name; of a mixer, `after`, the option before it in the yaml.
    """
    metadata = {"help": help, **allowed}
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy.deepcopy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(option, field))
class Options:
    """Base of a class whose options are its annotated fields; each subclass becomes a dataclass.

    A value without an annotation is another default of an inherited option, or an `option` that replaces it. A class
    with a constructor of its own keeps that.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        own = inspect.get_annotations(cls)
        changed = {
            name: entry
            for name, entry in _inherited(cls).items()
            if name in cls.__dict__ and name not in own and not isinstance(cls.__dict__[name], property)
        }
        for name, entry in changed.items():
            value = cls.__dict__[name]
            setattr(cls, name, value if isinstance(value, Field) else option(value, **entry.metadata))
        cls.__annotations__ = {**own, **{name: entry.type for name, entry in changed.items()}}
        dataclass(kw_only=True, eq=False)(cls)


def _inherited(cls: type) -> dict[str, "Field[Any]"]:
    bases = [base for base in reversed(cls.__mro__[1:]) if is_dataclass(base)]
    return {entry.name: entry for base in bases for entry in fields(base)}


def check_allowed(cls: type, options: Mapping[str, Any], group: str) -> None:
    """Raise UserError for the first option whose value breaks the rule of its field."""
    for entry in fields(cls) if is_dataclass(cls) else ():
        if entry.name in options:
            check_value(f"{group}.{entry.name}", options[entry.name], **rules_of(entry))


def rules_of(entry: "Field[Any]") -> dict[str, Any]:
    """Return what `check_value` asks of an option."""
    return {name: rule for name, rule in entry.metadata.items() if name not in ("help", "yamls", "after")}


def as_yaml(cls: type, target: str, package: str = "", apart: Collection[str] = ()) -> str:
    """Write the complete yaml of a class: its options, then those that it inherits, each with its help.

    Args:
        apart: options that no yaml has.
    """
    summary = inspect.getdoc(cls) or ""
    lines = [f"# @package {package}"] if package else []
    lines += [f"# {summary.splitlines()[0]}"] if summary else []
    of_bases = [{entry.name for entry in fields(base)} if is_dataclass(base) else () for base in cls.__mro__]
    entries = sorted(
        (entry for entry in fields(cls) if entry.name not in apart),
        key=lambda entry: max(n for n, names in enumerate(of_bases) if entry.name in names),
    )
    for entry in entries:
        lines += _defaults(entry)
    lines.append(f"_target_: {target}")
    for entry in entries:
        if "yamls" not in entry.metadata:
            lines += _lines(entry)
    return "".join(f"{line}\n" for line in lines)


def _defaults(entry: "Field[Any]") -> list[str]:
    """Write the defaults list of an option that has several yamls of another group by name."""
    if "yamls" not in entry.metadata:
        return []
    group, *names = entry.metadata["yamls"]
    lines = [f"  - /{group}@{entry.name}.{name}: {name}" for name in names]
    return [f"defaults: # {entry.metadata['help']}", *lines, ""]


def _lines(entry: "Field[Any]") -> list[str]:
    """Write one option."""
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    value = "???" if default is MISSING else default
    text = _written(value, block=False)
    is_block = len(text) > LINE - len(entry.name) and isinstance(value, list | dict)
    text = _written(value, block=is_block)
    line, help = f"{entry.name}:\n{text}" if is_block else f"{entry.name}: {text}", entry.metadata.get("help", "")
    if not help:
        return [line]
    if is_block or len(line) + len(help) + 3 > LINE:
        return [f"# {help}", line]
    return [f"{line} # {help}"]


def _written(value: Any, *, block: bool) -> str:
    is_flat = isinstance(value, list) and not any(isinstance(item, list) for item in value)
    style = (False if is_flat else None) if block else True
    text = yaml.safe_dump(value, width=10**6, allow_unicode=True, sort_keys=False, default_flow_style=style)
    text = text.removesuffix("\n").removesuffix("\n...")
    return "\n".join(f"  {line}" for line in text.splitlines()) if block else text
