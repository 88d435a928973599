"""Sources of an exported model: what it runs, in its torch form, and nothing that it does not."""

import ast
import importlib
import sys

import pytest

from attnbench.export.sources import copied_sources
from attnbench.export.torch_form import REFUSAL
from attnbench.settings.errors import UserError

LAYERS = '''"""Layers of a model."""

import math

import torch
from torch import nn

from attnbench.machine.device import on_kernels
from leaving_passed_on import helped

SCALE = 2.0
"""Known by its string."""
UNUSED = math.pi


class Layer(nn.Module):
    """A layer."""

    forgotten = UNUSED

    def __init__(self, *, backend: str = "auto") -> None:
        super().__init__()
        self.backend = "torch" if backend == "auto" else backend

    def forward(self, x):
        # A comment that stays.
        y = helped(x) * SCALE
        if on_kernels(x) and self.backend != "torch":
            from attnbench.ops.layers.triton.swiglu import swiglu

            return swiglu(y)
        elif self.backend == "fla" or y is None:
            y = self.by_library(y)
        return y if not on_kernels(y) else self.unused(y)

    def extra_repr(self) -> str:
        return "called by torch alone"

    def by_library(self, y):
        """Needs a library."""
        import fla

        return fla.run(y)

    def unused(self, y):
        return y * UNUSED


@torch.library.custom_op("attnbench::nothing", mutates_args=())
def nothing(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@nothing.register_fake
def _(x):
    return x


def stays_behind():
    return UNUSED
'''
PASSED_ON = "from leaving_helpers import helped\n\nOTHER = 1\n"
HELPERS = "def helped(x):\n    return x\n\n\ndef other():\n    return 1\n"
MODEL = "from leaving_layers import Layer, nothing\n\n\nclass Model:\n    layer, act = Layer, nothing\n"
OWN = frozenset({"attnbench", *(f"leaving_{name}" for name in ("layers", "passed_on", "helpers"))})


@pytest.fixture
def written(tmp_path, monkeypatch):
    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"leaving_{name}.py").write_text(text)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in [name for name in sys.modules if name.startswith("leaving_")]:
        del sys.modules[name]


def body_of(text: str, name: str) -> str:
    (found,) = [it for it in ast.walk(ast.parse(text)) if isinstance(it, ast.FunctionDef) and it.name == name]
    return "\n".join(map(ast.unparse, found.body))


def test_of_a_file_what_is_needed_is_left_and_branches_for_kernels_are_gone(written):
    written(layers=LAYERS, passed_on=PASSED_ON, helpers=HELPERS)
    files = copied_sources({"attnbench.export.model": MODEL}, OWN)
    assert sorted(files) == ["leaving_helpers.py", "leaving_layers.py", "model_attnbench.py"]
    assert "from .leaving_layers import Layer, nothing\n" in files["model_attnbench.py"]
    assert "other" not in files["leaving_helpers.py"]
    text = files["leaving_layers.py"]
    assert "from .leaving_helpers import helped\n" in text
    assert '"""Known by its string."""' in text
    assert "# A comment that stays." in text
    assert body_of(text, "forward") == (
        "y = helped(x) * SCALE\nif y is None:\n    y = self.by_library(y)\nreturn y"
    )  # fmt: skip
    assert body_of(text, "by_library") == f"'Needs a library.'\n{REFUSAL}"
    assert body_of(text, "extra_repr") == "return 'called by torch alone'"
    assert body_of(text, "__init__") == "super().__init__()\nself.backend = backend"
    for gone in ("UNUSED", "math", "forgotten", "unused", "stays_behind", "kernels", "fla", "import attnbench"):
        assert gone not in text, gone
    # Registered with the operator, which is named after its module: two of one name would be one.
    assert "@nothing.register_fake" in text
    assert "custom_op('of' + __name__.encode().hex() + '::nothing'" in text


def test_imports_in_functions_relative_ones_and_classes_in_classes_are_copied(written, tmp_path):
    package = tmp_path / "leaving_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text(HELPERS)
    (package / "layers.py").write_text(
        "from torch import nn\n\n\nclass Layer(nn.Module):\n    class Inner:\n        width = 3\n\n"
        "    def forward(self, x):\n        from .helpers import helped\n\n"
        "        return helped(x) * self.Inner.width\n"
    )
    model = "from leaving_package.layers import Layer\n\n\nclass Model:\n    layer = Layer\n"
    files = copied_sources({"attnbench.export.model": model}, frozenset({"attnbench", "leaving_package"}))
    assert "\nfrom .leaving_package_helpers import helped\n" in files["leaving_package_layers.py"]
    assert "    class Inner:\n        width = 3\n" in files["leaving_package_layers.py"]
    assert body_of(files["leaving_package_layers.py"], "forward") == "return helped(x) * self.Inner.width"
    assert "def helped(x):" in files["leaving_package_helpers.py"]


@pytest.mark.parametrize("line", ["import leaving_helpers as helped", "from leaving_helpers import made as helped"])
def test_what_is_no_definition_of_a_file_is_refused(written, line):
    helpers = HELPERS + "\nglobals()['made'] = helped\n"
    written(layers=LAYERS.replace("from leaving_passed_on import helped", line), helpers=helpers)
    with pytest.raises(UserError, match="which is no class, function or value of a file, so it cannot be exported"):
        copied_sources({"attnbench.export.model": MODEL}, OWN)


@pytest.mark.parametrize(
    "line", ["from attnbench.ops.layers.triton.swiglu import swiglu as helped", "from fla import helped"]
)
def test_a_library_outside_a_function_is_refused(written, line, monkeypatch):
    text = LAYERS.replace("from leaving_passed_on import helped", line)
    written(layers=text)
    # It need not be there: what is copied is read, and only classes are looked at.
    monkeypatch.setitem(sys.modules, "fla", type(sys)("fla"))
    monkeypatch.setattr(sys.modules["fla"], "helped", None, raising=False)
    with pytest.raises(UserError, match=r"leaving_layers: imports .* outside a function, so it cannot be exported"):
        copied_sources({"attnbench.export.model": MODEL}, OWN)


def test_what_has_no_source_is_refused():
    with pytest.raises(UserError, match="leaving_nowhere: has no source file"):
        copied_sources(
            {"attnbench.export.model": "from leaving_nowhere import x\n\ny = x\n"}, OWN | {"leaving_nowhere"}
        )
