"""The page of findings: a table of claims, figures and words, and a section for each with its picture."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from attnbench.report.blocks import Block, Lines, Note, Picture, Pictures, Section
from attnbench.report.charts.marks import Datum
from attnbench.report.charts.vega import LINE_END, draw_bounds
from attnbench.report.page import write_sections
from attnbench.report.sections import words
from attnbench.results.row_tables import write_csv
from attnbench.results.rows import ResultRow
from attnbench.results.tables import Table, TableCell
from attnbench.verdict.claims import CONTRADICTED, NOT_REPRODUCED, WORDS, Decision, Tested

LABEL_WIDTH = 44

LEGEND = "the two-sided 95 % interval; an upright tick is a value to compare with"


def write_findings(decisions: Sequence[Decision], rows: Sequence[ResultRow], *, target: Path, command: str) -> Path:
    write_csv(rows, target / "results.csv")
    devices = [words.devices(row.identity.device for row in rows)] if rows else []
    counts = Counter(it.word for it in decisions)
    return write_sections(
        [
            Section(title="The answer", blocks=[findings_table(decisions), Note(legend(decisions))]),
            *map(_section, decisions),
        ],
        target=target,
        title="Findings",
        variants=[],
        facts=[*(f"{counts[word]} {word}" for word in WORDS if word in counts), *devices],
        command=command,
    )


def findings_table(decisions: Sequence[Decision]) -> Table:
    headers = ["finding", "word", "claim", "published", "ours", "source", "tier", "training samples, source", "ours",
               "minutes", "command"]  # fmt: skip
    return Table(title="", headers=headers, lines=[_line(it) for it in decisions], num_labels=len(headers))


def legend(decisions: Sequence[Decision]) -> str:
    """Explain the words of a table."""
    shown = {it.word for it in decisions}
    return "Brackets are two-sided 95 % intervals. " + " ".join(
        f"{word[0].upper()}{word[1:]}: {meaning}." for word, meaning in WORDS.items() if word in shown
    )


def _line(decision: Decision) -> list[str | TableCell]:
    claim, name = decision.claim, decision.plan.name
    minutes = ", ".join(f"{device} {'?' if it is None else f'{it:g}'}" for device, it in claim.minutes.items())
    samples = [f"{number:,}" if number is not None else "" for number in (claim.source_samples, decision.samples)]
    mark = "lost" if decision.word in (NOT_REPRODUCED, CONTRADICTED) else ""
    tested = zip(claim.contrasts, decision.tested, strict=False)
    ours = "; ".join(f"{' less '.join(contrast.variants)} {it.short}" for contrast, it in tested)
    return [name, TableCell(text=decision.word, mark=mark), claim.statement, claim.published, ours, claim.source,
            claim.tier, *samples, minutes, f"attnbench findings {name}"]  # fmt: skip


def facts_of(decision: Decision) -> dict[str, str]:
    """Describe the setting and the answer."""
    claim = decision.claim
    facts = {
        "Source": words.without_addresses(claim.source),
        "Tier": claim.tier,
        "Differences": "; ".join(claim.differences) or "device and seeds",
        "Published": claim.published,
        "Controls": "; ".join(it.text for it in decision.controls),
        "Answer": f"{decision.word}: {decision.reason}",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _section(decision: Decision) -> Section:
    blocks: list[Block] = [Note(f"{decision.claim.statement}.", kind=""), facts_of(decision)]
    if decision.tested:
        blocks += [
            Pictures([finding_picture(decision)]),
            Lines({"Figures": [it.text for it in decision.tested], "Scores": decision.score_texts}),
        ]
    return Section(title=decision.plan.name, blocks=blocks)


def finding_picture(decision: Decision) -> Picture:
    description, name = "; ".join(it.text for it in decision.tested), decision.plan.name
    spec = draw_bounds([datum for it in decision.tested for datum in _data(it)], description)
    return Picture(name=f"finding-{name}", title=name, spec=spec, description=description, legend=LEGEND)


def _data(tested: Tested) -> list[Datum]:
    found, label = tested.found, LINE_END.join(wrap(tested.label, LABEL_WIDTH))
    figure = {"variant": label, "value": found.value, "low": found.low, "high": found.high, "text": tested.text}
    return [figure, *({"variant": label, "limit": limit} for limit in tested.limits)]
