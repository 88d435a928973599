"""Untrusted input: bounded files, and JSON and yaml as plain data."""

import errno
import gzip
import json
import math
import os
import stat
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from attnbench.settings.errors import UserError

MAX_JSON_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**18
"""Longest yaml: parsing it takes seconds; a run's config.yaml has 3,000 bytes."""

MAX_DEPTH = 64
"""Deepest nesting of JSON."""


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
    """A FIFO would block the process, a device might never end. Raises OSError if it cannot be opened, or is no regular
    file."""
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
    """Read a text file of at most `max_bytes`. Raises OSError or UnicodeDecodeError if it cannot be read."""
    return read_bounded_bytes(path, max_bytes).decode("utf-8")


def read_bounded_bytes(path: Path, max_bytes: int, *, is_packed: bool = False) -> bytes:
    """Read as `read_bounded` does; `is_packed` is by gzip: `max_bytes` counts the content, and an incomplete one raises
    EOFError or zlib.error."""
    with open_regular(path) as file, gzip.open(file) if is_packed else nullcontext(file) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path}: longer than the {max_bytes} bytes that such a file may have")
    return content


def read_object(path: Path, remedy: str = "restore it, or remove it") -> dict[str, Any]:
    try:
        content = parse_json(read_bounded(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object; {remedy}")
    return content


def parse_json(text: str) -> Any:
    """Raises ValueError for no JSON, a number that is not finite, or nesting deeper than MAX_DEPTH."""
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
    """Parse yaml to JSON's types and dates. Raises ValueError for no yaml, an alias, or nesting deeper than the parser
    can go."""
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
