"""Options of a mixer, each written once: a dataclass field with its default and the comment of its yaml."""

from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, dataclass_transform, get_args, get_origin

from attnbench.mixers.base import Mixer
from attnbench.settings.check import check_value
from attnbench.settings.options import option, rules_of


def redefined(default: Any, help: str, *, after: str = "") -> Any:
    """Give an inherited option another default and comment; its type stays."""
    return option(default, help, after=after)


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(option,))
class Options(Mixer):
    """Mixer whose annotated attributes are the keywords of its constructor, those with a default its options.

    A class may give an inherited option another default, or with `redefined` another comment too; `ClassVar` in front
    of its type takes the option away. `__post_init__` builds the modules.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = [entry for base in cls.__mro__[1:] if is_dataclass(base) for entry in fields(base)]
        for entry in inherited:
            given = vars(cls).get(entry.name, entry)
            if given is not entry and entry.name not in cls.__annotations__:
                is_field = isinstance(given, Field)
                setattr(cls, entry.name, given if is_field else field(default=given, metadata=entry.metadata))
                cls.__annotations__[entry.name] = entry.type
        dataclass(kw_only=True, eq=False, repr=False)(cls)
        for entry in fields(cls):  # pyright: ignore[reportArgumentType]
            # A class attribute would hide a submodule of the same name.
            if entry.name in vars(cls):
                delattr(cls, entry.name)

    def check_options(self) -> None:
        """Raise UserError for an option outside what its type or its bounds allow."""
        for entry in fields(self):  # pyright: ignore[reportArgumentType]
            allowed = rules_of(entry)
            if get_origin(entry.type) is Literal:
                allowed = {**allowed, "choices": get_args(entry.type)}
            check_value(f"attn.{entry.name}", getattr(self, entry.name), **allowed)


def options_of(cls: type[Mixer]) -> dict[str, Field]:
    """Return the options of a class by name, in the order of its yaml."""
    found: list[Field] = []
    for entry in fields(cls) if issubclass(cls, Options) else ():  # pyright: ignore[reportArgumentType]
        if "help" in entry.metadata:
            before = [index for index, other in enumerate(found) if other.name == entry.metadata.get("after")]
            found.insert(before[0] + 1 if before else len(found), entry)
    return {entry.name: entry for entry in found}
