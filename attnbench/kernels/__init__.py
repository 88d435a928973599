"""Our own Triton kernels, a folder a family. An operator has a file of its name (diagonal/decay.py has diagonal_decay)
with fake, autograd and vmap rules, so that compile and CUDA graphs see through it; its kernels, and how they are
launched, have files beside it. No model code here: a mixer imports the operator it has chosen where it uses it, because
Triton is there on CUDA machines alone."""

import pkgutil
from importlib import import_module


def import_kernels() -> None:
    """Import them all, a quarter of a second at most, before torch.compile traces what imports those that it uses: by
    then threads that compile the first of them hold Python's lock, and importing the others takes longer."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        import_module(module.name)
