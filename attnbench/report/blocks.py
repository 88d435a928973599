"""Parts of a page before they are rendered: tables, notes, facts. Text as it was given; page.html escapes it."""

from dataclasses import dataclass

from attnbench.results.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Entry of the page's navigation."""

    id: str
    title: str


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
    """A table that opens at a click on its title."""

    title: str
    count: str
    """Small words behind the title."""
    table: Table
    is_open: bool = False


Block = Table | Note | Folded | dict[str, str]
"""What stands below a heading; a dictionary is facts by their names."""
