"""HTML that is safe by construction: whatever is not `Markup` is escaped where it enters an element."""

import html
import json
from collections.abc import Iterable
from typing import Any

from attnbench.results.tables import Table, TableCell
from attnbench.settings.errors import printable

VOID = ("meta", "br", "wbr")


class Markup(str):
    """Text that is HTML already, made by `element`."""


def element(name: str, /, *children: object, **attributes: str | bool | None) -> Markup:
    """Write `<name attributes>children</name>`; children that are no Markup are text, and None is left out.

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
    """Join the children, text escaped."""
    shown = (child if isinstance(child, Markup) else _escaped(child) for child in children if child is not None)
    return Markup(_escaped(separator).join(shown))


def small(texts: Iterable[str]) -> list[Markup]:
    """Set each text that is not empty in small type."""
    return [element("small", text) for text in texts if text]


def paragraph(text: object, kind: str, heading: str = "") -> Markup | None:
    """Write a paragraph of a class, with bold words before it; None without text."""
    return element("p", element("strong", heading) if heading else None, text, class_=kind) if text else None


def opening(title: str, count: str, content: Markup, *, is_open: bool = False) -> Markup:
    """Write a block that opens at a click on its title."""
    return element("details", element("summary", f"{title} ", *small([count])), content, open=is_open)


def facts(pairs: dict[str, object]) -> Markup:
    """Write names and values, without those that are empty."""
    lines = (element("div", element("dt", name), element("dd", value)) for name, value in pairs.items() if value)
    return element("dl", *lines)


def crossed(text: str) -> Markup:
    """Write words for a missing number, behind a cross."""
    return join([element("span", "×", class_="cross", aria_hidden="true"), " ", text])


def breakable(text: str) -> Markup:
    """Allow a line to end after an underscore: a name is one word, and would break anywhere."""
    return Markup(_escaped(text).replace("_", f"_{element('wbr')}"))


def embedded_json(content: Any, name: str) -> Markup:
    """Write a block of data that no text in it can leave: `<`, `>` and `&` are spelled as JSON escapes."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Markup(text), type="application/json", id=name)


def to_html(table: Table) -> Markup:
    """Render a table in a box in which it scrolls; its title is for readers who do not see the heading above it."""
    kinds = [None if index < table.num_labels else "number" for index in range(len(table.headers))]
    headers = zip(table.headers, kinds, strict=True)
    head = element("tr", *(element("th", breakable(text), scope="col", class_=kind) for text, kind in headers))
    lines = (element("tr", *map(_cell, line, kinds, range(len(kinds)))) for line in table.lines)
    return scrolling(table.title, element("thead", head), element("tbody", *lines))


def scrolling(caption: str, *parts: Markup, kind: str | None = None) -> Markup:
    """Write a table of these parts in a box that scrolls sideways, by keyboard too."""
    content = element("table", element("caption", caption, class_="hidden"), *parts, class_=kind)
    return element("div", content, class_="scroll", role="region", aria_label=caption, tabindex="0")


def _cell(cell: str | TableCell, kind: str | None, index: int) -> Markup:
    content, mark = (cell, "") if isinstance(cell, str) else (cell_content(cell), cell.mark)
    if index == 0:
        return element("th", content, scope="row")
    return element("td", content, class_=" ".join(filter(None, (kind, mark))) or None)


def cell_content(cell: TableCell) -> Markup:
    """Write a cell's text, and its notes below it."""
    text = crossed(cell.text) if cell.mark == "lost" else element("span", cell.text, class_="value")
    return join([text, *small(cell.notes)])


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))
