"""Environment of a run (device, libraries, driver, commit), and reachable servers."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import ssl
import subprocess
import threading
import tomllib
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

UNTIMED = ("commit", "dirty", "platform", "python", "cpu_capability")
"""Entries of an environment that do not separate timings; several commits are flagged."""
LOWERED = "ATEN_CPU_CAPABILITY"
"""Environment variable that restricts the instructions that torch uses."""

KERNEL_LIBRARIES = ("triton", "flash-linear-attention", "flash-attn")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())} ({torch.get_num_threads()} threads)"


def environment(device: torch.device, root: Path) -> dict[str, Any]:
    """Return everything that a number depends on besides settings, without the user's environment variables."""
    commit, dirty = source_commit(root)
    stamp: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{library: _version(library) for library in KERNEL_LIBRARIES},
        "commit": commit,
        "dirty": dirty,
        # The widest instructions of torch decide speed, last digits and a seed's initial weights.
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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


def machine(device: torch.device, root: Path) -> dict[str, Any]:
    """Return the entries of `environment` that identify a timing: device and libraries.

    The processor's name implies its instructions; they are an entry only if LOWERED restricts them.
    """
    return timed_entries(environment(device, root), is_lowered=device.type == "cpu" and LOWERED in os.environ)


def timed_entries(stamp: dict[str, Any], *, is_lowered: bool) -> dict[str, Any]:
    """Return the entries of a stamp that `machine` gives where it was made; `is_lowered`: LOWERED restricted the
    instructions there."""
    names = {*stamp} - {*UNTIMED} | ({"cpu_capability"} if is_lowered else set())
    return {name: value for name, value in stamp.items() if name in names}


def environment_id(stamp: dict[str, Any]) -> str:
    """Eight hex digits for rows; the run's environment.json has the stamp."""
    return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:8]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(device: torch.device) -> dict[str, str]:
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


def is_checkout(root: Path) -> bool:
    """Return whether a folder is a checkout of attnbench, and not a folder of installed packages."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return project == "attnbench"


@cache
def source_commit(root: Path) -> tuple[str | None, bool | None]:
    """Return the commit of attnbench's source and whether files differ from it, asked once in a process.

    From git, or from a file COMMIT without git (then whether files differ is unknown: None). None for a folder that is
    no checkout.
    """
    if not is_checkout(root):
        return None, None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        path = root / "COMMIT"
        return (path.read_text().strip() or None, None) if path.exists() else (None, None)


def commit_of(path: Path) -> tuple[str, str] | None:
    """Return the first commit with the present content of a file, under any name, and its date.

    None outside a repository, if no commit has it, and in a shallow clone, whose first commit has all files.
    """
    path = path.resolve()
    root = next((folder for folder in path.parents if (folder / ".git").exists()), None)
    try:
        if root is None or _git(root, "rev-parse", "--is-shallow-repository") != "false":
            return None
        blob = _git(root, "hash-object", "--", str(path))
        commits = _git(root, "log", "--format=%h %cI", f"--find-object={blob}").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, date = commits[-1].partition(" ") if commits else ("", "", "")
    return (commit, date) if commit else None


def _git(root: Path, *words: str) -> str:
    if not (root / ".git").exists():
        raise FileNotFoundError(root / ".git")
    # Variables such as GIT_DIR, which git sets for hooks, name another repository; so may a folder above.
    kept = {name: x for name, x in os.environ.items() if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")}
    command, variables = ["git", "-C", str(root), *words], kept | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=variables).stdout.strip()


def answers(url: str, limit_seconds: float) -> bool:
    """Return whether `url` answers within the limit, which includes the look-up of its name and the user's proxy."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=limit_seconds).close()
        except urllib.error.HTTPError as error:
            # The server has answered.
            error.close()
        except urllib.error.URLError as error:
            # The program that does the work may know a certificate that Python does not.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except (OSError, ValueError, HTTPException):
            return
        answered.set()

    # In a thread: looking up a name has no timeout and can take minutes.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answered.is_set()
