"""Mixers built from their yamls, every parameter filled by init_weights, and comparisons of two forms of one."""

import importlib
import inspect
import math
import zlib
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from attnbench.mixers.base import Mixer
from attnbench.mixers.contract import Promise
from attnbench.mixers.definition import TOLERANCES, Case, by_backend, by_definition, compare
from attnbench.settings.errors import one_line

CONF = Path(__file__).parents[2] / "conf" / "attn"
DIM, HEAD_WIDTH = 64, 32
CASE = Case(name="", head_width=HEAD_WIDTH)


def read(name: str) -> tuple[type[Mixer], dict[str, Any]]:
    options = deepcopy(_content(name))
    module, _, class_name = options.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), class_name), options


def breach(promise: Promise, build: Callable[[], Mixer], case: Case) -> str:
    """Return what breaks a promise, or an empty text; an error of building or running the mixer breaks it."""
    try:
        return promise.check(build(), case)
    except Exception as error:
        return one_line(error)


@cache
def _content(name: str) -> dict[str, Any]:
    """Parsing a yaml takes as long as most checks of its mixer."""
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))


def backend(name: str, **changes: Any) -> str:
    mixer_class, options = read(name)
    return mixer_class.choose_backend(options | changes, device_type="cpu", precision="float32")


def build(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Mixer:
    mixer_class, options = read(name)
    from_model = {"dim": DIM, "head_width": HEAD_WIDTH, "layer": 0, "num_layers": 2}
    named = inspect.signature(mixer_class).parameters
    options = {name: value for name, value in from_model.items() if name in named} | options | changes
    options["backend"] = backend(name, **changes)
    with torch.device("meta"):
        mixer = mixer_class(**options)
    mixer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mixer.parameters():
            # A parameter that init_weights forgets shows as NaN.
            parameter.fill_(torch.nan)
    for path, module in mixer.named_modules():
        if hasattr(module, "init_weights"):
            generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
            module.init_weights(generator, 2)
    return mixer.to(dtype)


@torch.no_grad()
def half_lives(mixer: Mixer, dim: int) -> Tensor | None:
    """Return the positions after which an input of 0 has left half of each part of the memory, one a head or channel;
    None for a mixer whose memory does not decay.

    Args:
        dim: of the model.
    """
    weight = next(mixer.parameters())
    decay = mixer.log_decay(weight.new_zeros(1, 1, dim))
    return None if decay is None else math.log(2) / -decay.double().flatten()


def example_input(batch_size: int, length: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw inputs so wide that small initial weights leave the linear range of gates and feature maps."""
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(batch_size, length, DIM, generator=generator, dtype=torch.float64).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert actual.shape == expected.shape, what
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    assert difference <= tolerance * scale, f"{what} differs by {difference:.2e} where the largest entry is {scale:.2e}"


def output_and_gradients(mixer: Mixer, y: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * weight).sum(), (x, *parameters))
    return {"output": y.detach(), **dict(zip(("input", *names), gradients, strict=True))}


def check_against_definition(mixer: Mixer, length: int) -> None:
    """Hold outputs and gradients in float32 against the definition, as the doctor does."""
    deviation = compare(by_backend(mixer, length, "float32", CASE), by_definition(mixer, length, CASE), CASE)
    assert deviation.is_within(TOLERANCES["float32"]), deviation


def check_compiles_and_stacks(mixer: Mixer) -> None:
    x, parameters = example_input(2, 20), dict(mixer.named_parameters())
    torch.compiler.reset()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    expected, actual = (form(x)[0].square().sum() for form in (mixer, compiled))
    torch.testing.assert_close(actual, expected)
    alone, own = (torch.autograd.grad(loss, list(parameters.values())) for loss in (expected, actual))
    for name, gradient, other in zip(parameters, own, alone, strict=True):
        assert_near(gradient, other, 1e-4, name)
    stacked = {name: torch.stack([value, 1.2 * value]).detach() for name, value in parameters.items()}
    stacked = {name: value.requires_grad_() for name, value in stacked.items()}
    losses = torch.vmap(lambda values: torch.func.functional_call(mixer, values, (x,))[0].square().sum())(stacked)
    torch.testing.assert_close(losses[0], expected)
    gradients = torch.autograd.grad(losses.sum(), list(stacked.values()))
    for name, gradient, other in zip(parameters, gradients, alone, strict=True):
        assert_near(gradient[0], other, 1e-4, name)
