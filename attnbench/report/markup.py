"""HTML that is safe by construction: whatever is not `Markup` is escaped where it enters an element."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.settings.errors import printable

VOID = ("meta", "br", "wbr")


class Markup(str):
    """Text that is HTML already, made by `element`."""


def element(name: str, /, *children: object, **attributes: str | bool | None) -> Markup:
    """`<name attributes>children</name>`; children that are no Markup are text, and None is left out.

    Attributes drop a trailing underscore (`class_`) and have - for _; True is an attribute without a value, False and
    None none.
    """
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{words}>")
    return Markup(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[object], separator: str = "") -> Markup:
    """The children one after the other, text escaped."""
    shown = (child if isinstance(child, Markup) else _escaped(child) for child in children if child is not None)
    return Markup(_escaped(separator).join(shown))


def breakable(text: str) -> Markup:
    """The text, with a line's end allowed after an underscore: a name is one word, and would break anywhere."""
    return Markup(_escaped(text).replace("_", f"_{element('wbr')}"))


def embedded_json(content: Any, name: str) -> Markup:
    """A block of data that no text in it can leave: `<`, `>` and `&` are spelled as JSON escapes."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Markup(text), type="application/json", id=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One cell with a class of its own."""

    content: object
    kind: str


def table(caption: str, headers: Sequence[object], lines: Iterable[Sequence[object]], *, num_labels: int = 1) -> Markup:
    """A table in a box of its own, in which it scrolls where it is wider than the page.

    Args:
        headers: of the columns.
        num_labels: columns from the left that are text, not numbers; the first of them heads its line.
        caption: for who does not see the heading that the table stands under.
    """
    head = element("tr", *(_header(content, index < num_labels) for index, content in enumerate(headers)))
    body = (element("tr", *(_cell(content, index, num_labels) for index, content in enumerate(line))) for line in lines)
    drawn = element(
        "table", element("caption", caption, class_="hidden"), element("thead", head), element("tbody", *body)
    )
    return scrolling(drawn, caption)


def scrolling(content: Markup, label: str) -> Markup:
    """A box that scrolls sideways, by keyboard too."""
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")


def _header(content: object, is_label: bool) -> Markup:
    return element("th", content, scope="col", class_=None if is_label else "number")


def _cell(content: object, index: int, num_labels: int) -> Markup:
    if index == 0:
        return element("th", content, scope="row")
    kinds = [] if index < num_labels else ["number"]
    if isinstance(content, TableCell):
        kinds, content = [*kinds, content.kind], content.content
    return element("td", content, class_=" ".join(kinds) or None)


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))
