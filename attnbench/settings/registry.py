"""Which classes a configuration or a checkpoint may construct, and the check of their settings.

A class under `attnbench.` may be named by anyone. A class elsewhere only by a yaml in an attn/, eval/ or bench/
folder that the local command line (`--config-dir`) or the Python caller gave: both call `trust`, for the whole process
and the workers that it starts. What a checkpoint says of itself never extends that.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attnbench.settings.errors import UserError, did_you_mean

Class = TypeVar("Class")

TRUSTED: set[str] = set()
"""Classes outside attnbench that this process may construct; only `trust` adds to them."""


def trust(targets: Iterable[str]) -> None:
    """Allow classes outside attnbench from here on.

    For what a user says here and now: their --config-dir, or a call. Never for what a file says of itself.
    """
    TRUSTED.update(targets)


def resolve(target: str, base: type[Class]) -> type[Class]:
    """The class named `target`, a subclass of `base`.

    Raises:
        UserError: a class that may not be constructed, does not exist, or is no `base`.
    """
    module = import_module(target)
    module_name, _, class_name = target.rpartition(".")
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"_target_={target}: {module_name} has no {base.__name__} of the name {class_name}")
    return found


def is_own(target: str) -> bool:
    """True for a class of attnbench."""
    return target.startswith("attnbench.")


def import_module(target: str) -> types.ModuleType:
    """The module that the class named `target` stands in.

    Raises:
        UserError: a class that may not be constructed, or no such module.
    """
    if not is_own(target) and target not in TRUSTED:
        raise UserError(
            f"_target_={target}: is no class of attnbench; if you trust it, add --config-dir FOLDER, in which a yaml "
            f"of attn/, eval/ or bench/ names it, and PYTHONPATH=FOLDER before it, which has {_file_of(target)}"
        )
    module_name, _, class_name = target.rpartition(".")
    if not module_name or not class_name:
        raise UserError(f"_target_={target}: must be module.Class")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        way_out = "" if is_own(target) else f"; PYTHONPATH=FOLDER before the command finds {_file_of(target)} there"
        raise UserError(f"_target_={target}: there is no module {error.name}{way_out}") from None


def _file_of(target: str) -> str:
    """File of the module in which a class is looked for: mine/average.py."""
    return target.rpartition(".")[0].replace(".", "/") + ".py"


def build(target: str, options: dict[str, Any], base: type[Class], **given: Any) -> Class:
    """Constructs `target` from its yaml's options; `given` are passed on where the signature names them."""
    cls = resolve(target, base)
    wanted = inspect.signature(cls).parameters
    from_model = {name: value for name, value in given.items() if name in wanted and name not in options}
    check_options(cls, options, given=from_model)
    return cls(**from_model, **options)


def check_options(cls: type, options: dict[str, Any], *, given: Collection[str] = (), group: str = "attn") -> None:
    """Raises UserError for an option the constructor does not name, of a wrong type, or missing."""
    parameters, types_of = _signature(cls)
    settable = [name for name in parameters if name not in ("dim", "layer", "num_layers")]
    prefix = f"{group}." if group else ""
    for name, value in options.items():
        if name not in parameters:
            raise UserError(
                f"{prefix}{name}={value}: unknown setting of {cls.__name__}{did_you_mean(name, settable)}, which has "
                f"{', '.join(settable)}"
            )
        if name in types_of and not _matches(value, types_of[name]):
            raise UserError(f"{prefix}{name}={_shown(value)}: must be {_described(types_of[name])}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options and name not in given:
            raise UserError(f"{prefix}{name} is missing: {cls.__name__} needs it")


@functools.cache
def _signature(cls: type) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    return inspect.signature(cls).parameters, get_type_hints(cls.__init__)


def _matches(value: Any, annotation: Any) -> bool:
    """Whether a plain yaml value fits a constructor's annotation; annotations beyond the plain ones are not judged."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_matches(value, option) for option in get_args(annotation))
    if annotation in (None, type(None)):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (bool, str, list, dict):
        return isinstance(value, annotation)
    if get_origin(annotation) is list:
        return isinstance(value, list) and all(_matches(entry, get_args(annotation)[0]) for entry in value)
    if get_origin(annotation) is dict:
        names, values = get_args(annotation)
        return isinstance(value, dict) and all(_matches(k, names) and _matches(v, values) for k, v in value.items())
    return True


def _described(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_described(option) for option in get_args(annotation))
    if get_origin(annotation) is list:
        return f"a list, each entry {_described(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a mapping"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    names |= {list: "a list", dict: "a mapping"}
    return names.get(annotation, str(annotation))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
