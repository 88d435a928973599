"""Files of JSON lines: errors name file and line, files are replaced at once, and .gz is compressed."""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from attnbench.settings.errors import UserError
from attnbench.settings.paths import name_beside
from attnbench.settings.untrusted import MAX_JSON_BYTES, open_regular, parse_json, read_bounded_bytes

PACKED = ".gz"

FILES = re.compile(
    r"config\.yaml|environment(-[0-9a-f]{8})?\.json|train\.log|output\.log|metrics\.jsonl|sample\.json|cells\.txt"
    r"|failed\.txt"
)
"""Files of a run, beside those in results/ and checkpoint/."""

PLAN_FILES = re.compile(r"(comparison|freeze|stacks)\.json")
"""Files in the folder of a plan."""

HOLE = b"\0" * 8
"""Least hole that a machine leaves when it dies; a flipped bit makes a single NUL byte."""

MAX_LINES = 2**20
"""Most lines of a file; an empty object takes thirty times its bytes in memory."""

MAX_LINE_BYTES = 2**20
"""Longest line."""


@dataclass(slots=True, kw_only=True)
class JsonLines:
    path: Path
    objects: list[dict[str, Any]]
    """Object i stands on line i + 1."""
    texts: list[str]
    """The lines without their ends."""
    torn: bool
    """The last line was cut off, or a hole follows: `objects` ends before."""
    sha256: str
    """Hash of all lines before the last."""

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"


def read_json_lines(path: Path, max_bytes: int = MAX_JSON_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> JsonLines:
    """The last line may be torn, and a machine that died may leave NUL bytes; any other line that is not a JSON object
    was altered."""
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
    """Yield every whole line without its end, and its object; the file may be longer than memory."""
    try:
        with open_regular(path) as file:
            yield from _whole_lines(path, iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), MAX_LINE_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _whole_lines(path: Path, lines: Iterable[bytes], max_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if len(line) > max_bytes:
            raise UserError(f"{path}:{number}: longer than the {max_bytes} bytes that a line may have")
        # Bytes other than UTF-8 make a line unreadable, not the file.
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
    # A torn object lacks its closing brace and cannot be parsed.
    content = parse_json(line)
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}")
    return content


def to_line(content: dict[str, Any]) -> str:
    """Return one line of JSON with its newline.

    Raises:
        ValueError, TypeError: a number that is not finite, or a value that JSON does not have.
    """
    return json.dumps(content, allow_nan=False) + "\n"


def half_replaced(folder: Path) -> list[Path]:
    """List the temporary files that a dead process left beside FILES, PLAN_FILES or results."""
    named = re.compile(rf"\.({FILES.pattern}|{PLAN_FILES.pattern})\.[0-9]+\.new")
    found = [path for path in folder.glob(".*.new") if named.fullmatch(path.name)]
    found += [path for path in folder.glob("results/.*") if re.fullmatch(r"\..+\.jsonl\.[0-9]+\.new", path.name)]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file by `text` or its parts; a reader sees the old file or the new one."""
    beside = name_beside(path)
    try:
        with open(beside, "wb") as file:
            # Without a time, so that equal contents are equal files.
            is_packed = path.suffix == PACKED
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if is_packed else nullcontext(file) as stream:
                for part in [text] if isinstance(text, str) else text:
                    stream.write(part.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, UserError) as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
