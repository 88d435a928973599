"""Environment of a run: device, libraries, driver and commit as its rows name them, and servers in reach."""

import hashlib
import importlib.metadata
import json
import netrc
import os
import platform
import re
import ssl
import subprocess
import threading
import tomllib
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

UNTIMED = ("commit", "dirty", "platform", "python", "cpu_capability")
"""Entries of an environment that a speed does not depend on, or is compared across: several commits are flagged."""
LOWERED = "ATEN_CPU_CAPABILITY"
"""Environment variable that has torch use fewer instructions than the processor has."""

KERNEL_LIBRARIES = ("triton", "flash-linear-attention", "flash-attn")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor, as tables print it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = (line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())} ({torch.get_num_threads()} threads)"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def environment(device: torch.device, root: Path) -> dict[str, Any]:
    """Return everything that a number depends on besides its settings; no environment variables of the user."""
    commit, dirty = source_commit(root)
    stamp: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{library: _version(library) for library in KERNEL_LIBRARIES},
        "commit": commit,
        "dirty": dirty,
        # The widest instructions that torch uses: they decide speed, last digits and, of a seed, the initial weights.
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
    """Return the entries of `environment` that identify what is timed: the device and the libraries.

    The processor's own instructions follow from its name, so the hashes of timed cells leave them out; they are an
    entry where `LOWERED` asks for fewer.
    """
    return timed_entries(environment(device, root), is_lowered=device.type == "cpu" and LOWERED in os.environ)


def timed_entries(stamp: dict[str, Any], *, is_lowered: bool) -> dict[str, Any]:
    """Return the entries of a stamp that `machine` gives on its machine.

    Args:
        is_lowered: `LOWERED` asked for fewer instructions there.
    """
    names = {*stamp} - {*UNTIMED} | ({"cpu_capability"} if is_lowered else set())
    return {name: value for name, value in stamp.items() if name in names}


def environment_id(stamp: dict[str, Any]) -> str:
    """Return eight hex digits of a stamp, for the rows; the stamp itself stands in the run's environment.json."""
    return hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:8]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(device: torch.device) -> dict[str, str]:
    """Return driver and clocks as nvidia-smi reads them; empty where there is no nvidia-smi."""
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
    """Return whether a folder holds the source of attnbench, rather than the packages that are installed there."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return project == "attnbench"


def source_commit(root: Path) -> tuple[str | None, bool | None]:
    """Return the commit of attnbench's source, and whether files differ from it; None where `root` is no checkout.

    From git, or from a file COMMIT where there is no git (then whether files differ is not known: None).
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
    """Return the first commit that has the present content of a file, under whatever name, and its date.

    Of the repository that the file lies in, tracked or not; None where it lies in none, where no commit has it, and in
    a shallow clone, whose first commit has all files.
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
    """Return the answer of git about the repository whose top folder is `root`."""
    if not (root / ".git").exists():
        raise FileNotFoundError(root / ".git")
    # Variables such as GIT_DIR, which git sets for its hooks, name another repository; so may a folder above.
    kept = {name: x for name, x in os.environ.items() if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")}
    command, variables = ["git", "-C", str(root), *words], kept | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=variables).stdout.strip()


def answers(url: str, limit_seconds: float) -> bool:
    """Return whether anything answers a request for `url` within the limit, the look-up of its name included.

    Goes through the proxy that the environment names, as the real request would.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=limit_seconds).close()
        except urllib.error.HTTPError as error:
            # An error of the server is an answer too.
            error.close()
        except urllib.error.URLError as error:
            # A certificate that Python does not know may still be known to the program that will do the work.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except (OSError, ValueError, HTTPException):
            return
        answered.set()

    # Looking up a name knows no timeout and can take minutes, so a thread that nobody waits for does it.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answered.is_set()


def has_netrc_key(host: str) -> bool:
    """Return whether the user's netrc file (NETRC, ~/.netrc or ~/_netrc, the first there is) has a key for `host`."""
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    # A user without a home folder keeps the ~, and has no such file.
    for path in map(Path, map(os.path.expanduser, names)):
        if path.exists():
            try:
                entry = netrc.netrc(path).authenticators(host)
            except (netrc.NetrcParseError, OSError):
                # A file that nobody can read logs nobody in.
                return False
            return entry is not None and bool(entry[2])
    return False
