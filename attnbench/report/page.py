"""The page as a whole, and the files beside it."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.report import charts, words
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.making import making_section, mixed_commits
from attnbench.report.markup import Markup, element, embedded_json, join
from attnbench.report.sections import Chapter, anchor, chapters, evaluation_section, summary_section
from attnbench.results.files import replace_file
from attnbench.results.rows import TRAINING, write_csv
from attnbench.settings.errors import printable
from attnbench.settings.text import unlinked
from attnbench.verdict.ranking import families
from attnbench.verdict.seeds import Figure, figures, to_rows
from attnbench.verdict.summary import summary

HERE = Path(__file__).parent


def write_report(folder: Path, *, target: Path | None = None) -> Path:
    """Writes index.html, results.csv and figures/ of an experiment.

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
    summed = figures(inputs.rows, inputs.protocol.shared)
    ranked = families(summed, rank=inputs.protocol.rank, reference=inputs.protocol.reference)
    written = chapters(summed, ranked, inputs.protocol)
    variants = inputs.protocol.variants
    plots = {plot.name: plot for chapter in written for plot in chapter.plots}
    specs = {name: charts.specification(plot, variants) for name, plot in plots.items()}
    target = folder / "report" if target is None else target
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for name, spec in specs.items():
        svg = charts.to_svg(spec, plots[name])
        replace_file(target / "figures" / f"{name}.svg", svg)
        unlinked(target / "figures" / f"{name}.png").write_bytes(charts.to_png(svg))
    write_csv([*inputs.rows, *to_rows(summed)], target / "results.csv")
    places = {chapter.evaluation: anchor(index) for index, chapter in enumerate(written)}
    sections = [
        summary_section(inputs, summary(summed, ranked, variants), ranked, places),
        *(evaluation_section(chapter, index) for index, chapter in enumerate(written)),
        making_section(inputs, summed),
    ]
    replace_file(target / "index.html", _page(inputs, summed, written, sections, specs))
    return target / "index.html"


def _page(
    inputs: Inputs,
    summed: Sequence[Figure],
    written: Sequence[Chapter],
    sections: Sequence[Markup],
    specs: dict[str, dict[str, Any]],
) -> str:
    themes = {"light": charts.config(dark=False), "dark": charts.config(dark=True)}
    scripts = [charts.runtime(), (HERE / "page.js").read_text(encoding="utf-8")] if specs else []
    drawn = {"charts": specs, "themes": themes, "variants": [printable(name) for name in inputs.protocol.variants]}
    title = f"{inputs.protocol.plan}: attention variants compared"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup((HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = element(
        "body",
        element("a", "Skip to the answer", href="#answer", class_="skip"),
        element(
            "div", _navigation(written), element("main", _masthead(inputs, summed), *sections, _footer()), class_="page"
        ),
        embedded_json(drawn, "charts") if specs else None,
        *(element("script", Markup(script)) for script in scripts),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _policy(scripts: Sequence[str]) -> str:
    """Only these very scripts may run, and nothing may be loaded; Vega compiles its own expressions."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join([*(f"'sha256-{value}'" for value in hashes), "'unsafe-eval'"])
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def _navigation(written: Sequence[Chapter]) -> Markup:
    links = {"answer": "The answer", **{anchor(i): chapter.title for i, chapter in enumerate(written)}}
    links["making"] = "How it was made"
    items = (element("li", element("a", title, href=f"#{target}")) for target, title in links.items())
    return element("nav", element("ul", *items), aria_label="Sections")


def _masthead(inputs: Inputs, summed: Sequence[Figure]) -> Markup:
    identities = [row.identity for row in inputs.rows]
    num_seeds = max(len(figure.values) for figure in summed)
    evaluations = {identity.evaluation for identity in identities} - {TRAINING}
    facts = [
        _counted(len(inputs.protocol.variants), "variant"),
        *([_counted(len(evaluations), "evaluation")] if evaluations else []),
        f"up to {_counted(num_seeds, 'seed')}" if num_seeds > 1 else "1 seed",
        words.listed(dict.fromkeys(identity.device for identity in identities)),
    ]
    commits = mixed_commits(inputs)
    warning = "Mixed commits: its numbers come from several versions of the source, see How it was made."
    return element(
        "header",
        element("p", "attnbench report", class_="eyebrow"),
        element("h1", inputs.protocol.plan),
        element("p", join((element("span", fact) for fact in facts), " "), class_="facts"),
        element("p", warning, class_="callout") if commits else None,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _footer() -> Markup:
    return element(
        "footer",
        element(
            "p",
            "Beside this page: ",
            element("code", "results.csv"),
            " with every row and every figure over seeds, and ",
            element("code", "figures/"),
            " with the plots as SVG and PNG.",
        ),
    )
