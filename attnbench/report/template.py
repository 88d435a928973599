"""The page's template. Jinja2 escapes text; control characters are spelled out."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attnbench.report.sections import words
from attnbench.report.sections.scores import turned
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
        "exact": lambda text: escape(printable(text)),
        "capitalized": words.capitalized,
        "label": label,
        "turned": turned,
    }
    return environment.get_template("page.html").render(content, running=RUNNING)


def label(table: Table, index: int) -> Markup:
    """Return what stands above a cell of a narrow table."""
    return breakable(str(table.headers[index]), "\N{ZERO WIDTH SPACE}")


def breakable(text: str, end: str = "<wbr>") -> Markup:
    """Allow line ends after underscores: a name would otherwise break anywhere."""
    return Markup(str(escape(words.unbroken(printable(text)))).replace("_", f"_{end}"))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else words.unbroken(printable(str(value)))
