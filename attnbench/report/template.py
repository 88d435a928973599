"""The page's one template, and how text enters it: escaped by Jinja2, spelled out where a terminal would obey it."""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attnbench.report.sections import evaluations as sections
from attnbench.report.sections import words
from attnbench.settings.errors import printable

HERE = Path(__file__).parent


def render(**content: Any) -> str:
    """Render page.html; text that is no Markup is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.tests["a"] = lambda value, name: type(value).__name__ == name
    environment.filters |= {
        "breakable": breakable,
        "capitalized": words.capitalized,
        "chances": words.chances,
        "entry_cell": sections.entry_cell,
        "groups": _groups,
        "heading": words.heading,
        "score_name": sections.score_name,
        "score_place": sections.score_place,
    }
    return environment.get_template("page.html").render(content)


def breakable(text: str) -> Markup:
    """Allow a line to end after an underscore: a name is one word, and would break anywhere."""
    return Markup(str(escape(printable(text))).replace("_", "_<wbr>"))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(str(value))


def _groups(items: Iterable[Any], attribute: str) -> list[tuple[Any, list[Any]]]:
    """Group neighbours that are alike in an attribute, in their order, which Jinja's `groupby` would sort."""
    return [(value, list(group)) for value, group in groupby(items, attrgetter(attribute))]
