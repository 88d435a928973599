"""Importing all Triton modules at once."""

import pkgutil
from importlib import import_module

import attnbench.ops


def import_kernels() -> None:
    """Import the Triton modules of every operator, a quarter of a second at most. Call it before torch.compile traces
    what imports those that it uses: by then threads that compile the first of them hold Python's lock, and importing
    the others takes longer."""
    for module in pkgutil.walk_packages(attnbench.ops.__path__, "attnbench.ops."):
        if ".triton." in module.name:
            import_module(module.name)
