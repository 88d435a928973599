"""The page as a whole, and the files beside it."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from attnbench.report import charts, words
from attnbench.report.answer import answer
from attnbench.report.blocks import Heading, Note
from attnbench.report.inputs import Inputs, primaries, read_inputs
from attnbench.report.making import making_parts, mixed_commits
from attnbench.report.sections import Chapter, chapters, summary_notes
from attnbench.report.template import render
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
    write_csv([*inputs.rows, *inputs.control, *to_rows(over_seeds)], target / "results.csv")
    scripts = [charts.runtime(), (HERE / "page.js").read_text(encoding="utf-8")] if specs else []
    anchors = {chapter.evaluation: f"evaluation-{index}" for index, chapter in enumerate(shown)}
    page = render(
        plan=protocol.plan,
        policy=_policy(scripts),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        data={
            "charts": specs,
            "themes": {"light": charts.config(dark=False), "dark": charts.config(dark=True)},
            "variants": [printable(name) for name in protocol.variants],
        },
        headings=_headings(shown, anchors),
        facts=_facts(inputs, over_seeds),
        warning=Note(MIXED_COMMITS, kind="callout") if mixed_commits(inputs) else None,
        answer=answer(inputs.rows, over_seeds, verdicts),
        content=summary(over_seeds, verdicts, protocol.variants),
        anchors=anchors,
        notes=summary_notes(protocol),
        chapters=shown,
        command=protocol.command,
        making=making_parts(inputs, over_seeds),
    )
    replace_file(target / "index.html", page)
    return target / "index.html"


def _policy(scripts: Sequence[str]) -> str:
    """Let only these very scripts run, and nothing be loaded; Vega compiles its own expressions."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join([*(f"'sha256-{value}'" for value in hashes), "'unsafe-eval'"])
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def _headings(shown: Sequence[Chapter], anchors: Mapping[str, str]) -> list[Heading]:
    chapters = [Heading(id=anchors[chapter.evaluation], title=chapter.title) for chapter in shown]
    return [Heading(id="answer", title="The answer"), *chapters, Heading(id="making", title="How it was made")]


def _facts(inputs: Inputs, over_seeds: Sequence[Figure]) -> list[str]:
    """Count variants, evaluations and seeds, and name the devices."""
    identities = [row.identity for row in inputs.rows]
    num_seeds = max(len(figure.values) for figure in over_seeds)
    evaluations = {identity.evaluation for identity in identities} - {TRAINING}
    return [
        _counted(len(inputs.protocol.variants), "variant"),
        *([_counted(len(evaluations), "evaluation")] if evaluations else []),
        f"up to {_counted(num_seeds, 'seed')}" if num_seeds > 1 else "1 seed",
        words.listed(dict.fromkeys(identity.device for identity in identities)),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
