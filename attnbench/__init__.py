"""attnbench: any sequence mixer in the same language model, on the same data, measured by the same battery.

The names below are what programs of one's own import: `from attnbench import compare, run`. They stay here, wherever
the modules that define them go. A module is loaded when one of its names is asked for, so that importing attnbench
loads neither torch nor Hydra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench.cli.compose import compose
    from attnbench.cli.from_python import compare, load, run
    from attnbench.cli.generation import sample
    from attnbench.model.stored import load_checkpoint
    from attnbench.results.tables import read_folders
    from attnbench.training.prepare import prepare

__all__ = ["compare", "compose", "load", "load_checkpoint", "prepare", "read_folders", "run", "sample"]

PACKAGES = (
    "settings",
    "machine",
    "results",
    "data",
    "ops",
    "mixers",
    "model",
    "training",
    "evals",
    "verdict",
    "correctness",
    "bench",
    "report",
    "comparison",
    "export",
    "cli",
)
"""Packages in import order: a file imports from its own package and from packages before it."""

NUMBERS_VERSION = {"data": 0, "mixers": 0, "model": 0, "training": 0, "evals": 3, "timing": 0}
"""Versions of the numbers that each part of the code gives, `mixers` with their kernels.

Raise a version where golden rows of its part change on purpose (tests/support/golden.py). It enters the identity
of every result of that part, so that results of earlier numbers are measured again. Version 0 is not hashed.
"""

DEFINED_IN = {
    "compare": "cli.from_python",
    "compose": "cli.compose",
    "load": "cli.from_python",
    "load_checkpoint": "model.stored",
    "prepare": "training.prepare",
    "read_folders": "results.tables",
    "run": "cli.from_python",
    "sample": "cli.generation",
}


def __getattr__(name: str) -> Any:
    if name not in DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"attnbench.{DEFINED_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
