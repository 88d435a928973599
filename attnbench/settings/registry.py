"""Registry of classes that a configuration or a checkpoint may construct.

A class under `attnbench.` may be named by anyone. A class elsewhere only by a yaml in an attn/, eval/ or bench/
folder that the local command line (`--config-dir`) or the Python caller gave: both call `trust`, for the whole process
and the workers that it starts. A checkpoint never extends that.
"""

import importlib
import inspect
import types
from collections.abc import Iterable
from typing import Any, TypeVar

from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError

Class = TypeVar("Class")

TRUSTED: set[str] = set()
"""Classes outside attnbench that this process may construct; only `trust` adds to them."""


def trust(targets: Iterable[str]) -> None:
    """Allow classes outside attnbench from here on.

    For names that a user gives here and now: by their --config-dir, or in a call. Never for names in a file that is
    read.
    """
    TRUSTED.update(targets)


def resolve(target: str, base: type[Class]) -> type[Class]:
    """Return the class named `target`, a subclass of `base`.

    Raises:
        UserError: a class that may not be constructed, does not exist, or is no `base`.
    """
    module_name, _, class_name = target.rpartition(".")
    cls = getattr(import_module(target), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"_target_={target}: {module_name} has no {base.__name__} of the name {class_name}")
    return cls


def is_own(target: str) -> bool:
    """True for a class of attnbench."""
    return target.startswith("attnbench.")


def import_module(target: str) -> types.ModuleType:
    """Import the module of the class named `target`.

    Raises:
        UserError: a class that may not be constructed, or no such module.
    """
    module_name, _, class_name = target.rpartition(".")
    path = module_name.replace(".", "/") + ".py"
    if not is_own(target) and target not in TRUSTED:
        raise UserError(
            f"_target_={target}: is no class of attnbench; if you trust it, add --config-dir FOLDER, in which a yaml "
            f"of attn/, eval/ or bench/ names it, and PYTHONPATH=FOLDER before it, which has {path}"
        )
    if not module_name or not class_name:
        raise UserError(f"_target_={target}: must be module.Class")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        way_out = "" if is_own(target) else f"; PYTHONPATH=FOLDER before the command finds {path} there"
        raise UserError(f"_target_={target}: there is no module {error.name}{way_out}") from None


def build(target: str, options: dict[str, Any], base: type[Class], group: str = "attn", **given: Any) -> Class:
    """Construct `target` from its yaml's options; `given` are passed on where the signature names them.

    Args:
        group: stands before the names of options in messages.
    """
    cls = resolve(target, base)
    wanted = inspect.signature(cls).parameters
    from_model = {name: value for name, value in given.items() if name in wanted and name not in options}
    check_options(cls, options, given=from_model, group=group)
    return cls(**from_model, **options)
