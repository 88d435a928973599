"""The device, and the compilers of its kernels."""

import ctypes
import gc
import getpass
import importlib
import importlib.util
import logging
import os
import platform
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from attnbench.settings.errors import UserError

log = logging.getLogger(__name__)

COMPILER = "torch._inductor.compile_fx"
"""Module that only a torch.compile loads; our operators load others of the compiler's, torch._dynamo among them."""

_shape: str | None = None
"""Name of what the last run of this process compiled."""


def resolve_device(name: str) -> torch.device:
    """`name` is auto, cpu, cuda or cuda:N."""
    # Here, because all computations call this first.
    share_kernel_cache()
    choose_assembler()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    # torch would accept any index of a CPU.
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise UserError(f"device={name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
        raise UserError(f"device={name}: this machine has {there}; cpu and auto work here")
    return device


def all_gpus(device: torch.device, wish: str = "plan.devices=all") -> list[str]:
    """Name every visible GPU as CUDA_VISIBLE_DEVICES does. Messages name `wish`, the setting that asks for all."""
    if device.type != "cuda" or device.index is not None:
        raise UserError(f"{wish}: with device={device} there is one; device=cuda has all that are visible")
    number = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(index) for index in range(number)})
    if len(kinds) > 1:
        raise UserError(f"{wish}: the GPUs differ ({', '.join(kinds)}); CUDA_VISIBLE_DEVICES=N,... chooses one kind")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    # torch counts up to the first invalid name.
    return (named.split(",") if named is not None else [str(index) for index in range(number)])[:number]


def share_kernel_cache() -> None:
    """Set the folder of compiled Triton kernels for this process and its children, unless the user has.

    Otherwise it is ~/.triton/cache until torch's compiler sets it, and our kernels are compiled twice.
    """
    if not os.environ.get("TRITON_CACHE_DIR"):
        # As torch's compiler has it, whose import takes more than a second.
        compiler = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
        os.environ["TRITON_CACHE_DIR"] = str(Path(compiler, "triton", "0").absolute())


def choose_assembler() -> None:
    """Use Triton's ptxas for every kernel, unless the user has named one.

    Otherwise torch's compiler sets that of torch's wheel, perhaps of another CUDA, when it first compiles a kernel.
    """
    triton = None if os.environ.get("TRITON_PTXAS_PATH") else importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return
    ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if ptxas.exists():
        os.environ["TRITON_PTXAS_PATH"] = str(ptxas)


def _user() -> str:
    try:
        return getpass.getuser().replace(os.sep, "_")
    except (KeyError, OSError):
        # In a container a user may have no name.
        return f"uid_{os.getuid()}"


def keep_freed_memory() -> None:
    """Have glibc keep memory that a training step frees: otherwise page faults take several percent of a CPU's step."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def synchronize(device: torch.device) -> None:
    """Wait for the device before reading the host's clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_afresh(device: torch.device, shape: str | None = None) -> None:
    """Forget what earlier runs of this process compiled and reserved, so that a sweep's jobs are independent.

    The compiler runs a function uncompiled after a few versions, and reserved memory would count in this run's peak.
    Compiled code stays if the run before had the same `shape`, the name of what is compiled next.
    """
    global _shape
    if shape is None or shape != _shape:
        forget_compiled()
    _shape = shape
    if device.type == "cuda":
        _overlook_what_is_loaded()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@cache
def _overlook_what_is_loaded() -> None:
    """Exclude imported objects from garbage collection, which took a fifth of a second each time."""
    # Every operator loads it on CUDA.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def forget_compiled() -> None:
    """Drop compiled code, without loading the compiler, which takes seconds."""
    if COMPILER in sys.modules:
        torch.compiler.reset()


@cache
def wake_compiler(device: torch.device) -> None:
    """Start, once and in the background, what torch's compiler needs after tracing a model.

    Its caches need a hash of all files of torch and of Triton, half a second; on a GPU it also compiles serially until
    its worker processes have started, seconds later.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import torch_key

    def of_torch() -> None:
        torch_key()
        if device.type == "cuda":
            # After the hash, which it would compute again.
            AsyncCompile.use_process_pool()

    Thread(target=of_torch, daemon=True).start()
    if has_triton():
        from triton.runtime.cache import triton_key

        Thread(target=triton_key, daemon=True).start()


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the peak of reserved MiB since `start_afresh`, with CUDA-graph pools; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None


def require_triton(setting: str, device_type: str) -> None:
    """Raise UserError, which names `setting`, unless Triton can run kernels; on a CPU only its interpreter can."""
    if device_type != "cuda" and not interpreted():
        raise UserError(
            f"{setting}: our Triton kernels need CUDA, not device={device_type}; choose another backend "
            "(TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests)"
        )
    if not has_triton():
        raise UserError(f"{setting}: Triton is not installed; run: pip install 'triton>=3.6,<3.8'")


def has_triton() -> bool:
    """Every CUDA build of torch for Linux brings it."""
    return importlib.util.find_spec("triton") is not None


def on_kernels(x: Tensor) -> bool:
    """Return whether shared layers use kernels for a tensor: on CUDA, except in float64."""
    return x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def warn_of_load() -> None:
    """Warn once that torch's threads share the cores with other work, which can slow them 20-fold."""
    if not hasattr(os, "sched_getaffinity"):
        return
    load, cores, threads = os.getloadavg()[0], len(os.sched_getaffinity(0)), torch.get_num_threads()
    if threads > 1 and load > cores:
        log.warning(
            f"the load of the last minute is {load:.1f} on {cores} cores: the {threads} threads of torch wait for each "
            "other, and OMP_NUM_THREADS=1 may be many times as fast"
        )
