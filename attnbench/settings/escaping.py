"""Text from elsewhere made safe to show: nothing that a terminal obeys, nothing that starts a new line."""

import logging


def printable(text: str) -> str:
    """`text` with what a terminal would obey (escape sequences, line ends, direction marks) spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_text(text: str) -> str:
    """The same of a text of several lines: line feeds and tabs stay as they are."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def markdown_text(text: str) -> str:
    """`text` for a cell of a Markdown table: neither HTML nor a link, and it stays in its cell."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


class OneLine(logging.Formatter):
    """A formatter whose message is one printable line, whatever names and reasons stand in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))
