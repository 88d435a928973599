"""Definitions that flash-linear-attention ships beside its kernels: references that nobody here wrote."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def library_definition(name: str) -> ModuleType:
    """Return the library's file of definitions of an operator, such as `simple_gla`; skips a test where the library is
    not installed.

    By its path: importing the library itself needs a GPU, or a Triton that does not interpret.
    """
    pytest.importorskip("einops")
    library = importlib.util.find_spec("fla")
    if library is None or library.origin is None:
        pytest.skip("flash-linear-attention is not installed")
    spec = importlib.util.spec_from_file_location(f"{name}_naive", Path(library.origin).parent / f"ops/{name}/naive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
