"""Other people's source: single files that the user names, and what it means that one is not there."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from attnbench.settings.errors import UserError


class AbsentPeerError(UserError):
    """A peer that this machine does not have; it is left out by name."""


def load_module(path: str, name: str) -> Any:
    """A single Python file, without the package that it may belong to.

    Raises:
        UserError: no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered, because dataclasses look their own module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
