"""The page as a whole, and the files beside it."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.report import charts, words
from attnbench.report.html import Markup, element, embedded_json, join, paragraph
from attnbench.report.inputs import Inputs, primaries, read_inputs
from attnbench.report.making import making_section, mixed_commits
from attnbench.report.sections import Chapter, anchor, chapters, evaluation_section, summary_section
from attnbench.results.files import replace_file
from attnbench.results.rows import TRAINING, write_csv
from attnbench.settings.errors import printable
from attnbench.settings.text import unlinked
from attnbench.verdict.seeds import Figure, figures, to_rows
from attnbench.verdict.summary import summary, verdicts_of

HERE = Path(__file__).parent
MIXED_COMMITS = "Mixed commits: its numbers come from several versions of the source, see How it was made."


def write_report(folder: Path, *, target: Path | None = None) -> Path:
    """Write index.html, results.csv and figures/ of an experiment.

    The page is complete in itself: it loads nothing, names no address of a network, and its own policy forbids the
    browser to ask for any.

    Args:
        folder: outputs/<experiment>, a run, or a folder with a results.csv.
        target: folder to write; None for `report` inside `folder`.

    Returns:
        The path of index.html.

    Raises:
        UserError: no rows, a file that cannot be read, or rows that cannot stand in one report.
    """
    inputs = read_inputs(folder)
    protocol = inputs.protocol
    over_seeds = figures(inputs.rows, protocol.shared)
    verdicts = verdicts_of(
        over_seeds,
        rank=protocol.rank,
        reference=protocol.reference,
        primaries=primaries(over_seeds, protocol),
    )
    shown = chapters(over_seeds, verdicts, protocol)
    target = folder / "report" if target is None else target
    (target / "figures").mkdir(parents=True, exist_ok=True)
    specs: dict[str, dict[str, Any]] = {}
    for plot in (plot for chapter in shown for plot in chapter.plots):
        specs[plot.name] = charts.specification(plot, protocol.variants)
        svg = charts.to_svg(specs[plot.name], plot)
        replace_file(target / "figures" / f"{plot.name}.svg", svg)
        unlinked(target / "figures" / f"{plot.name}.png").write_bytes(charts.to_png(svg))
    write_csv([*inputs.rows, *to_rows(over_seeds)], target / "results.csv")
    content = summary(over_seeds, verdicts, protocol.variants)
    main = [
        _masthead(inputs, over_seeds),
        summary_section(protocol, content, verdicts, {c.evaluation: anchor(index) for index, c in enumerate(shown)}),
        *(evaluation_section(chapter, index) for index, chapter in enumerate(shown)),
        making_section(inputs, over_seeds),
        _footer(),
    ]
    replace_file(target / "index.html", _page(inputs, [_navigation(shown), element("main", *main)], specs))
    return target / "index.html"


def _page(inputs: Inputs, content: Sequence[Markup], specs: dict[str, dict[str, Any]]) -> str:
    themes = {"light": charts.config(dark=False), "dark": charts.config(dark=True)}
    scripts = [charts.runtime(), (HERE / "page.js").read_text(encoding="utf-8")] if specs else []
    data = {"charts": specs, "themes": themes, "variants": [printable(name) for name in inputs.protocol.variants]}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{inputs.protocol.plan}: attention variants compared"),
        element("style", Markup((HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = element(
        "body",
        element("a", "Skip to the answer", href="#answer", class_="skip"),
        element("div", *content, class_="page"),
        embedded_json(data, "charts") if specs else None,
        *(element("script", Markup(script)) for script in scripts),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _policy(scripts: Sequence[str]) -> str:
    """Let only these very scripts run, and nothing be loaded; Vega compiles its own expressions."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join([*(f"'sha256-{value}'" for value in hashes), "'unsafe-eval'"])
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def _navigation(shown: Sequence[Chapter]) -> Markup:
    links = {"answer": "The answer", **{anchor(i): chapter.title for i, chapter in enumerate(shown)}}
    links["making"] = "How it was made"
    items = (element("li", element("a", title, href=f"#{target}")) for target, title in links.items())
    return element("nav", element("ul", *items), aria_label="Sections")


def _masthead(inputs: Inputs, over_seeds: Sequence[Figure]) -> Markup:
    identities = [row.identity for row in inputs.rows]
    num_seeds = max(len(figure.values) for figure in over_seeds)
    evaluations = {identity.evaluation for identity in identities} - {TRAINING}
    facts = [
        _counted(len(inputs.protocol.variants), "variant"),
        *([_counted(len(evaluations), "evaluation")] if evaluations else []),
        f"up to {_counted(num_seeds, 'seed')}" if num_seeds > 1 else "1 seed",
        words.listed(dict.fromkeys(identity.device for identity in identities)),
    ]
    return element(
        "header",
        paragraph("attnbench report", "eyebrow"),
        element("h1", inputs.protocol.plan),
        paragraph(join((element("span", fact) for fact in facts), " "), "facts"),
        paragraph(MIXED_COMMITS if mixed_commits(inputs) else "", "callout"),
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _footer() -> Markup:
    rows, plots = element("code", "results.csv"), element("code", "figures/")
    ending = " with the plots as SVG and PNG."
    text = ("Beside this page: ", rows, " with every row and every figure over seeds, and ", plots, ending)
    return element("footer", element("p", *text))
