"""Parts of a page before they are rendered: tables, notes, facts. Text as it was given; page.html escapes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from attnbench.results.tables import Table
from attnbench.verdict.summary import Summary

MAX_FILE_NAME = 200
"""Characters of a picture's name at most: file systems take 255, with what stands around it while it is written."""


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

    text: str
    kind: str = "note"
    """Class of the page's style; empty for plain text."""
    heading: str = ""
    """Bold words before the text."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that open at a click on their title."""

    title: str
    count: str
    """Small words behind the title."""
    block: "Table | dict[str, str]"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences by what they are about."""

    sentences: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A chart, and its words."""

    name: str
    """Name of its files; see `file_name`."""
    title: str
    spec: dict[str, Any]
    """Vega-Lite."""
    description: str
    """For readers who cannot see it."""
    legend: str = ""
    """Small words behind the title."""
    missing: str = ""
    """Sentence on what has no number."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Charts beside each other."""

    shown: Sequence[Picture]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text that a model wrote."""

    label: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Texts beside each other."""

    shown: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Scores:
    """The table of all variants on all evaluations."""

    content: Summary


Block = Table | Note | Folded | Lines | Pictures | Samples | Scores | dict[str, str]
"""Content below a heading; a dictionary is facts by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Heading of the first order, and what stands below it."""

    title: str
    blocks: Sequence[Block]
    evaluation: str = ""
    """Name of the evaluation that it is about, where it is about one."""
    parts: dict[str, list[Block]] | None = None
    """Blocks under headings of the second order."""


def file_name(*parts: str, settings: Mapping[str, Any] | None = None) -> str:
    """Return the name of a picture's files: `rates-recall-num_pairs_4`.

    Records may call evaluations and settings anything. A name that is too long is cut, and ends in a hash of all of it.
    """
    words = [*parts, *(f"{name}_{value}" for name, value in (settings or {}).items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word).lstrip(".") for word in words)
    if len(name) <= MAX_FILE_NAME:
        return name
    ending = f"-{sha256(name.encode()).hexdigest()[:8]}"
    return name[: MAX_FILE_NAME - len(ending)] + ending
