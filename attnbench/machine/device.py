"""The machine a run is on: device, precision, and what is installed."""

import ctypes
import gc
import getpass
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from attnbench.machine.kernel_support import has_triton
from attnbench.settings.errors import UserError

COMPILER = "torch._dynamo"
"""Loaded by the first torch.compile of a process."""

KERNEL_LIBRARIES = ("triton", "flash-linear-attention", "flash-attn")


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names.

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
        raise UserError(f"device={name}: this machine has {there}; device=cpu or device=auto works here")
    return device


def share_kernel_cache() -> None:
    """Names the folder in which this process, and those it starts, keep compiled Triton kernels; a folder that the user
    has named stays.

    Triton's own choice is ~/.triton/cache, and torch's compiler sets another one in the process when it first compiles
    a kernel itself. In a process that finds all of those compiled it never does: our kernels, left in the one folder,
    would be looked for in the other, and be compiled again, which takes seconds.
    """
    if not os.environ.get("TRITON_CACHE_DIR"):
        # What torch's compiler chooses; to ask it would be to load it, which takes more than a second.
        compiler = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
        os.environ["TRITON_CACHE_DIR"] = str(Path(compiler, "triton", "0").absolute())


def choose_assembler() -> None:
    """Names the ptxas that Triton comes with as that of every kernel; one that the user has named stays.

    torch's wheel may have another, of another CUDA, which its compiler names in the process as soon as it compiles a
    kernel there itself: what ours were then made by would depend on when they were compiled.
    """
    triton = None if os.environ.get("TRITON_PTXAS_PATH") else importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return
    own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if own.exists():
        os.environ["TRITON_PTXAS_PATH"] = str(own)


def _user() -> str:
    try:
        return getpass.getuser().replace(os.sep, "_")
    except (KeyError, OSError):
        # In a container a user may have a number alone.
        return f"uid_{os.getuid()}"


def resolve_precision(name: str, device_type: str, setting: str = "train.precision") -> str:
    """`auto` is bfloat16 on CUDA and float32 on a CPU; TF32 exists on CUDA alone.

    Args:
        setting: as the user knows it, for the message.
    """
    if name == "tf32" and device_type != "cuda":
        raise UserError(f"{setting}=tf32: only CUDA devices have it; float32 and bfloat16 work on a CPU")
    return name if name != "auto" else ("bfloat16" if device_type == "cuda" else "float32")


def resolve_compile(compiled: bool | None, device_type: str) -> bool:
    """Whether a training is compiled for which the settings say so or, with None, leave it to the device."""
    return compiled if compiled is not None else device_type == "cuda"


def dtype_of(precision: str) -> torch.dtype:
    """Of tensors in this precision: TF32 is how float32 is multiplied."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Products of float32 inside are TF32's where the precision is tf32, otherwise float32's own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Forward passes inside run in this precision: autocast for halves, TF32 products only where they are named."""
    dtype = dtype_of(precision)
    is_half = dtype != torch.float32
    with multiplying(precision), torch.autocast(device.type, torch.bfloat16 if not is_half else dtype, enabled=is_half):
        yield


def keep_freed_memory() -> None:
    """Has glibc keep what a training step frees for the next one; with another C library nothing changes.

    By default it returns large blocks to the system at once, and a step on a CPU then spends several percent of its
    time in page faults, 4 KiB at a time.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a host clock read next means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_afresh(device: torch.device) -> None:
    """Forgets what earlier runs of this process compiled and held, so that a sweep's jobs do not touch each other.

    The compiler gives up on a function after a handful of versions and then runs it uncompiled; and what an earlier
    run had reserved would count into this one's peak.
    """
    forget_compiled()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def forget_compiled() -> None:
    """Drops what torch.compile has made in this process.

    A process that compiles nothing has not loaded the compiler, which takes more than a second.
    """
    if COMPILER in sys.modules:
        torch.compiler.reset()


@cache
def wake_compiler(device: torch.device) -> None:
    """Begins, once in a process and beside it, what torch's compiler will wait for when it has traced a model.

    That is a hash of all of torch's own files and one of Triton's, half a second, without which no cache is looked
    into; and for a GPU the processes to which it gives kernels: until they are there, seconds later, it compiles one
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


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, what is compiled runs as it was written."""
    return torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else nullcontext()


def peak_memory_mib(device: torch.device) -> float | None:
    """MiB reserved on the device at most since `start_afresh`, CUDA-graph pools too; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """As tables print it: the GPU's own name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = (line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())} ({torch.get_num_threads()} threads)"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def environment(device: torch.device, root: Path) -> dict[str, Any]:
    """What a number depends on besides its settings; nothing of the user's environment variables."""
    commit, dirty = source_commit(root)
    stamp: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{library: _version(library) for library in KERNEL_LIBRARIES},
        "commit": commit,
        "dirty": dirty,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        stamp |= {
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory // 2**20,
            "ptxas": _assembler_version(),
            **_driver(device),
        }
    return stamp


def environment_id(stamp: dict[str, Any]) -> str:
    """Eight hex digits of a stamp, for the rows; the stamp itself stands in the run's environment.json."""
    return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:8]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(device: torch.device) -> dict[str, str]:
    """Driver and clocks as nvidia-smi reads them; empty where there is no nvidia-smi."""
    query = ("driver_version", "clocks.max.sm", "clocks.max.mem")
    command = ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(query, (value.strip() for value in answer.split(",")), strict=False))


def _assembler_version() -> str | None:
    path = os.environ.get("TRITON_PTXAS_PATH")
    try:
        answer = subprocess.run([path or "ptxas", "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"V([\d.]+)", answer.stdout)
    return version[1] if version else None


def source_commit(root: Path) -> tuple[str | None, bool | None]:
    """The commit of attnbench's own source and whether files differ from it.

    From git, or from a file COMMIT where there is no git (then whether files differ is not known: None).
    """
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        path = root / "COMMIT"
        return (path.read_text().strip() or None, None) if path.exists() else (None, None)


def _git(root: Path, *words: str) -> str:
    if not (root / ".git").exists():
        raise FileNotFoundError(root / ".git")
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
