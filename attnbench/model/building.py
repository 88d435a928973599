"""From settings to a model with initial weights: backends, layers, checks of layers."""

import hashlib
import inspect
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.machine.memory import check_free
from attnbench.mixers.base import Mixer
from attnbench.mixers.layers import INITIAL_DEVIATION, Projection
from attnbench.model.language_model import LanguageModel
from attnbench.results.identity import hashed_options
from attnbench.settings.errors import UserError
from attnbench.settings.hybrid import each, is_hybrid, naming
from attnbench.settings.registry import build, resolve
from attnbench.settings.schema import MixerSettings, ModelSettings

PARAMETERS_A_THREAD = 2**22
"""Initial weights a thread; fewer are made faster than a thread starts."""


def resolve_mixer(
    settings: MixerSettings,
    model: ModelSettings,
    *,
    device_type: str,
    precision: str,
) -> MixerSettings:
    if is_hybrid(settings):
        return each(settings, lambda part, _: resolve_mixer(part, model, device_type=device_type, precision=precision))
    cls = resolve(settings.target, Mixer)
    # Kernels support different head widths.
    options = {"head_width": model.head_width, **settings.options}
    backend = cls.choose_backend(options, device_type=device_type, precision=precision)
    return MixerSettings(name=settings.name, target=settings.target, options={**settings.options, "backend": backend})


def function_of(settings: MixerSettings) -> dict[str, Any]:
    """Return target and options of the function that a mixer computes with any backend; see `Mixer.same_function`."""
    options = {name: value for name, value in hashed_options(settings.options).items() if name != "backend"}
    cls = resolve(settings.target, Mixer)
    # A derived class may compute another function.
    other = vars(cls).get("same_function")
    shared = inspect.signature(resolve(other, Mixer)).parameters if other else {}
    if other and not any(value for name, value in options.items() if name not in shared):
        return {"target": other, **{name: value for name, value in options.items() if name in shared}}
    return {"target": settings.target, **options}


def build_meta(mixers: Sequence[MixerSettings], model: ModelSettings, *, vocabulary_size: int) -> LanguageModel:
    """Build the model without memory for weights, to count parameters."""
    layers = build_layers(mixers, model)
    with _sizes_checked(mixers), torch.device("meta"):
        return LanguageModel(
            layers,
            vocabulary_size=vocabulary_size,
            dim=model.dim,
            feed_forward_width=model.feed_forward_width,
            dropout=model.dropout or 0.0,
            norm=model.norm,
            untied=model.untied,
            dropout_of=model.dropout_of,
            doubled_residual=model.doubled_residual,
        )


def build_layers(mixers: Sequence[MixerSettings], model: ModelSettings) -> list[Mixer]:
    if len(mixers) != model.num_layers:
        raise UserError(f"model.num_layers={model.num_layers}: {len(mixers)} mixers were given, one a layer is needed")
    layers, is_mixed = [], len({settings.name for settings in mixers}) > 1
    with _sizes_checked(mixers), torch.device("meta"):
        for layer, settings in enumerate(mixers):
            with naming(settings.name) if is_mixed else nullcontext():
                layers.append(build_layer(settings, model, layer))
    return layers


@contextmanager
def _sizes_checked(mixers: Sequence[MixerSettings]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        # Of a negative or huge size.
        raise UserError(f"attn={mixers[0].name}: its settings make no tensor ({str(error).splitlines()[0]})") from error


def build_layer(settings: MixerSettings, model: ModelSettings, layer: int) -> Mixer:
    mixer = build(settings.target, settings.options, Mixer, **layer_sizes(model, layer))
    if not mixer.fills_submodules:
        _check_tensors(mixer, f"attn={settings.name}: {settings.target}")
    return mixer


def _check_tensors(mixer: Mixer, name: str) -> None:
    """Refuse buffers and attributes that are tensors: checkpoints do not have them."""
    kept = [path for path, _ in mixer.named_buffers()]
    for path, module in mixer.named_modules():
        attributes = (attribute for attribute, value in vars(module).items() if isinstance(value, Tensor))
        kept += [f"{path}.{attribute}".lstrip(".") for attribute in attributes]
    if kept:
        raise UserError(
            f"{name} keeps a tensor that is no parameter ({', '.join(kept)}), which checkpoints do not have; compute "
            "it in the forward pass, on x's device"
        )


def layer_sizes(model: ModelSettings, layer: int) -> dict[str, Any]:
    return {
        "dim": model.dim,
        "head_width": model.head_width,
        "layer": layer,
        "layer_index": layer,
        "num_layers": model.num_layers,
    }


def build_model(
    mixers: Sequence[MixerSettings],
    model: ModelSettings,
    *,
    vocabulary_size: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Build a model with initial weights, equal on every device, and across mixers for equal names and shapes. `mixers`
    is one a layer, backends resolved (`resolve_mixer`)."""
    built = build_meta(mixers, model, vocabulary_size=vocabulary_size)
    check_free(num_bytes(built), f"model={model.name}: {built.num_parameters():,} weights")
    # On the CPU: generators of other devices give other numbers.
    take_memory(built, "cpu")
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.is_floating_point():
                parameter.fill_(math.nan)
    init_weights(built, seed, built.num_branches)
    for name, parameter in built.named_parameters():
        # Uninitialised memory would be another model at each start.
        if parameter.sum().isnan():
            raise UserError(
                f"attn={mixers[0].name}: {name} has no initial value, or none that is a number; init_weights of its "
                "module gives it one"
            )
    if model.initial_deviation is not None:
        with torch.no_grad():
            for module in built.modules():
                if isinstance(module, Projection):
                    module.weight.mul_(model.initial_deviation / INITIAL_DEVIATION)
    return built.to(device)


def take_memory(model: nn.Module, device: torch.device | str) -> None:
    """Give the weights of `build_meta` uninitialised memory."""
    # `to_empty` would import sympy, a quarter of a second.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def num_bytes(model: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


def init_weights(model: nn.Module, seed: int, num_branches: int) -> None:
    """Initialise every module with a generator seeded by (seed, full name), independent of other modules.

    Threads initialise the modules of a large model. Modules of torch run `reset_parameters` one after the other, as
    they share torch's generator. A module with parameters and neither method raises ValueError.
    """
    initialised, filled = [], "."
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, num_parameters // PARAMETERS_A_THREAD))) as threads:
        for name, module in model.named_modules():
            if name.startswith(filled):
                continue
            module_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7])
            initialise: Any = getattr(module, "init_weights", None)
            if getattr(module, "fills_submodules", False):
                # Not in a thread: its layer draws from torch's generator.
                initialise(torch.Generator().manual_seed(module_seed), num_branches)
                filled = f"{name}." if name else ""
            elif initialise is not None:
                initialised.append(threads.submit(initialise, torch.Generator().manual_seed(module_seed), num_branches))
            elif hasattr(module, "reset_parameters"):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(module_seed)
                    module.reset_parameters()  # pyright: ignore[reportCallIssue]
            elif next(module.parameters(recurse=False), None) is not None:
                raise ValueError(f"{type(module).__name__} ({name}) owns parameters but has no init_weights")
    for one in initialised:
        one.result()
