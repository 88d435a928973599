"""JSON and yaml that a stranger may have written: bounded in size and depth, finite in its numbers, and no code."""

import errno
import json
import math
import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from attnbench.settings.errors import UserError

MOST_JSON_BYTES = 64 * 2**20
MOST_YAML_BYTES = 2**18
"""The parser is slow: this much takes it seconds, and a run's config.yaml has three thousand bytes."""

MOST_DIGITS = 300
"""Of a whole number: a longer one has no place among floating-point numbers."""


class _NoAliases(yaml.SafeLoader):
    """A name for a part, used again and again inside of others, makes gigabytes of two kilobytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"*{self.peek_event().anchor}: an alias, which such a file may not have")
        return super().compose_node(parent, index)


def open_regular(path: Path) -> BufferedReader:
    """A file opened to be read. A FIFO would hold the process until somebody writes, a device might never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # Without waiting: a FIFO is opened at once then, and found to be one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bounded(path: Path, most_bytes: int) -> str:
    """The text of a file, unless it is longer than any that attnbench writes.

    Raises:
        UserError: it is.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return read_bounded_bytes(path, most_bytes).decode("utf-8")


def read_bounded_bytes(path: Path, most_bytes: int) -> bytes:
    """What a file holds; raises as `read_bounded`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UserError(f"{path}: longer than the {most_bytes} bytes that such a file may have")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        UserError: it cannot be read, or holds none.
    """
    try:
        content = parse_json(read_bounded(path, MOST_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def parse_json(text: str) -> Any:
    """What `text` says.

    Raises:
        ValueError: it is no JSON, has a number that is not finite, or is nested deeper than the parser can go.
    """
    try:
        return json.loads(text, parse_float=finite_number, parse_int=whole_number, parse_constant=finite_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """What `text` says; of types other than JSON's only dates.

    Raises:
        ValueError: it is no yaml, has an alias, or is nested deeper than the parser can go.
    """
    try:
        return _NoAliases(text).get_single_data()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Its constructors let through what they stumble over.
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def whole_number(text: str) -> int:
    """Raises ValueError for one that is no number, or too long to be computed with."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def finite_number(text: str) -> float:
    """Raises ValueError for NaN and infinities, however they are written."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


def unlinked(path: Path) -> Path:
    """`path`, and no link there any more, symbolic or hard: what else it names is somebody else's, a copy made by
    `cp -al` say, and is not written to. No FIFO either, which would hold the process until somebody reads."""
    if path.is_symlink() or path.is_fifo() or (path.is_file() and path.stat().st_nlink > 1):
        path.unlink()
    return path


def unlinked_log(path: Path) -> Path:
    """The same of a file that is written on: it keeps what it had, unless that stood behind a symbolic link."""
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        beside = name_beside(path)
        shutil.copyfile(path, beside)
        os.replace(beside, path)
    return unlinked(path)


def name_beside(path: Path) -> Path:
    return unlinked(path.with_name(f".{path.name}.{os.getpid()}.new"))
