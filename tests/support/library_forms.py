"""Naive forms that flash-linear-attention ships beside its kernels, as a definition that nobody here wrote."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def naive_form(operator: str) -> ModuleType:
    """Load fla/ops/OPERATOR/naive.py by its path: the package itself cannot be imported where Triton has no GPU.

    Skips the test where the library, or einops which it uses, is not installed.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    pytest.importorskip("einops")
    path = Path(package.submodule_search_locations[0], "ops", operator, "naive.py")
    if not path.is_file():
        pytest.skip(f"this flash-linear-attention has no {operator}")
    spec = importlib.util.spec_from_file_location(f"naive_{operator}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module
