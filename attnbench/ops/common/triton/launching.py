"""Launch of Triton kernels, with parallel compilation before the first launch.

Triton compiles each kernel at its first launch, one after the other: seconds for a step of Gated DeltaNet. But
torch.compile, or `foresee`, calls each operator with fake tensors long before; then threads compile and load the
kernels.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]
from torch.types import py_sym_types
from triton.runtime import build
from triton.runtime.errors import OutOfResources

from attnbench.machine.device import interpreted
from attnbench.settings.errors import UserError

MAX_THREADS = 8

_unfinished: set[Future[None]] = set()
"""Running compilations; no kernel can be launched while another one is loaded."""

_foreseen: set[Any] = set()
"""Calls of `foresee` so far."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Call kernel[grid](*arguments, **options), or with fake tensors only start to compile the kernel. Raises UserError
    if the kernel needs more shared memory than the device has."""
    outline = next((x for x in (*arguments, *options.values()) if isinstance(x, FakeTensor)), None)
    if outline is None:
        if _unfinished:
            wait(tuple(_unfinished))
        try:
            kernel[grid](*arguments, **options)
        except OutOfResources as error:
            raise UserError(
                f"{kernel.fn.__name__}, a Triton kernel, needs {error.required} of this device's {error.limit} "
                f"({error.name}) for heads of this width and precision: set another attn.backend"
            ) from error
    else:
        named = tuple((name, _outline(x)) for name, x in options.items())
        begin(kernel, outline.device, tuple(_outline(x) for x in arguments), named)


def foresee(
    loss: Callable[..., Tensor], parameters: Sequence[Tensor], inputs: Sequence[Tensor | None], name: str
) -> None:
    """Trace a loss and its gradients with fake tensors, so that all their kernels are compiled in parallel, without
    torch.compile. Does nothing without CUDA, or if called before with the same shapes and `name`."""
    question = name, *((x.shape, x.dtype) for x in (*parameters, *inputs) if x is not None)
    if question in _foreseen or not can_compile(tuple(parameters)):
        return
    _foreseen.add(question)
    # A loss that cannot be traced raises when it runs.
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value = loss(*(None if x is None else mode.from_tensor(x) for x in inputs))
        torch.autograd.grad(value.sum(), parameters, allow_unused=True)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; 0 on a CPU, where no work is split."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@cache
def is_roomy(device: torch.device) -> bool:
    """Return whether a program can have 227 KiB of shared memory: on Hopper, Blackwell data-centre GPUs (others have 99
    or 163) and in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _outline(argument: Any) -> Any:
    """Return what the kernel is compiled for: a tensor's dtype, or the value of another argument."""
    return argument.dtype if isinstance(argument, Tensor) else argument


@cache
def begin(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> Future[None]:
    """Compile a kernel in a thread, once per set of arguments, with dtypes in place of tensors."""
    future = _threads().submit(_compile, kernel, device, arguments, dict(options))
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


@cache
def _threads() -> ThreadPoolExecutor:
    build._load_module_from_path = _by_folder(build._load_module_from_path)
    # Half of the processors: torch's compiler runs too, partly in its own processes.
    return ThreadPoolExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)), thread_name_prefix="compiling")


def _by_folder(original: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """Name the launchers that Triton builds after their cache folders. Up to 3.6 every launcher is a module
    __triton_launcher, and threads that load different ones at once may get the same module object."""

    def load_by_folder(name: str, path: str) -> ModuleType:
        return original(f"{Path(path).parent.name}.{name}", path)

    return load_by_folder


def _compile(kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    # A new thread's current device is the first.
    with torch.cuda.device(device):
        named = {name: triton.MockTensor.wrap_dtype(x) for name, x in options.items()}
        compiled = kernel.warmup(*arguments, grid=(1,), **named)
        try:
            # Loads the kernel and builds its launcher with a C compiler (0.25 s).
            _ = compiled.run
        except Exception:
            # Otherwise the kernel would count as loaded.
            compiled._run = None
            raise


def register_fake(operator: CustomOpDef) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register as `operator.register_fake` does, and start to compile the kernels on calls with fake CUDA tensors."""

    def register(outputs: Callable[..., Any]) -> Callable[..., Any]:
        asked = set()

        def fake(*inputs: Any) -> Any:
            # Every layer and compiler pass repeats the call.
            if can_compile(inputs) and (question := _question(inputs)) not in asked:
                asked.add(question)
                # Invalid inputs raise when the operator runs.
                with suppress(Exception):
                    operator._init_fn(*inputs)
            return outputs(*inputs)

        operator.register_fake(fake)
        return outputs

    return register


def _question(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((x.dtype, x.device, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in inputs)


def can_compile(inputs: tuple[Any, ...]) -> bool:
    """Return whether the inputs determine the kernels: on CUDA, without symbolic sizes."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    on_device = torch.cuda.is_available() and not interpreted() and all(x.device.type == "cuda" for x in tensors)
    sizes = [size for x in tensors for size in (*x.shape, *x.stride())]
    return on_device and not any(isinstance(x, py_sym_types) for x in (*inputs, *sizes))
