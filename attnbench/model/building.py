"""From settings to a model with its initial weights: the kernel that runs, the layers, what they may hold."""

import hashlib
import inspect
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
"""Initial weights for which a thread is begun: fewer are there before it, with a team of torch's own, is."""


def resolve_mixer(
    settings: MixerSettings,
    model: ModelSettings,
    *,
    device_type: str,
    precision: str,
) -> MixerSettings:
    """Return the same settings with `auto` replaced by the backend that will run.

    Raises:
        UserError: a backend that does not exist or cannot run here.
    """
    if is_hybrid(settings):
        return each(settings, lambda part, _: resolve_mixer(part, model, device_type=device_type, precision=precision))
    cls = resolve(settings.target, Mixer)
    # The model's head width, unless the mixer's yaml overrides it: kernels differ in the widths they can do.
    options = {"head_width": model.head_width, **settings.options}
    backend = cls.choose_backend(options, device_type=device_type, precision=precision)
    return MixerSettings(name=settings.name, target=settings.target, options={**settings.options, "backend": backend})


def function_of(settings: MixerSettings) -> dict[str, Any]:
    """Return target and options of the function that a mixer computes by any kernel; see `Mixer.same_function`."""
    options = {name: value for name, value in hashed_options(settings.options).items() if name != "backend"}
    cls = resolve(settings.target, Mixer)
    # Of the class alone: one that derives from it may compute anything.
    other = vars(cls).get("same_function")
    shared = inspect.signature(resolve(other, Mixer)).parameters if other else {}
    if other and not any(value for name, value in options.items() if name not in shared):
        return {"target": other, **{name: value for name, value in options.items() if name in shared}}
    return {"target": settings.target, **options}


def build_meta(mixers: Sequence[MixerSettings], model: ModelSettings, *, vocabulary_size: int) -> LanguageModel:
    """Build the model without memory for its weights: enough to count, and to refuse settings that do not fit."""
    if len(mixers) != model.num_layers:
        raise UserError(f"model.num_layers={model.num_layers}: {len(mixers)} mixers were given, one a layer is needed")
    try:
        with torch.device("meta"):
            return LanguageModel(
                _build_layers(mixers, model),
                vocabulary_size=vocabulary_size,
                dim=model.dim,
                feed_forward_width=model.feed_forward_width,
                dropout=model.dropout or 0.0,
            )
    except (RuntimeError, OverflowError) as error:
        # Of a size below 0, or of more bytes than can be counted.
        raise UserError(f"attn={mixers[0].name}: its settings make no tensor ({str(error).splitlines()[0]})") from error


def _build_layers(mixers: Sequence[MixerSettings], model: ModelSettings) -> list[Mixer]:
    layers, is_mixed = [], len({settings.name for settings in mixers}) > 1
    for layer, settings in enumerate(mixers):
        with naming(settings.name) if is_mixed else nullcontext():
            layers.append(build_layer(settings, model, layer))
    return layers


def build_layer(settings: MixerSettings, model: ModelSettings, layer: int) -> Mixer:
    """Build the mixer of one layer, its weights not initialised.

    Raises:
        UserError: a setting that cannot be, or a class that keeps tensors beside its parameters.
    """
    mixer = build(settings.target, settings.options, Mixer, **layer_sizes(model, layer))
    if not mixer.fills_submodules:
        _check_tensors(mixer, f"attn={settings.name}: {settings.target}")
    return mixer


def _check_tensors(mixer: Mixer, name: str) -> None:
    """Refuse buffers and attributes that are tensors: neither would have its numbers in a model that is loaded."""
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
    """Return what the model gives to a mixer whose constructor names it."""
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
    """Build a model with initial weights, equal on every device and across mixers where names and shapes are equal.

    Args:
        mixers: one mixer's settings a layer, backends resolved (`resolve_mixer`).

    Raises:
        UserError: there is not enough memory, or a weight has no initial value.
    """
    built = build_meta(mixers, model, vocabulary_size=vocabulary_size)
    check_free(num_bytes(built), f"model={model.name}: {built.num_parameters():,} weights")
    # Weights are made on the CPU and then moved: generators of two devices give different numbers.
    take_memory(built, "cpu")
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.is_floating_point():
                parameter.fill_(math.nan)
    init_weights(built, seed, built.num_branches)
    for name, parameter in built.named_parameters():
        # What lay in memory would be another model at each start.
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
    """Give the weights of `build_meta` memory, whose numbers are whatever lay there."""
    # What `to_empty` does, which goes through torch's references for the meta device: they import sympy, a quarter of a
    # second before the first step.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def init_weights(model: nn.Module, seed: int, num_branches: int) -> None:
    """Initialise every module with a generator seeded by (seed, full name), so that an option shifts nothing else.

    Of a large model several modules at a time, each in a thread: one core makes a hundred million numbers a second. A
    module of torch (nn.Linear, say) runs its `reset_parameters`, one after the other, as those share torch's generator.

    Raises:
        ValueError: a module that owns parameters and has neither.
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
                # Here: its layer draws from torch's generator, as those below do.
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
