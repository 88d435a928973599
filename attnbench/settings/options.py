"""Options of an open group (attn, eval, bench): fields of a class, each with a default, a help text and a rule.

The class is the schema of its yaml, which tools/write_yamls.py writes from the fields.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Literal, dataclass_transform, get_args, get_origin

from attnbench.settings.check import check_value


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

    A value without an annotation is another default of an inherited option, or an `option` that replaces it. A
    constructor in the class stays.
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
        dataclass(kw_only=True, eq=False, repr=False)(cls)


def _inherited(cls: type) -> dict[str, "Field[Any]"]:
    bases = [base for base in reversed(cls.__mro__[1:]) if is_dataclass(base)]
    return {entry.name: entry for base in bases for entry in fields(base)}


def check_allowed(cls: type, options: Mapping[str, Any], group: str) -> None:
    """Raise UserError for the first option whose value breaks its rule."""
    for entry in fields(cls) if is_dataclass(cls) else ():
        if entry.name in options:
            check_value(f"{group}.{entry.name}", options[entry.name], **_rules_of(entry))


def _rules_of(entry: "Field[Any]") -> dict[str, Any]:
    rules = {name: rule for name, rule in entry.metadata.items() if name not in ("help", "yamls", "after")}
    return {**rules, "choices": get_args(entry.type)} if get_origin(entry.type) is Literal else rules
