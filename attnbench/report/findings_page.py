"""The page of findings: each claim with its source, its figures, their limits and its verdict."""

import math
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
from attnbench.verdict.bounds import FAIL, NOT_RUN, PASS, UNDECIDED
from attnbench.verdict.claims import Decision, Tested

WIDEST = 4.0
"""End of the axis if a bound is infinite, in multiples of the largest finite number."""

LABEL_WIDTH = 44

VERDICTS = (
    "PASS: the bound lies on the stated side of its limit. FAIL: the opposite bound excludes it, which is as good a "
    "result. UNDECIDED: neither. Of several figures all must pass. Bounds are one-sided 95 %."
)

LEGEND = "a line from the lower to the upper bound, each one-sided 95 %; the upright tick is the limit"


def write_findings(decisions: Sequence[Decision], rows: Sequence[ResultRow], *, target: Path, command: str) -> Path:
    write_csv(rows, target / "results.csv")
    devices = [words.devices(row.identity.device for row in rows)] if rows else []
    counts = {verdict: sum(it.verdict == verdict for it in decisions) for verdict in (PASS, FAIL, UNDECIDED, NOT_RUN)}
    return write_sections(
        [_answer(decisions), *map(_section, decisions)],
        target=target,
        title="Findings",
        variants=[],
        facts=[*(f"{count} {verdict}" for verdict, count in counts.items() if count), *devices],
        command=command,
    )


def _answer(decisions: Sequence[Decision]) -> Section:
    lines = [
        [it.finding.name, it.finding.statement, it.finding.source,
         TableCell(text=it.verdict, mark="lost" if it.verdict == FAIL else "")]
        for it in decisions
    ]  # fmt: skip
    headers = ["Finding", "Claim", "Source", "Verdict"]
    table = Table(title="Claims and verdicts", headers=headers, lines=lines, num_labels=len(headers))
    return Section(title="The answer", blocks=[table, Note(VERDICTS)])


def _section(decision: Decision) -> Section:
    finding = decision.finding
    facts = {"Source": words.without_addresses(finding.source), "Setting": finding.setting, "Verdict": decision.verdict}
    blocks: list[Block] = [Note(f"{finding.statement}.", kind=""), facts]
    if decision.tested:
        blocks += [Pictures([finding_picture(decision)]), Lines({"Figures": [it.text for it in decision.tested]})]
    else:
        blocks.append(Note(f"Not run: {decision.reason}."))
    answer, sentence = decision.other_answer
    return Section(title=finding.name, blocks=[*blocks, Note(f"{sentence}.", heading=f"For {answer}: ")])


def finding_picture(decision: Decision) -> Picture:
    values = [datum for it in decision.tested for datum in _data(it)]
    description = "; ".join(it.text for it in decision.tested)
    name = f"finding-{decision.finding.name}"
    spec = draw_bounds(values, description)
    return Picture(name=name, title=decision.finding.name, spec=spec, description=description, legend=LEGEND)


def _data(tested: Tested) -> list[Datum]:
    estimate, label = tested.estimate, LINE_END.join(wrap(tested.label.removesuffix(":"), LABEL_WIDTH))
    limits = [limit for limit in tested.limits if math.isfinite(limit)]
    end = WIDEST * max(estimate.value, estimate.low, *limits)
    figure = {"variant": label, "value": estimate.value, "low": estimate.low, "high": min(estimate.high, end)}
    return [{**figure, "text": tested.text}, *({"variant": label, "limit": limit} for limit in limits)]
