"""The HTML page and the files beside it."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from attnbench.report.blocks import Block, Lines, Note, Picture, Pictures, Scores, Section
from attnbench.report.charts import looks, style
from attnbench.report.charts import vega as charts
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.sections.answer import NOT_TESTED, answer
from attnbench.report.sections.corpus_table import corpora_section
from attnbench.report.sections.differences import difference_section
from attnbench.report.sections.effects import effect_section
from attnbench.report.sections.evaluations import evaluation_sections, summary_notes
from attnbench.report.sections.front import facts, front
from attnbench.report.sections.learning import curve_section, rate_section, sample_section
from attnbench.report.sections.making import making_parts, mixed_commits
from attnbench.report.sections.tradeoffs import tradeoffs
from attnbench.report.template import render
from attnbench.results.corpora import as_measured
from attnbench.results.files import replace_file
from attnbench.results.row_tables import write_csv
from attnbench.results.tables import to_latex, to_markdown
from attnbench.settings.paths import unlinked
from attnbench.verdict.control import control_sentence

HERE = Path(__file__).parent
ON_FIRST_SCREEN = (NOT_TESTED, "Seed by seed")
"""Parts of the answer that the first screen of a comparison without verdicts has in full."""
MIXED_COMMITS = "Mixed commits: these numbers come from several versions of the source; see How it was made."


def write_report(
    folder: Path, *, target: Path | None = None, inputs: Inputs | None = None, is_running: bool = False
) -> Path:
    """Write index.html, results.csv and figures/ of an experiment or run; return the path of index.html.

    The page is self-contained: it loads nothing, contains no network address, and its policy forbids requests.

    Args:
        inputs: those of `folder`, if already read.
        is_running: write index.html alone, which loads itself again.
    """
    inputs = read_inputs(folder) if inputs is None else inputs
    target = folder / "report" if target is None else target
    if not is_running:
        write_csv(as_measured([*inputs.rows, *inputs.control]), target / "results.csv")
    return write_sections(
        page_sections(inputs),
        target=target,
        title=inputs.protocol.plan,
        variants=inputs.protocol.variants,
        facts=facts(inputs),
        command=inputs.protocol.command,
        is_running=is_running,
    )


def page_sections(inputs: Inputs) -> list[Section]:
    protocol, variants = inputs.protocol, inputs.protocol.variants
    over_seeds, known, verdicts = inputs.figures, inputs.primaries, inputs.verdicts
    first = front(inputs, _checks(inputs))
    shown = {picture.name for picture in pictures_of([first])}
    effects = effect_section(inputs)
    full = Lines({term: [*said] for term, said in answer(inputs).items() if verdicts or term not in ON_FIRST_SCREEN})
    notes = summary_notes(protocol, over_seeds, verdicts)
    sections = [
        first,
        *([effects] if protocol.factors else []),
        *evaluation_sections(over_seeds, verdicts, protocol, variants),
        Section(title="The answer in full", blocks=[full, *notes]) if full.sentences else None,
        difference_section(verdicts, variants, without=shown),
        corpora_section(verdicts),
        *([] if protocol.factors else [effects]),
        tradeoffs(inputs.rows, over_seeds, known, variants, without=shown),
        rate_section(inputs, known, variants),
        curve_section(inputs, over_seeds, known, variants),
        sample_section(inputs),
        Section(title="How it was made", blocks=[], parts=making_parts(inputs, over_seeds)),
    ]
    return list(filter(None, sections))


def _checks(inputs: Inputs) -> list[Block]:
    texts = control_sentence(inputs.control_verdicts), inputs.frozen, inputs.imported
    mixed = [Note(MIXED_COMMITS, kind="callout")] if mixed_commits(inputs) else []
    return [*mixed, *(Note(text) for text in texts if text)]


def write_sections(
    sections: Sequence[Section],
    *,
    target: Path,
    title: str,
    variants: Sequence[str],
    facts: list[str],
    command: str,
    is_running: bool = False,
) -> Path:
    shown = {f"section-{index}": section for index, section in enumerate(sections)}
    pictures = pictures_of(sections)
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for picture in pictures if not is_running else ():
        path = target / "figures" / f"{picture.name}.svg"
        png, mark = path.with_suffix(".png"), f"<!-- {style.digest(picture, variants)} -->"
        # Drawing takes longer than all else of a page. The svg, written last, names what it was drawn from.
        if not png.is_file() or not _ends_in(path, mark):
            svg = style.to_svg(picture, variants)
            unlinked(png).write_bytes(style.to_png(svg))
            replace_file(path, f"{svg}{mark}\n")
    scripts = [*([style.runtime()] if pictures else []), (HERE / "page.js").read_text(encoding="utf-8")]
    page = render(
        plan=title,
        policy=_policy(scripts),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        data={
            "copies": _copies(sections),
            "charts": {picture.name: picture.spec for picture in pictures},
            "themes": {"light": style.config(dark=False), "dark": style.config(dark=True)},
            "onDark": dict(zip(looks.COLOURS, looks.COLOURS_ON_DARK, strict=True)),
            "colours": {name: look.colour for name, look in looks.looks(variants).items()},
            "variants": charts.with_printable_text(list(variants)),
        },
        facts=facts,
        sections=shown,
        anchors={section.evaluation: id for id, section in shown.items() if section.evaluation},
        command=command,
        is_running=is_running,
    )
    replace_file(target / "index.html", page)
    return target / "index.html"


def _copies(sections: Sequence[Section]) -> dict[str, str]:
    """Return the table of scores as its buttons copy it."""
    tables = [block.table for section in sections for block in section.blocks if isinstance(block, Scores)]
    return {"Markdown": to_markdown(tables[0]), "LaTeX": to_latex(tables[0])} if tables else {}


def pictures_of(sections: Sequence[Section]) -> list[Picture]:
    blocks = [block for section in sections for block in section.blocks]
    return [picture for block in blocks if isinstance(block, Pictures) for picture in block.shown]


def _ends_in(path: Path, mark: str) -> bool:
    return path.is_file() and path.read_bytes().rstrip().endswith(mark.encode())


def _policy(scripts: Sequence[str]) -> str:
    """Allow only these scripts and load nothing; Vega compiles its own expressions."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join([*(f"'sha256-{value}'" for value in hashes), "'unsafe-eval'"])
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
