"""Files of one JSON object a line: read with errors that name file and line, replaced as a whole or not at all.

`read_json_lines` and `replace_file` take one whose name ends in .gz for compressed.
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from attnbench.settings.errors import UserError
from attnbench.settings.text import MAX_JSON_BYTES, name_beside, open_regular, parse_json, read_bounded_bytes

Value = TypeVar("Value")

PACKED = ".gz"
"""End of the name of a compressed file."""

FILES = re.compile(
    r"config\.yaml|environment(-[0-9a-f]{8})?\.json|train\.log|output\.log|metrics\.jsonl|sample\.json|cells\.txt"
    r"|failed\.txt"
)
"""Files of a run, beside those in results/ and checkpoint/."""

PLAN_FILES = re.compile(r"(comparison|freeze|stacks)\.json")
"""Files in the folder of a plan."""

HOLE = b"\0" * 8
"""At least, where a machine died before it had written; a bit that flips makes one NUL byte."""

MAX_LINES = 2**20
"""Most lines of a file: an empty object takes thirty times its bytes in memory."""

MAX_LINE_BYTES = 2**20
"""Longest line of a file that is read a line at a time, however many there are."""


@dataclass(slots=True, kw_only=True)
class JsonLines:
    """Content of a file of JSON lines."""

    path: Path
    objects: list[dict[str, Any]]
    """One a line, in order; object i stands on line i + 1."""
    texts: list[str]
    """The lines that they were read from, without their ends."""
    torn: bool
    """The last line was cut off in the middle of writing, or a hole is where lines would be: `objects` ends before."""
    sha256: str
    """Hash of all lines before the last."""

    def where(self, index: int) -> str:
        """File and line of object `index`, as error messages name them."""
        return f"{self.path}:{index + 1}"


def read_once(read: Callable[[Path], Value]) -> Callable[[Path], Value]:
    """Keep what a function makes of a file for as long as the file is not written to: a plan asks the same of its
    hundreds of results after each training. An error is not kept."""
    kept: dict[Path, tuple[tuple[int, int, int], Value]] = {}

    @wraps(read)
    def of(path: Path) -> Value:
        stat = path.stat()
        # Before it is read: what is written meanwhile is read the next time.
        state = stat.st_ino, stat.st_size, stat.st_mtime_ns
        known = kept.get(path)
        if known is None or known[0] != state:
            known = kept[path] = state, read(path)
        return known[1]

    return of


def read_json_lines(path: Path, max_bytes: int = MAX_JSON_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> JsonLines:
    """Read every line of `path`.

    Only the last line can be torn by a process that died, and then lacks its end; a machine that died may leave NUL
    bytes where it had not written yet. Any other line that is no JSON object was altered.

    Raises:
        UserError: the file cannot be read, is longer than any of ours, or a line that is not torn is no JSON object.
    """
    try:
        content = read_bounded_bytes(path, max_bytes, is_packed=path.suffix == PACKED)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path}: cannot be read ({why})") from error
    if content.count(b"\n") > MAX_LINES:
        raise UserError(f"{path}: more than the {MAX_LINES} lines that such a file may have")
    whole = [*_whole_lines(path, BytesIO(content), max_line_bytes)]
    before_last = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
    return JsonLines(
        path=path,
        objects=[content for _, content in whole],
        texts=[text for text, _ in whole],
        torn=len(whole) < content.count(b"\n") + (content[-1:] not in (b"", b"\n")),
        sha256=hashlib.sha256(before_last).hexdigest(),
    )


def stream_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read every whole line of `path` without its end, and its object: of a file that may be longer than memory.

    Raises:
        UserError: as read_json_lines; or a line is longer than any of ours.
    """
    try:
        with open_regular(path) as file:
            yield from _whole_lines(path, iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), MAX_LINE_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _whole_lines(path: Path, lines: Iterable[bytes], max_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if len(line) > max_bytes:
            raise UserError(f"{path}:{number}: longer than the {max_bytes} bytes that a line may have")
        # Bytes that are no UTF-8 make a line unreadable, not the whole file.
        text = line.removesuffix(b"\n").decode("utf-8", errors="replace")
        try:
            content = _parse_object(text)
        except ValueError as error:
            if line.endswith(b"\n") and HOLE not in line:
                raise UserError(
                    f"{path}:{number}: not a JSON object ({error}); the file was altered after it was written"
                ) from None
            return
        yield text, content


def _parse_object(line: str) -> dict[str, Any]:
    # An object cut off anywhere lacks its closing brace, so whatever parses is whole.
    content = parse_json(line)
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}")
    return content


def to_line(content: dict[str, Any]) -> str:
    """One line of JSON with its newline.

    Raises:
        ValueError: a number is not finite, which JSON cannot say.
        TypeError: a value is of a type that JSON does not have.
    """
    return json.dumps(content, allow_nan=False) + "\n"


def half_replaced(folder: Path) -> list[Path]:
    """List the files that a process which died was writing beside FILES, PLAN_FILES or results."""
    named = re.compile(rf"\.({FILES.pattern}|{PLAN_FILES.pattern})\.[0-9]+\.new")
    found = [path for path in folder.glob(".*.new") if named.fullmatch(path.name)]
    found += [path for path in folder.glob("results/.*") if re.fullmatch(r"\..+\.jsonl\.[0-9]+\.new", path.name)]
    return [path for path in found if is_file(path)]


def is_file(path: Path) -> bool:
    """Tell if it is a regular file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file by `text`, or parts of one, at once: a reader sees the old file or the new one."""
    beside = name_beside(path)
    try:
        with open(beside, "wb") as file:
            # Without a time: equal content is an equal file.
            is_packed = path.suffix == PACKED
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if is_packed else nullcontext(file) as stream:
                for part in [text] if isinstance(text, str) else text:
                    stream.write(part.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, UserError) as error:
        # On a full disk what was written so far is in the way.
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The user knows no other file.
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
