"""Untrusted input and output: bounded files, JSON and yaml as plain data; escaping for terminals and Markdown."""

import errno
import gzip
import json
import logging
import math
import os
import re
import shutil
import stat
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from attnbench.settings.errors import UserError, printable

MAX_JSON_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**18
"""Longest yaml: parsing it takes seconds; a run's config.yaml has 3,000 bytes."""

MAX_DEPTH = 64
"""Deepest nesting of JSON."""

PATH = r"(?:~[\w.-]*|\.\.(?:/\.\.)*)?/"
"""Beginning of a path that is absolute, in a home, or above the working directory."""

WHOLE_PATH = re.compile(rf"(?P<setting>[+~]*[\w.@-]+=)?{PATH}.*")
PATH_IN_TEXT = re.compile(
    rf"(?<=')(?P<setting>[+~]*[\w.@-]+=)?{PATH}(?:[^/'\n]*/)*(?P<quoted>[^/'\n]+)(?=')"
    rf"|(?<![\w.:/~<>]){PATH}(?:[^\s/'\",;:()\[\]{{}}<>]+/)*(?P<name>[^\s/'\",;:()\[\]{{}}<>]+)"
)


def without_paths(value: Any) -> Any:
    """Reduce absolute paths to their last names: they contain user names, and mean nothing elsewhere."""
    if isinstance(value, dict):
        return {name: without_paths(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    whole = WHOLE_PATH.fullmatch(value)
    # A whole value may be one path, with any characters.
    if whole is not None and not re.search(rf"[\s,:]{PATH}", value):
        return (whole["setting"] or "") + Path(value).name
    return PATH_IN_TEXT.sub(lambda found: (found["setting"] or "") + (found["quoted"] or found["name"]), value)


def printable_text(text: str) -> str:
    """Escape a text of several lines, but not line feeds and tabs."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def markdown_text(text: str) -> str:
    """Escape a cell of a Markdown table: no HTML, no link, no further cell."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def user_path(name: Path | str) -> Path:
    """Return a path that the user names, with the home folder for ~."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name}: no home folder is known for ~; set HOME, or name the whole path") from None


class OneLine(logging.Formatter):
    """Formatter that escapes messages to one printable line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))


class _NoAliases(Composer, yaml.CSafeLoader):
    """Loader without aliases, which can expand two kilobytes to gigabytes.

    libyaml parses seven times as fast. PyYAML's composer makes the nodes: the one in C would overflow the stack.
    """

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            alias: Any = self.peek_event()
            raise ValueError(f"*{alias.anchor}: an alias, which such a file may not have")
        return super().compose_node(parent, index)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read: a FIFO would block the process, a device might never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # O_NONBLOCK opens a FIFO at once.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bounded(path: Path, max_bytes: int) -> str:
    """Read a text file of at most `max_bytes`.

    Raises:
        UserError: it is longer.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return read_bounded_bytes(path, max_bytes).decode("utf-8")


def read_bounded_bytes(path: Path, max_bytes: int, *, is_packed: bool = False) -> bytes:
    """Read a file; raises as `read_bounded`.

    Args:
        is_packed: by gzip; `max_bytes` counts the content. An incomplete one raises EOFError or zlib.error.
    """
    with open_regular(path) as file, gzip.open(file) if is_packed else nullcontext(file) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path}: longer than the {max_bytes} bytes that such a file may have")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON whose numbers are finite.

    Raises:
        ValueError: no JSON, a number that is not finite, or nested deeper than MAX_DEPTH.
    """
    try:
        content = json.loads(text, parse_float=finite_number, parse_int=whole_number, parse_constant=finite_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(content, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return content


def _is_deeper(content: Any, depth: int) -> bool:
    if not isinstance(content, dict | list):
        return False
    inside = content.values() if isinstance(content, dict) else content
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in inside)


def parse_yaml(text: str) -> Any:
    """Parse yaml to JSON's types and dates.

    Raises:
        ValueError: no yaml, an alias, or nested deeper than the parser can go.
    """
    try:
        return _NoAliases(text).get_single_data()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def whole_number(text: str) -> int:
    finite_number(text)
    return int(text)


def finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number


def unlinked(path: Path) -> Path:
    """Remove a symbolic or hard link or a FIFO at `path`, and return the path.

    The file behind a link, made by `cp -al` say, must not be written to; a FIFO would block the process.
    """
    if path.is_symlink() or path.is_fifo() or (path.is_file() and path.stat().st_nlink > 1):
        path.unlink()
    return path


def unlinked_log(path: Path) -> Path:
    """Do the same for a file to append to: it keeps its content, except behind a symbolic link."""
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        beside = name_beside(path)
        shutil.copyfile(path, beside)
        os.replace(beside, path)
    return unlinked(path)


def name_beside(path: Path) -> Path:
    """Return the path of this process's temporary file that replaces `path`."""
    return unlinked(path.with_name(f".{path.name}.{os.getpid()}.new"))
