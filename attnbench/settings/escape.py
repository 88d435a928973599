"""Text escaped for terminals and Markdown, and without paths."""

import logging
import re
from pathlib import Path
from typing import Any

PATH = r"(?:~[\w.-]*|\.\.(?:/\.\.)*)?/"
"""Beginning of a path that is absolute, in a home, or above the working directory."""

WHOLE_PATH = re.compile(rf"(?P<setting>[+~]*[\w.@-]+=)?{PATH}.*")
PATH_IN_TEXT = re.compile(
    rf"(?<=')(?P<setting>[+~]*[\w.@-]+=)?{PATH}(?:[^/'\n]*/)*(?P<quoted>[^/'\n]+)(?=')"
    rf"|(?<![\w.:/~<>]){PATH}(?:[^\s/'\",;:()\[\]{{}}<>]+/)*(?P<name>[^\s/'\",;:()\[\]{{}}<>]+)"
)


def printable(text: str) -> str:
    """Escape characters that control a terminal (escape sequences, line ends, direction marks)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_text(text: str) -> str:
    """Escape as `printable` does, but line feeds and tabs stay."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def markdown_text(text: str) -> str:
    """Escape a cell of a Markdown table: no HTML, no link, no further cell."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


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


class OneLine(logging.Formatter):
    """Escapes messages to one printable line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))
