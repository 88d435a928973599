"""The page's template. Jinja2 escapes text; control characters are spelled out."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attnbench.report.sections import words
from attnbench.results.tables import Table
from attnbench.settings.escape import printable

HERE = Path(__file__).parent

RUNNING = " data-running"
"""Attribute of a page that loads itself again."""


def render(**content: Any) -> str:
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
        "label": label,
    }
    return environment.get_template("page.html").render(content, running=RUNNING)


def label(table: Table, index: int) -> str:
    """Return what stands above a cell of a narrow table."""
    return str(table.headers[index])


def breakable(text: str) -> Markup:
    """Allow line breaks after underscores: a name would otherwise break anywhere."""
    return Markup(str(escape(printable(text))).replace("_", "_<wbr>"))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(str(value))
