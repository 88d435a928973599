import pkgutil
from importlib import import_module

import attnbench.ops


def import_kernels() -> None:
    """Import the Triton modules of every operator (0.25 s at most) before torch.compile traces: later, threads that
    compile kernels hold Python's lock and slow down imports."""
    for module in pkgutil.walk_packages(attnbench.ops.__path__, "attnbench.ops."):
        if ".triton." in module.name:
            import_module(module.name)
