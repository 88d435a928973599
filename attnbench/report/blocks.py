"""Parts of a page before rendering. Their text is raw; page.html escapes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from attnbench.results.tables import Table

MAX_FILE_NAME = 200
"""Longest name of a picture; file systems take 255 characters, and a name gets a suffix while it is written."""


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    kind: str = "note"
    """CSS class; empty for plain text."""
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Folded:
    """Content that opens at a click on its title."""

    title: str
    count: str
    block: "Table | dict[str, str]"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    sentences: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str
    """File name without suffix; see `file_name`."""
    title: str
    spec: dict[str, Any]
    description: str
    legend: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Pictures:
    shown: Sequence[Picture]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    label: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Samples:
    shown: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Scores:
    """The table of all variants, which a reader may sort, and copy as Markdown and LaTeX."""

    table: Table
    note: str


@dataclass(frozen=True, slots=True)
class Sentences:
    shown: Sequence[str]


@dataclass(frozen=True, slots=True)
class Example:
    """At each position what goes in and what is to come out, "." for nothing."""

    label: str
    positions: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Examples:
    shown: Sequence[Example]


Block = Table | Note | Folded | Lines | Pictures | Samples | Scores | Sentences | Examples | dict[str, str]
"""Content below a heading; a dictionary contains facts by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    blocks: Sequence[Block]
    evaluation: str = ""
    parts: dict[str, list[Block]] | None = None
    """Content below headings of the second level."""
    is_first: bool = False
    """Its title is not shown."""


def file_name(*parts: str, settings: Mapping[str, Any] | None = None) -> str:
    """A name such as `rates-recall-num_pairs_4`; a long name is cut and ends in a hash."""
    words = [*parts, *(f"{name}_{value}" for name, value in (settings or {}).items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word).lstrip(".") for word in words)
    if len(name) <= MAX_FILE_NAME:
        return name
    ending = f"-{sha256(name.encode()).hexdigest()[:8]}"
    return name[: MAX_FILE_NAME - len(ending)] + ending
