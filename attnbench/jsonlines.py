"""Files of one JSON object a line: read with errors that name file and line, replaced as a whole or not at all."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.documents import MOST_JSON_BYTES, parse_json, read_bounded_bytes
from attnbench.errors import UserError

MOST_LINES = 2**20
"""Of a file; an object that says nothing takes thirty times its bytes."""


@dataclass(slots=True, kw_only=True)
class JsonLines:
    """What a file of JSON lines holds."""

    path: Path
    objects: list[dict[str, Any]]
    """One a line, in order; object i stands on line i + 1."""
    texts: list[str]
    """The lines that they were read from, without their ends."""
    torn: bool
    """The last line was cut off in the middle of writing and is left out of `objects`."""
    sha256: str
    """Of all lines before the last."""

    def where(self, index: int) -> str:
        """File and line of object `index`, as error messages name them."""
        return f"{self.path}:{index + 1}"


def read_json_lines(path: Path) -> JsonLines:
    """Every line of `path`.

    Only the last line can be torn by a process that died, and then lacks its end: any other that is no JSON object
    was altered.

    Raises:
        UserError: the file cannot be read, is longer than any of ours, or a line that is not torn is no JSON object.
    """
    try:
        content = read_bounded_bytes(path, MOST_JSON_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if content.count(b"\n") > MOST_LINES:
        raise UserError(f"{path}: more than the {MOST_LINES} lines that such a file may have")
    # Bytes that are no UTF-8 make a line unreadable, not the whole file.
    lines = content.decode("utf-8", errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            objects.append(_parse_object(line))
        except ValueError as error:
            if number < len(lines) or content.endswith(b"\n"):
                raise UserError(
                    f"{path}:{number}: not a JSON object ({error}); the file was altered after it was written"
                ) from None
    before_last = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
    sha256 = hashlib.sha256(before_last).hexdigest()
    torn = len(objects) < len(lines)
    return JsonLines(path=path, objects=objects, texts=lines[: len(objects)], torn=torn, sha256=sha256)


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


def unlinked(path: Path) -> Path:
    """`path`, and no symbolic link there any more: what it led to is somebody else's and is not written to."""
    if path.is_symlink():
        path.unlink()
    return path


def half_replaced(folder: Path) -> list[Path]:
    """Files beside those that a process which died was about to replace."""
    return [path for path in folder.glob(".*.new") if re.fullmatch(r"\..+\.[0-9]+\.new", path.name)]


def replace_file(path: Path, text: str) -> None:
    """Puts `text` at `path`: written beside, synced, renamed, so that a reader sees the old file or the new one."""
    beside = unlinked(path.with_name(f".{path.name}.{os.getpid()}.new"))
    try:
        with open(beside, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        # On a full disk what was written so far is in the way.
        beside.unlink(missing_ok=True)
        raise
