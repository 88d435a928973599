"""The shell of the mixers: options as fields, and a recurrence that is a step of the mixer's own."""

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from mixer_building import CASE, assert_near, breach, example_input, read
from pages import files
from torch import Tensor

from attnbench.mixers import shell
from attnbench.mixers.contract import PROMISES
from attnbench.mixers.gated_deltanet import GatedDeltaNet
from attnbench.mixers.options import options_of
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.recurrence import outer
from attnbench.ops.common.recurrence import read as read_memory
from attnbench.settings.errors import UserError
from attnbench.settings.options import option

PAGE = "docs/adding_a_mixer.md"


@pytest.fixture
def shown(tmp_path, monkeypatch) -> Any:
    """The classes that the page shows: in the shell, and without it."""
    for name in ("fades", "fading"):
        (tmp_path / f"{name}.py").write_text(files(PAGE)[f"{name}.py"])
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return importlib.import_module("fades").Fades, importlib.import_module("fading").Fading


def filled(cls: type[Any], **options: Any) -> Any:
    mixer = cls(dim=64, head_width=32, **options).double()
    with torch.no_grad():
        for index, parameter in enumerate(mixer.parameters()):
            generator = torch.Generator().manual_seed(index + parameter.numel())
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return mixer


def test_a_mixer_in_the_shell_computes_what_it_does_without(shown):
    in_shell, alone = (filled(cls, rotary_theta=100.0, conv_size=4, output_gate="silu") for cls in shown)
    values = {name: value for name, value in alone.state_dict().items() if name != "decay_logit"}
    in_shell.load_state_dict({**values, "decay_bias": -alone.decay_logit})
    x = example_input(2, 40, dtype=torch.float64)
    assert_near(in_shell(x)[0], alone(x)[0], 1e-10)


def test_a_step_of_its_own_is_all_that_a_recurrence_needs(shown):
    cls, _ = shown

    class Stepwise(cls):
        operator: ClassVar[Any] = None
        backends: ClassVar[tuple[str, ...]] = ("torch",)

        def recurrence(self, memory: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, _: None):
            memory = log_decay.exp()[..., None, None] * memory + outer(key, value)
            return memory, read_memory(memory, query)

    fast, slow = filled(cls), filled(Stepwise)
    x = example_input(2, 20, dtype=torch.float64)
    assert_near(slow(x)[0], fast(x)[0], 1e-10)
    assert slow.mixing_flops(7) == fast.mixing_flops(7) == 7 * 2 * 4 * 32 * 32
    found = {promise.words: breach(promise, lambda: filled(Stepwise), CASE) for promise in PROMISES}
    assert not any(found.values()), found


def test_flops_are_counted_without_torch_compile_which_takes_seconds_to_import():
    counting = """
import sys
from attnbench.mixers.gated_deltanet import GatedDeltaNet

GatedDeltaNet(dim=64, head_width=32).mixing_flops(7)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", counting], check=True)


def test_flops_do_not_depend_on_whether_a_mixer_is_built_and_use_no_random_numbers(monkeypatch):
    mixer, before = filled(GatedDeltaNet), torch.get_rng_state()
    shell._flops_of_a_position.cache_clear()
    built = mixer.mixing_flops(7)
    assert torch.equal(torch.get_rng_state(), before)
    shell._flops_of_a_position.cache_clear()
    monkeypatch.setattr(shell, "MOST_BUILT", 0)
    assert mixer.mixing_flops(7) == built


def test_options_are_fields_whose_defaults_and_comments_a_class_may_change():
    class Changed(GatedDeltaNet):
        conv_size, qk_norm = 2, option(False, "off")
        output_gate: ClassVar[Any] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
        strength: int = option(3, "of its own", after="conv_size", minimum=1)

    options = options_of(Changed)
    assert (options["conv_size"].default, options["conv_size"].metadata) == (
        2,
        options_of(RecurrentMixer)["conv_size"].metadata,
    )
    assert (options["qk_norm"].default, options["qk_norm"].metadata["help"]) == (False, "off")
    assert list(options)[list(options).index("conv_size") + 1] == "strength"
    assert "output_gate" not in options
    with pytest.raises(TypeError, match="output_gate"):
        Changed(dim=64, head_width=32, output_gate="none")  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match=r"^attn\.strength=0: must be at least 1$"):
        Changed(dim=64, head_width=32, strength=0)  # pyright: ignore[reportCallIssue]
    # An option may have the name of a module that it asks for.
    assert isinstance(read("deltaproduct")[0](dim=64, head_width=32, decay=True).decay, torch.nn.Module)


def test_a_mixer_that_is_built_with_auto_is_decided_where_its_device_is_known():
    """A weight that says that it is on CUDA stands in for one."""
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)

    class OnCuda(GatedDeltaNet):
        def add_parts(self) -> None:
            super().add_parts()
            del self.output
            self.output: Any = SimpleNamespace(projection=SimpleNamespace(weight=weight))

    options: Any = {"dim": 64, "head_width": 32}
    for given, decided in (("auto", "triton"), ("torch", "torch")):
        mixer: Any = GatedDeltaNet(**options, backend=given)
        assert mixer.double().backend == "torch"
        del mixer.output
        mixer.output = SimpleNamespace(projection=SimpleNamespace(weight=weight))
        assert mixer.float().backend == decided
        assert OnCuda(**options, backend=given).backend == decided
