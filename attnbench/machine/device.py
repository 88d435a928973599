"""The device that computes, the compilers of its kernels, and whether these can run."""

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
"""Module that the first torch.compile of a process loads. An operator of ours that is called loads others of the
compiler's, torch._dynamo among them, and compiles nothing."""

_shape: str | None = None
"""Name of what the last run of this process compiled."""


def resolve_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:N` names.

    Raises:
        UserError: another name, or a CUDA device that is not there.
    """
    # Here, because all that runs anything passes here first.
    share_kernel_cache()
    choose_assembler()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    # A CPU has no index; torch would take any, and compute on the one there is.
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise UserError(f"device={name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
        raise UserError(f"device={name}: this machine has {there}; cpu and auto work here")
    return device


def all_gpus(device: torch.device, wish: str = "plan.devices=all") -> list[str]:
    """Name every GPU that this process sees, as CUDA_VISIBLE_DEVICES would for another process.

    Args:
        device: the setting, resolved; cuda alone stands for any of them.
        wish: the user's words that ask for them, for messages.

    Raises:
        UserError: it is no GPU, or one of them, or they are not of one kind: what is timed stands under one name.
    """
    if device.type != "cuda" or device.index is not None:
        raise UserError(f"{wish}: with device={device} there is one; device=cuda has all that are visible")
    number = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(index) for index in range(number)})
    if len(kinds) > 1:
        raise UserError(f"{wish}: the GPUs differ ({', '.join(kinds)}); CUDA_VISIBLE_DEVICES=N,... chooses one kind")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    # torch counts no further than the first name that is none.
    return (named.split(",") if named is not None else [str(index) for index in range(number)])[:number]


def share_kernel_cache() -> None:
    """Name the folder of compiled Triton kernels for this process and those that it starts; one that the user has named
    stays.

    Triton's own choice is ~/.triton/cache, and torch's compiler sets another one in the process when it first compiles
    a kernel itself. In a process that finds all of those compiled it never does: our kernels, left in the one folder,
    would be looked for in the other, and be compiled again, which takes seconds.
    """
    if not os.environ.get("TRITON_CACHE_DIR"):
        # The choice of torch's compiler; to ask it would be to load it, which takes more than a second.
        compiler = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
        os.environ["TRITON_CACHE_DIR"] = str(Path(compiler, "triton", "0").absolute())


def choose_assembler() -> None:
    """Name the ptxas that Triton comes with as that of every kernel; one that the user has named stays.

    torch's wheel may have another, of another CUDA, which its compiler names in the process as soon as it compiles a
    kernel there itself: what ours were then made by would depend on when they were compiled.
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
        # In a container a user may have a number alone.
        return f"uid_{os.getuid()}"


def keep_freed_memory() -> None:
    """Have glibc keep memory that a training step frees for the next one; with another C library nothing changes.

    By default it returns large blocks to the system at once, and a step on a CPU then spends several percent of its
    time in page faults, 4 KiB at a time.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a host clock read next means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_afresh(device: torch.device, shape: str | None = None) -> None:
    """Forget all that earlier runs of this process compiled and held, so that a sweep's jobs do not touch each other.

    The compiler gives up on a function after a handful of versions and then runs it uncompiled; and what an earlier
    run had reserved would count into this one's peak.

    Args:
        shape: name of what is compiled next: if it is that of the run before, what was compiled for that one stays.
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
    """Hide from the garbage collector, once in a process, what its imports have made.

    Nothing of it is ever garbage, and each look of the collector, of which a training asks for three in what may be two
    seconds, took a fifth of a second.
    """
    # Every operator of ours loads it on CUDA.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def forget_compiled() -> None:
    """Drop all that torch.compile has made in this process.

    A process that compiles nothing has not loaded the compiler, which takes seconds.
    """
    if COMPILER in sys.modules:
        torch.compiler.reset()


@cache
def wake_compiler(device: torch.device) -> None:
    """Begin, once in a process and beside it, the work that torch's compiler waits for when it has traced a model.

    That is a hash of all of torch's files and one of Triton's, half a second, without which no cache is read; and for
    a GPU the processes to which it gives kernels: until they are there, seconds later, it compiles one
    after the other itself.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import torch_key

    def of_torch() -> None:
        torch_key()
        if device.type == "cuda":
            # It needs that hash itself, and would compute another one while the first is not there.
            AsyncCompile.use_process_pool()

    Thread(target=of_torch, daemon=True).start()
    if has_triton():
        from triton.runtime.cache import triton_key

        Thread(target=triton_key, daemon=True).start()


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the most MiB reserved on the device since `start_afresh`, CUDA-graph pools too; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None


def require_triton(setting: str, device_type: str) -> None:
    """Raise UserError, with the way out, unless Triton is installed and can run kernels on such a device.

    On a CPU it can through its interpreter, which is for tests: TRITON_INTERPRET=1, set before the kernels are loaded.

    Args:
        setting: the user's words, for the message, such as "attn.backend=triton".
        device_type: "cpu" or "cuda".
    """
    if device_type != "cuda" and not interpreted():
        raise UserError(
            f"{setting}: our Triton kernels need CUDA, not device={device_type}; choose another backend "
            "(TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests)"
        )
    if not has_triton():
        raise UserError(f"{setting}: Triton is not installed; run: pip install 'triton>=3.6,<3.8'")


def has_triton() -> bool:
    """Return whether Triton is installed, as it is with every CUDA build of torch for Linux."""
    return importlib.util.find_spec("triton") is not None


def on_kernels(x: Tensor) -> bool:
    """Return whether the layers that all mixers share give a tensor to their kernels: on CUDA, float64 excepted.

    Every CUDA build of torch for Linux brings Triton.
    """
    return x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16)


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def warn_of_load() -> None:
    """Say once a process that torch's threads have to share the cores with other work, which can slow them 20-fold."""
    if not hasattr(os, "sched_getaffinity"):
        return
    load, cores, threads = os.getloadavg()[0], len(os.sched_getaffinity(0)), torch.get_num_threads()
    if threads > 1 and load > cores:
        log.warning(
            f"the load of the last minute is {load:.1f} on {cores} cores: the {threads} threads of torch wait for each "
            "other, and OMP_NUM_THREADS=1 may be many times as fast"
        )
