"""Options of a mixer: dataclass fields with a default and the comment of the yaml."""

from dataclasses import Field, fields
from typing import Any, dataclass_transform

from attnbench.mixers.base import Mixer
from attnbench.settings.options import Options, check_allowed, option


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(option,))
class MixerOptions(Options, Mixer):
    """Mixer whose annotated attributes are the keywords of its constructor, those with a default its options.

    `ClassVar` before an inherited option's type removes the option. `__post_init__` builds the modules.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for entry in fields(cls):  # pyright: ignore[reportArgumentType]
            # A class attribute would hide a submodule of the same name.
            if entry.name in vars(cls):
                delattr(cls, entry.name)

    def check_options(self) -> None:
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # pyright: ignore[reportArgumentType]
        check_allowed(type(self), given, "attn")


def options_of(cls: type[Mixer]) -> dict[str, Field]:
    found: list[Field] = []
    for entry in fields(cls) if issubclass(cls, MixerOptions) else ():  # pyright: ignore[reportArgumentType]
        if "help" in entry.metadata:
            before = [index for index, other in enumerate(found) if other.name == entry.metadata.get("after")]
            found.insert(before[0] + 1 if before else len(found), entry)
    return {entry.name: entry for entry in found}
