"""Rules of single settings: names, types and ranges; combinations.py has rules of several.

`read` turns a plain mapping into a dataclass of schema.py. Open groups (attn, eval, bench) have the signature of their
class instead; `check_options` and `check_value` check both.
"""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attnbench.settings.errors import UserError, did_you_mean

Settings = TypeVar("Settings")

MAX_NAME_CHARACTERS = 80

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Parameters without a name: options by **kwargs are refused."""

GIVEN_BY_MODEL = ("dim", "layer", "layer_index", "num_layers")
"""Parameters of a mixer that no yaml sets."""


def read(
    cls: type[Settings],
    values: Mapping[str, Any],
    group: str = "",
    given: Mapping[str, Any] | None = None,
    hint: Callable[[str], str] = lambda name: "",
) -> Settings:
    """Build a dataclass of settings from a plain mapping.

    Args:
        values: by field, in types of yaml and JSON; a mapping for a field that is a dataclass.
        group: prefix of names in messages: "train" for train.batch_size.
        given: fields that the program fills in; `values` may not name them.
        hint: end of the message about an unknown name.
    """
    given, prefix = given or {}, f"{group}." if group else ""
    known = [name for name in _signature(cls)[0] if name not in given]
    for name, value in values.items():
        if name not in known:
            raise UserError(unknown_setting(_word(f"{prefix}{name}", value), name, known, hint(name)))
    check_options(cls, {**values, **given}, group=group)
    built = {name: _built(_signature(cls)[1][name], value, prefix + name) for name, value in values.items()}
    settings = cls(**built, **given)
    check(settings, prefix)
    return settings


def _built(annotation: Any, value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        # A group that may be null is a union.
        group = next(filter(is_dataclass, (annotation, *get_args(annotation))), None)
        return read(group, value, name) if isinstance(group, type) else value
    if isinstance(value, list) and get_origin(annotation) is list:
        [entry] = get_args(annotation)
        return [_built(entry, item, f"{name}[{index}]") for index, item in enumerate(value)]
    if annotation is not float:
        return value
    # 2 and 2.0 are the same configuration.
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        raise UserError(f"{name}={value}: must be finite") from None


def check_options(
    cls: type, options: Mapping[str, Any], *, given: Collection[str] = (), group: str = "attn", hint: str = ""
) -> None:
    """Refuse an option that is unknown to a constructor, of a wrong type, or missing, with the hint; the caller passes
    `given` too."""
    parameters, hints = _signature(cls)
    prefix = f"{group}." if group else ""
    for name, value in options.items():
        if name not in parameters:
            known = [known for known in parameters if known not in GIVEN_BY_MODEL]
            raise UserError(unknown_setting(_word(f"{prefix}{name}", value), name, known))
        if name in hints and not (matches := _matcher(hints[name]))(value):
            word = f"{prefix}{name}={'null' if value is None else value}"
            several = f"; a list of one is {prefix}{name}=[{value}]" if matches([value]) else ""
            raise UserError(f"{word}: must be {_described(hints[name])}{several}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options and name not in given:
            raise UserError(f"{prefix}{name}: must be given{hint}")


def unknown_setting(word: str, name: str, known: Iterable[str], hint: str = "") -> str:
    """Return the message; `word` is the override as given, train.num_step=5."""
    known = list(known)
    there = f"; there is {', '.join(known)}" if known else ""
    return f"{word}: unknown setting{did_you_mean(str(name), known)}{there}{hint}"


def _word(name: str, value: Any) -> str:
    return name if isinstance(value, Mapping) else f"{name}={value}"


@functools.cache
def _signature(cls: type) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    parameters = inspect.signature(cls).parameters.items()
    named = {name: parameter for name, parameter in parameters if parameter.kind not in VARIABLE}
    return named, get_type_hints(cls.__init__)


# Cached: rows of results are read by the ten thousand.
@functools.cache
def _matcher(annotation: Any) -> Callable[[Any], bool]:
    """Return a predicate for yaml values of an annotation; unknown annotations accept everything."""
    if annotation in (bool, str, list, dict):
        return lambda value: isinstance(value, annotation)
    if annotation in (int, float):
        kinds = (int, float) if annotation is float else int
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool)
    if annotation in (None, type(None)):
        return lambda value: value is None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        options = [_matcher(option) for option in arguments]
        return lambda value: any(matches(value) for matches in options)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if is_dataclass(annotation) and isinstance(annotation, type):
        return lambda value: isinstance(value, (Mapping, annotation))
    if origin is list:
        fits = _matcher(arguments[0])
        return lambda value: isinstance(value, list) and all(map(fits, value))
    if origin is dict:
        fits_key, fits_value = map(_matcher, arguments)
        return lambda value: (
            isinstance(value, dict) and all(map(fits_key, value)) and all(map(fits_value, value.values()))
        )
    return lambda value: True


def _described(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_described(option) for option in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if get_origin(annotation) is list:
        return f"a list, each entry {_described(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"a mapping, each entry {_described(get_args(annotation)[1])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    names |= {list: "a list", dict: "a mapping"}
    return names.get(annotation, "the name of a yaml of its group" if is_dataclass(annotation) else str(annotation))


def check(settings: Any, prefix: str = "") -> None:
    for entry in fields(settings):
        value, name = getattr(settings, entry.name), prefix + entry.name
        if is_dataclass(value):
            check(value, name + ".")
        else:
            check_value(name, value, **entry.metadata)


def check_value(
    name: str,
    value: Any,
    *,
    kind: Any = Any,
    distinct: bool = False,
    may_be_empty: bool = False,
    rising: bool = False,
    most: int | None = None,
    **allowed: Any,
) -> None:
    """Refuse a value, or an entry of a list, that is not allowed; null is.

    Args:
        kind: required type, such as list[int].
        distinct: a list or mapping must have entries (unless it `may_be_empty`), and none twice.
        rising: each entry of a list must be above the one before it.
        most: entries at most.
        allowed: `choices`, or bounds of a number: `minimum`, `above`, `below`, `maximum`; `besides` is allowed too.
    """
    if value is None:
        return
    if not _matcher(kind)(value):
        raise UserError(f"{name}={value}: must be {_described(kind)}")
    if distinct and not value and not may_be_empty:
        raise UserError(f"{name}={value}: must name at least one")
    if distinct and len(set(value)) < len(value):
        raise UserError(f"{name}={value}: names something twice")
    if rising and any(entry >= after for entry, after in pairwise(value)):
        raise UserError(f"{name}={value}: must rise from one to the next")
    if most is not None and len(value) > most:
        raise UserError(f"{name}: names {len(value)}, and may have {most}")
    for entry in value if isinstance(value, list) else [value]:
        problem = _problem(entry, **allowed)
        if problem:
            raise UserError(f"{name}={value}: must be {problem}")


def _problem(
    value: Any,
    *,
    choices: Collection[Any] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
    besides: float | None = None,
) -> str:
    if besides is not None and value == besides:
        return ""
    if choices is not None and value not in choices:
        return f"one of {', '.join(map(str, choices))}{did_you_mean(str(value), map(str, choices))}"
    # "not inside", so that NaN is refused.
    if minimum is not None and not value >= minimum:
        return f"at least {minimum}" if besides is None else f"{besides} or at least {minimum}"
    if above is not None and not value > above:
        return f"above {above}"
    if below is not None and not value < below:
        return f"below {below}"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    return f"at most {maximum}" if maximum is not None and not value <= maximum else ""


def check_name(setting_name: str, name: str) -> None:
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name) or len(name) > MAX_NAME_CHARACTERS:
        raise UserError(
            f"{setting_name}={name}: must be letters, digits and _ . + -, at most {MAX_NAME_CHARACTERS}; folders are "
            "called so"
        )


def check_outputs_dir(name: str) -> None:
    if not name:
        raise UserError("outputs_dir=: must name a folder; outputs is the usual one")


def check_argument(name: str, value: Any, kind: type | types.UnionType, remedy: str) -> None:
    """Refuse an argument of a call from Python that is of a wrong kind."""
    if not isinstance(value, kind):
        raise UserError(f"{name}={value!r:.80}: must be {remedy}, not {type(value).__name__}")


def setting_of(word: str) -> str:
    """Return GROUP.NAME of an override +GROUP.NAME=VALUE."""
    return word.lstrip("+~").partition("=")[0]
