"""Classes that a configuration or a checkpoint may construct.

A class under `attnbench.` is always allowed. A class elsewhere must be named by attn.path on the command line, or by a
yaml of attn/, eval/ or bench/ in a folder that the caller gave (--config-dir, or conf/ in the working directory). These
call `trust`, for the process and its workers; a checkpoint never does.
"""

import importlib
import inspect
import re
import traceback
import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError, did_you_mean, one_line
from attnbench.settings.options import check_allowed
from attnbench.settings.schema import CONF, MixerSettings

Class = TypeVar("Class")

TRUSTED: set[str] = set()
"""Classes outside attnbench that this process may construct; only `trust` adds to it."""


def trust(targets: Iterable[str]) -> None:
    """Allow classes outside attnbench, module.Class or module:Class, that the user names in this command or call. Never
    for names in other files."""
    TRUSTED.update(target.replace(":", ".") for target in targets)


@cache
def own_targets(group: str) -> dict[str, str]:
    files = {path.stem: path.read_text(encoding="utf-8") for path in sorted((CONF / group).glob("*.yaml"))}
    found = {name: re.search(r"^_target_: *(\S+)", text, re.MULTILINE) for name, text in files.items()}
    return {name: match[1] for name, match in found.items() if match is not None}


def resolve(target: str, base: type[Class]) -> type[Class]:
    class_name = target.rpartition(".")[2]
    module = import_module(target)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"_target_={target}: {_no_such_class(module, class_name, base)}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise UserError(f"_target_={target}: {class_name} cannot be built without {missing}, which {base.__name__} has")
    for option, how in getattr(base, "constructor_takes", {}).items():
        if option not in inspect.signature(cls).parameters:
            raise UserError(f"_target_={target}: the constructor of {class_name} takes no {option}; {how}")
    return cls


MODULE, FLA_LAYER = "attnbench.mixers.module.Module", "attnbench.mixers.fla_layer.FlaLayer"
"""`_target_`s of adapters, whose options name a class from elsewhere."""


def class_named(mixer: MixerSettings) -> str:
    """Return a mixer's target or, for an adapter, the adapted layer."""
    if mixer.target == MODULE:
        return str(mixer.options.get("path")).replace(":", ".")
    return f"fla.layers.{mixer.options.get('layer')}" if mixer.target == FLA_LAYER else mixer.target


def resolve_path(path: str, base: type[Class]) -> type[Class]:
    """Return the class named `path`, package:Class, a subclass of `base`."""
    module_name, _, class_name = path.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        file = Path(module_name)
        raise UserError(
            f"attn.path={path}: must be package:Class, not a file; PYTHONPATH={file.parent} before the command and "
            f"attn.path={file.stem}:{class_name or 'Class'} name a class of this file"
        )
    if not module_name or not class_name.isidentifier():
        raise UserError(f"attn.path={path}: must be package:Class")
    target = f"{module_name}.{class_name}"
    if target not in TRUSTED:
        raise UserError(
            f"attn.path={path}: runs code of that class, which this command line does not name; if you trust it, "
            f"give attn.path={path} again, and PYTHONPATH=FOLDER before the command; in Python trusted=['{path}']"
        )
    module = import_module(target, f"attn.path={path}")
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"attn.path={path}: {_no_such_class(module, class_name, base)}")
    return cls


def _no_such_class(module: types.ModuleType, name: str, base: type) -> str:
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
    known = [key for key, value in classes.items() if value.__module__ == module.__name__]
    has = f"; it has {', '.join(known)}" if known else ""
    if hasattr(module, name):
        found = f"{getattr(module, name)!r:.80}"
        return f"{name} of {module.__name__} is {found}, and must be a class derived from {base.__name__}{has}"
    return f"{module.__name__} has no {base.__name__} of the name {name}{did_you_mean(name, known)}{has}"


def is_own(target: str) -> bool:
    return target.startswith("attnbench.")


def import_module(target: str, given: str = "") -> types.ModuleType:
    """Import the module of the class named `target`; messages name `given`, the user's setting."""
    given = given or f"_target_={target}"
    module_name, _, class_name = target.rpartition(".")
    path = module_name.replace(".", "/") + ".py"
    if not is_own(target) and target not in TRUSTED:
        raise UserError(
            f"{given}: is no class of attnbench; if you trust it, add --config-dir FOLDER, in which a yaml "
            f"of attn/, eval/ or bench/ names it, and PYTHONPATH=FOLDER before it, which has {path}"
        )
    if not module_name or not class_name:
        raise UserError(f"{given}: must be module.Class")
    try:
        return importlib.import_module(module_name)
    except SyntaxError as error:
        raise UserError(f"{given}: {error.filename}:{error.lineno}: no Python ({error.msg})") from None
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            way_out = "" if is_own(target) else f"; PYTHONPATH=FOLDER before the command finds {path} there"
            raise UserError(f"{given}: there is no module {error.name}{way_out}") from None
        where = _lines_of_import(error)[-1]
        raise UserError(f"{given}: {where}: an import fails ({error}); install it, or mend the line") from error
    # A user's module may raise any exception.
    except Exception as error:
        if is_own(target):
            raise
        lines = _lines_of_import(error)
        folder = lines[0].rpartition("/")[0]
        where = [line for line in lines if line.rpartition("/")[0] == folder][-1]
        raise UserError(f"{given}: cannot be imported: {one_line(error)}, at {where}") from error


def _lines_of_import(error: Exception) -> list[str]:
    """Return file:line of each frame below the import, the imported module first."""
    machinery = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{frame.filename}:{frame.lineno}"
        for frame in frames
        if frame.filename not in machinery and not frame.filename.startswith("<")
    ]


def build(target: str, options: dict[str, Any], base: type[Class], group: str = "attn", **given: Any) -> Class:
    """Construct `target` from the options of its yaml, and from those of `given` that its signature names."""
    cls = resolve(target, base)
    wanted = inspect.signature(cls).parameters
    from_model = {name: value for name, value in given.items() if name in wanted and name not in options}
    check_options(cls, options, given=from_model, group=group)
    check_allowed(cls, options, group)
    return cls(**from_model, **options)
