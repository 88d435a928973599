"""Errors shown without a traceback, and one line for other exceptions that the user can mend."""

import difflib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from attnbench.settings.escape import printable

MAX_CHARACTERS = 2000
"""Longest message; a longer one loses its middle."""


class UserError(Exception):
    """An error that the user can mend: one printable line with the setting or file, the fault and the remedy.

    Code that reads settings, files or a device may raise it; docstrings name other errors.
    """

    def __str__(self) -> str:
        text = printable(super().__str__())
        half = MAX_CHARACTERS // 2 - 2
        return text if len(text) <= MAX_CHARACTERS else f"{text[:half]}...{text[-half:]}"

    def _render_traceback_(self) -> list[str]:
        """A notebook shows it instead of a traceback."""
        return [f"UserError: {self}"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" if a known name is similar, otherwise nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "[CUDA]: out of memory",
)
"""Phrases in a RuntimeError for lack of memory, of torch on a CPU, C++, the CUDA driver, cuBLAS and Triton."""


def mendable(error: BaseException) -> str | None:
    """Return one line for an error that the user can mend (a setting, the disk, memory); None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    reason = memory_reason(error)
    if reason is not None:
        return printable(f"out of memory ({reason}); a smaller model, batch or text takes less")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return printable(f"{where}{error.strerror or error}")
    return None


def memory_reason(error: BaseException) -> str | None:
    """Return the first two sentences in which an exception, or the one it wraps, says that memory ran out."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return memory_reason(inner)
    lines = str(error).strip().splitlines() or ["out of memory"]
    # By name, because settings are read without torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _brief(lines[0])
    if not isinstance(error, RuntimeError):
        return None
    line = next((line for line in lines if any(words in line for words in OUT_OF_MEMORY)), None)
    return None if line is None else _brief(line)


def _brief(line: str) -> str:
    return ". ".join(line.split(". ")[:2])


def one_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message; of a UserError its message."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def line_beside(error: BaseException, module_name: str) -> str:
    """Return file:line of the last frame in the folder of a user's module; empty if there is none."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return ""
    folder = Path(file).resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if Path(frame.filename).resolve().parent == folder]
    return lines[-1] if lines else ""


class Interrupted(BaseException):
    """A signal stopped the run, and its state is saved. Not an `Exception`, so that it ends a sweep too.

    Args:
        message: what was saved, and how to go on.
        exit_code: 128 plus the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]
