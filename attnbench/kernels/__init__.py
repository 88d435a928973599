"""Our own Triton kernels. An operator has a file, with fake, autograd and vmap rules, so that compile and CUDA graphs
see through it; the kernels of the longer ones have files of their own. No model code here: a mixer imports the operator
it has chosen where it uses it, because Triton is there on CUDA machines alone."""

import pkgutil
from importlib import import_module


def import_kernels() -> None:
    """Import them all, a quarter of a second at most, before torch.compile traces what imports those that it uses: by
    then threads that compile the first of them hold Python's lock, and importing the others takes longer."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
