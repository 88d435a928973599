"""The HTML page and the files beside it."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from attnbench.report.blocks import Block, Lines, Note, Picture, Pictures, Scores, Section
from attnbench.report.charts import style
from attnbench.report.charts import vega as charts
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.sections import words
from attnbench.report.sections.answer import answer
from attnbench.report.sections.corpus_table import corpora_section
from attnbench.report.sections.differences import difference_section
from attnbench.report.sections.effects import effect_section
from attnbench.report.sections.evaluations import (
    evaluation_sections,
    position_section,
    sittings_note,
    summary_notes,
)
from attnbench.report.sections.learning import curve_section, rate_section, sample_section
from attnbench.report.sections.making import making_parts, mixed_commits
from attnbench.report.sections.tradeoffs import tradeoffs
from attnbench.report.template import render
from attnbench.results.corpora import as_measured, split_name
from attnbench.results.files import replace_file
from attnbench.results.row_tables import write_csv
from attnbench.results.rows import TRAINING
from attnbench.settings.paths import unlinked
from attnbench.verdict.control import control_sentence
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.seeds import Figure, to_rows
from attnbench.verdict.summary import summary

HERE = Path(__file__).parent
MIXED_COMMITS = "Mixed commits: these numbers come from several versions of the source; see How it was made."


def write_report(folder: Path, *, target: Path | None = None, inputs: Inputs | None = None) -> Path:
    """Write index.html, results.csv and figures/ of an experiment or run; return the path of index.html.

    `inputs` are those of `folder`, if already read.
    """
    inputs = read_inputs(folder) if inputs is None else inputs
    target = folder / "report" if target is None else target
    return write_page(inputs, inputs.verdicts, [Lines(answer(inputs)), *_checks(inputs)], target=target)


def _checks(inputs: Inputs) -> list[Block]:
    texts = control_sentence(inputs.control_verdicts), inputs.frozen, inputs.imported
    mixed = [Note(MIXED_COMMITS, kind="callout")] if mixed_commits(inputs) else []
    return [*mixed, *(Note(text) for text in texts if text)]


def write_page(inputs: Inputs, verdicts: Sequence[Verdict], answer: Sequence[Block], *, target: Path) -> Path:
    """Write the page of these verdicts, with `answer` first.

    The page is self-contained: it loads nothing, contains no network address, and its policy forbids requests.
    """
    style.begin_runtime()
    protocol, variants, over_seeds = inputs.protocol, inputs.protocol.variants, inputs.figures
    sections = page_sections(inputs, verdicts, answer)
    write_csv(as_measured([*inputs.rows, *inputs.control, *to_rows(over_seeds)]), target / "results.csv")
    return write_sections(
        sections,
        target=target,
        title=protocol.plan,
        variants=variants,
        facts=_facts(inputs, over_seeds),
        command=protocol.command,
    )


def page_sections(inputs: Inputs, verdicts: Sequence[Verdict], answer: Sequence[Block] = ()) -> list[Section]:
    """Return the sections of the page, in order; `answer` is the first."""
    protocol, variants = inputs.protocol, inputs.protocol.variants
    over_seeds, known = inputs.figures, inputs.primaries
    scores = Scores(summary(over_seeds, verdicts, variants))
    sections = [
        Section(title="The answer", blocks=answer),
        Section(title="All scores", blocks=[*sittings_note(scores.content.lead), scores, *summary_notes(protocol)]),
        difference_section(verdicts),
        corpora_section(verdicts),
        effect_section(inputs),
        tradeoffs(inputs.rows, over_seeds, known, variants),
        rate_section(protocol.rates, known, variants),
        curve_section(inputs, over_seeds, known, variants),
        position_section(over_seeds, variants),
        sample_section(inputs),
        *evaluation_sections(over_seeds, verdicts, protocol, variants),
        Section(title="How it was made", blocks=[], parts=making_parts(inputs, over_seeds)),
    ]
    return list(filter(None, sections))


def write_sections(
    sections: Sequence[Section], *, target: Path, title: str, variants: Sequence[str], facts: list[str], command: str
) -> Path:
    shown = {f"section-{index}": section for index, section in enumerate(sections)}
    pictures = pictures_of(sections)
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        svg, path = style.to_svg(picture, variants), target / "figures" / f"{picture.name}.svg"
        png = path.with_suffix(".png")
        # Written before its svg. The pixels take longer than all else of a picture.
        if not png.is_file() or not _holds(path, svg):
            unlinked(png).write_bytes(style.to_png(svg))
            replace_file(path, svg)
    scripts = [style.runtime(), (HERE / "page.js").read_text(encoding="utf-8")] if pictures else []
    page = render(
        plan=title,
        policy=_policy(scripts),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        data={
            "charts": {picture.name: picture.spec for picture in pictures},
            "themes": {"light": style.config(dark=False), "dark": style.config(dark=True)},
            "variants": charts.with_printable_text(list(variants)),
        },
        facts=facts,
        sections=shown,
        anchors={section.evaluation: id for id, section in shown.items() if section.evaluation},
        command=command,
    )
    replace_file(target / "index.html", page)
    return target / "index.html"


def pictures_of(sections: Sequence[Section]) -> list[Picture]:
    blocks = [block for section in sections for block in section.blocks]
    return [picture for block in blocks if isinstance(block, Pictures) for picture in block.shown]


def _holds(path: Path, text: str) -> bool:
    content = text.encode()
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy that allows only these scripts and loads nothing; Vega compiles its own expressions."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join([*(f"'sha256-{value}'" for value in hashes), "'unsafe-eval'"])
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def _facts(inputs: Inputs, over_seeds: Sequence[Figure]) -> list[str]:
    identities = [row.identity for row in inputs.rows]
    num_seeds = max(len(figure.values) for figure in over_seeds)
    evaluations = {split_name(identity.evaluation)[0] for identity in identities} - {TRAINING}
    return [
        _counted(len(inputs.protocol.variants), "variant"),
        *([_counted(len(evaluations), "evaluation")] if evaluations else []),
        *([f"{len(inputs.protocol.corpora.names)} corpora"] if inputs.protocol.corpora is not None else []),
        f"up to {_counted(num_seeds, 'seed')}" if num_seeds > 1 else "1 seed",
        words.devices(identity.device for identity in identities),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
