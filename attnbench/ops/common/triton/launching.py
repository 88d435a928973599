"""Launching our Triton kernels, and compiling them before that, side by side.

Triton compiles a kernel when it is first launched, one after the other: for Gated DeltaNet's step that is seconds after
the seconds that torch.compile takes. But long before, torch.compile asks each operator what it would return for tensors
that have a shape and no memory; and so does `foresee` where nothing goes through torch.compile. Then the operator's
kernels begin to compile, each in a thread, and are loaded onto the device: Triton holds Python's lock for a small part
of its time.
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
"""Compilations that have begun. A kernel that is being loaded cannot be launched."""

_foreseen: set[Any] = set()
"""Questions that `foresee` has been asked."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options); for tensors without memory it only begins to compile the kernel.

    One that cannot be compiled or loaded says so when it is launched, which tries again.

    Raises:
        UserError: a program of the kernel needs more shared memory than this device gives one.
    """
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
    """Trace a loss and its gradients for tensors without memory, so that all their kernels begin to compile at once.

    In a step that does not go through torch.compile each is compiled otherwise when it is first launched, one after the
    other. Does nothing away from a card, or for the same shapes again.

    Args:
        name: says of the loss what shapes do not.
    """
    question = name, *((x.shape, x.dtype) for x in (*parameters, *inputs) if x is not None)
    if question in _foreseen or not can_compile(tuple(parameters)):
        return
    _foreseen.add(question)
    # What cannot be traced says so when it runs.
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        value = loss(*(None if x is None else mode.from_tensor(x) for x in inputs))
        torch.autograd.grad(value.sum(), parameters, allow_unused=True)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of the device's multiprocessors; on a CPU 0, so that nothing is ever split or run side by side there by
    itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@cache
def is_roomy(device: torch.device) -> bool:
    """Return whether a program can have 227 KiB of shared memory, as on Hopper and on Blackwell's data-centre cards;
    others have 99 or 163. A CPU has all there is."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _outline(argument: Any) -> Any:
    """Return all of an argument that a kernel is compiled for, of a tensor its dtype."""
    return argument.dtype if isinstance(argument, Tensor) else argument


@cache
def begin(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> Future[None]:
    """Compile a kernel in the background, once for the same arguments; in place of tensors stand their dtypes."""
    future = _threads().submit(_compile, kernel, device, arguments, dict(options))
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


@cache
def _threads() -> ThreadPoolExecutor:
    build._load_module_from_path = _by_folder(build._load_module_from_path)
    # Half of the processors: torch's compiler works beside, in processes of its own too.
    return ThreadPoolExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)), thread_name_prefix="compiling")


def _by_folder(original: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """Make Triton's loading of what it has built tell modules of one name apart, by the folders they are cached in.

    Up to 3.6 it builds a launcher for every signature of a kernel, all with the name __triton_launcher. One that is
    loaded again, for another kernel of that signature, comes from Python as the last object of the name, with this
    file's functions put into it; and before one thread has taken its `launch`, another may have put in its own. Then a
    kernel is launched as a different one: an error where they take unlike numbers of arguments, otherwise anything.
    """

    def load_by_folder(name: str, path: str) -> ModuleType:
        return original(f"{Path(path).parent.name}.{name}", path)

    return load_by_folder


def _compile(kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    # A thread begins on the first device, whatever the others are on.
    with torch.cuda.device(device):
        named = {name: triton.MockTensor.wrap_dtype(x) for name, x in options.items()}
        compiled = kernel.warmup(*arguments, grid=(1,), **named)
        try:
            # Asked for, it is loaded, and what calls it is built by a C compiler: a quarter of a second each.
            _ = compiled.run
        except Exception:
            # Otherwise it would count as loaded, and a launch would find nothing in it.
            compiled._run = None
            raise


def register_fake(operator: CustomOpDef) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register as `operator.register_fake` does, for an operator that launches its kernels by `launch`: asked what it
    returns for tensors on CUDA, it also begins to compile them."""

    def register(outputs: Callable[..., Any]) -> Callable[..., Any]:
        asked = set()

        def fake(*inputs: Any) -> Any:
            # It is asked the same for every layer, and by each part of the compiler.
            if can_compile(inputs) and (question := _question(inputs)) not in asked:
                asked.add(question)
                # What it cannot take it says when it runs, in its own words and not in the compiler's.
                with suppress(Exception):
                    operator._init_fn(*inputs)
            return outputs(*inputs)

        operator.register_fake(fake)
        return outputs

    return register


def _question(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((x.dtype, x.device, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in inputs)


def can_compile(inputs: tuple[Any, ...]) -> bool:
    """Return whether they say all that kernels are compiled for: sizes in numbers, and a device that is here."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    on_device = torch.cuda.is_available() and not interpreted() and all(x.device.type == "cuda" for x in tensors)
    sizes = [size for x in tensors for size in (*x.shape, *x.stride())]
    return on_device and not any(isinstance(x, py_sym_types) for x in (*inputs, *sizes))
