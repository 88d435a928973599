"""Published pages of comparisons, of findings and of trainings, in docs/results/<table>-<machine>/.

The page of a comparison also has comparison.json and cells.jsonl.gz, from which attnbench report writes the report
again. The page of findings has a folder for each finding with freeze.json and cells.jsonl.gz.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.comparison.findings import DECISIONS, described_decision
from attnbench.comparison.freeze import FREEZE
from attnbench.comparison.transfer import CELLS, export_cells
from attnbench.report.blocks import Note, Picture, Pictures
from attnbench.report.charts import style
from attnbench.report.findings_page import facts_of, finding_picture, findings_table, legend
from attnbench.report.inputs import Inputs, read_inputs
from attnbench.report.sections import words
from attnbench.report.sections.answer import sentences
from attnbench.report.sections.differences import difference_section
from attnbench.report.sections.effects import factorial_tables
from attnbench.report.sections.scores import summary_table
from attnbench.report.sections.tradeoffs import tradeoffs
from attnbench.results.corpora import as_measured
from attnbench.results.page import bullets, listed_values, made_by, write_page
from attnbench.results.tables import Table
from attnbench.settings.errors import UserError
from attnbench.settings.escape import markdown_text, without_paths
from attnbench.settings.schema import PlanSettings
from attnbench.settings.untrusted import read_object
from attnbench.verdict.claims import NOT_RUN, ControlScores, Decision, decide
from attnbench.verdict.factorial import Factorial
from attnbench.verdict.summary import summary

READING = (
    "Brackets are the intervals of the tests. A lead in accuracy is of 100 pairs or symbols; one in perplexity is in "
    "percent of the loser's. Between two of which neither is better a difference is the first one's less the second's. "
    "Where all seeds of both solve a task, or none, the difference is of such seeds, and nothing tests how often a "
    "seed fails. Without a word on the margin the difference is real, and whether it is more than matters is open. "
    "[Protocol](../../protocol.md#verdicts) has the terms and the tests."
)
"""Paragraph of a comparison's page on its sentences."""


def publish_comparison(experiment: Path, target: Path, *, title: str, note: str = "") -> None:
    """Write the page of a comparison: its measurements so far, and what is missing.

    Args:
        experiment: outputs/<plan>, with its comparison.json.
        note: what a reader must know besides; a paragraph of its own.
    """
    path = experiment / "comparison.json"
    if not path.exists():
        raise UserError(f"{path}: is not there; attnbench compare writes it")
    inputs = read_inputs(experiment)
    pictures = _pictures(inputs)
    record = read_object(path)
    freeze = experiment / FREEZE
    frozen = {FREEZE: json.dumps(without_paths(read_object(freeze)), indent=1) + "\n"} if freeze.exists() else {}
    # The rows stand in results.csv.gz here.
    record.pop("files", None)
    write_page(
        target,
        title=title,
        parts=_comparison_parts(inputs, pictures, note),
        rows=as_measured([*inputs.rows, *inputs.control]),
        environments={name: stamp for name, stamp in inputs.environments.items() if stamp is not None},
        files={
            "comparison.json": json.dumps(without_paths(record), indent=1) + "\n",
            **frozen,
            **{
                f"{it.name}.svg": style.to_svg(it, inputs.protocol.variants)
                for it in pictures
                if isinstance(it, Picture)
            },
        },
        is_packed=True,
    )
    export_cells(experiment, target / CELLS)


def publish_findings(folder: Path, target: Path, known: Sequence[PlanSettings], *, title: str, note: str = "") -> None:
    """Write the page of findings: the table, picture, figures and word of each, and the runs of those that ran.

    Claims come from `known`, figures and words from the runs. findings.json only supplies names, the command, and why a
    finding did not run.

    Args:
        folder: outputs/findings, with its findings.json.
        known: the findings of conf/finding.
        note: what a reader must know besides; a paragraph of its own.
    """
    record, by_name = _findings_record(folder / DECISIONS), {plan.name: plan for plan in known}
    for name in record["findings"]:
        if name not in by_name:
            raise UserError(f"{folder / DECISIONS}: {name} is no finding of conf/finding, and has no page")
    decisions, inputs = [], {}
    for name, reason in record["findings"].items():
        decision, found = _decided(by_name[name], folder / name, reason)
        decisions.append(decision)
        if found is not None:
            inputs[name] = found
    rows = [row for it in inputs.values() for row in it.rows]
    if all(it.word == NOT_RUN for it in decisions):
        raise UserError(f"{folder}: no finding was run to its end; there is nothing to publish")
    devices = markdown_text(words.devices(row.identity.device for row in rows))
    content = {"command": record["command"], "findings": list(map(described_decision, decisions))}
    files = {DECISIONS: json.dumps(without_paths(content), indent=1) + "\n"}
    for decision in decisions:
        name = decision.plan.name
        if decision.tested:
            files[f"{name}/finding-{name}.svg"] = style.to_svg(finding_picture(decision), [])
        if decision.word != NOT_RUN:
            export_cells(folder / name, target / name / CELLS)
            if (freeze := folder / name / FREEZE).exists():
                files[f"{name}/{FREEZE}"] = json.dumps(without_paths(read_object(freeze)), indent=1) + "\n"
    write_page(
        target,
        title=title,
        parts=[
            findings_table(decisions),
            legend(decisions),
            note,
            *(part for it in decisions for part in _finding_parts(it, inputs.get(it.plan.name))),
            made_by(
                [record["command"]],
                f"on {devices}, at commit {listed_values(rows, 'commit')}. results.csv.gz has every row, findings.json "
                "every figure; in a folder a finding, freeze.json is what was written down before a score, and "
                "cells.jsonl.gz has its runs.",
            ),
        ],
        rows=rows,
        environments={
            name: stamp for it in inputs.values() for name, stamp in it.environments.items() if stamp is not None
        },
        files=files,
        is_packed=True,
    )


def _findings_record(path: Path) -> dict[str, Any]:
    record = read_object(path)
    try:
        reasons = {str(it["name"]): str(it["reason"]) for it in record["findings"]}
        return {"command": str(record["command"]), "findings": reasons}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not what attnbench findings writes ({type(error).__name__} {error})") from None


def _decided(plan: PlanSettings, folder: Path, reason: str) -> tuple[Decision, Inputs | None]:
    """Decide a finding by its runs; without inputs where it was not scored."""
    path = folder / "comparison.json"
    record = read_object(path) if path.exists() else {}
    if not record or record["failures"]:
        return Decision(plan=plan, word=NOT_RUN, reason=reason), None
    controls = [ControlScores(**it) for it in record.get("controls", [])]
    inputs = read_inputs(folder) if record["files"] else None
    return decide(plan, controls, inputs.rows if inputs is not None else [], record["samples"]), inputs


def _finding_parts(decision: Decision, inputs: Inputs | None) -> list[str]:
    name, texts = decision.plan.name, [it.text for it in decision.tested]
    facts = [f"{fact}: {it}" for fact, it in facts_of(decision).items()]
    return [
        f"## {name}: {decision.word}",
        markdown_text(f"{decision.claim.statement}."),
        bullets(facts),
        *([markdown_text(inputs.frozen), markdown_text(inputs.imported)] if inputs is not None else []),
        f"![{markdown_text('; '.join(texts))}]({name}/finding-{name}.svg)" if texts else "",
        bullets(texts) if texts else "",
        *(["The scores that they compare:", bullets(decision.score_texts)] if texts else []),
    ]


def _pictures(inputs: Inputs) -> list[Note | Picture]:
    """Choose the report's pictures of differences from the reference and of scores against costs, with their notes."""
    protocol = inputs.protocol
    if protocol.factors:
        return []
    chosen: list[Note | Picture] = []
    for section in (
        difference_section(inputs.verdicts, protocol.variants),
        tradeoffs(inputs.rows, inputs.figures, inputs.primaries, protocol.variants),
    ):
        blocks = section.blocks if section is not None else []
        drawn = [picture for block in blocks if isinstance(block, Pictures) for picture in block.shown]
        chosen += [*(block for block in blocks if isinstance(block, Note) and drawn), *drawn]
    return chosen


def _comparison_parts(inputs: Inputs, pictures: Sequence[Note | Picture], note: str) -> list[str | Table]:
    """The answer comes first, then how sure it is, then the numbers."""
    protocol, verdicts = inputs.protocol, inputs.verdicts
    devices = markdown_text(words.devices(row.identity.device for row in inputs.rows))
    commits, corpora = (listed_values(inputs.rows, name) for name in ("commit", "corpus"))
    corpus = f", corpus `{corpora}`" if corpora else ""
    return [
        bullets(sentences(inputs)),
        READING if verdicts else "",
        markdown_text(inputs.frozen),
        markdown_text(inputs.imported),
        note,
        *_comparison_tables(inputs),
        *map(_drawn, pictures),
        *(["The verdicts in full:", bullets(list(map(words.verdict_sentence, verdicts)))] if verdicts else []),
        made_by(
            [protocol.command],
            f"on {devices}{corpus}, at commit {commits}. "
            "results.csv.gz has every row, comparison.json the learning rates and how they "
            "were chosen, environment-*.json the machines. `attnbench report` on this folder makes the page "
            "with all plots, and `attnbench compare ... import=cells.jsonl.gz` continues from these runs.",
        ),
        *_runs_of_plan("Failed", [f"{entry['cell']}: {entry['reason']}" for entry in protocol.failures]),
        *_runs_of_plan("Not run yet", protocol.missing),
    ]


def _drawn(part: Note | Picture) -> str:
    if isinstance(part, Note):
        return markdown_text(part.text)
    return f"![{markdown_text(f'{part.title}; {part.legend}')}]({part.name}.svg)"


def _comparison_tables(inputs: Inputs) -> list[str | Table]:
    """Make the table of all variants; of a factorial, whose variants are corners, those of its effects and corners."""
    protocol = inputs.protocol
    if protocol.factors:
        factorial = Factorial.of(protocol.variants, protocol.factors)
        return [*factorial_tables(factorial, inputs.figures, inputs.primaries)]
    return [
        summary_table(summary(inputs.figures, inputs.verdicts, protocol.variants), with_intervals=True),
        "Brackets are Student's 95 % intervals over seeds, with a single seed those of its rows, over blocks of text "
        "or authors; for timings the 20th and 80th percentile. Behind accuracies stand the lowest and the highest "
        "seed, and how many seeds solve the task. Bold is better than every other variant.",
    ]


def _runs_of_plan(what: str, labels: Sequence[Any]) -> list[str]:
    return [f"{what}, of the plan's runs:", bullets(list(map(str, labels)))] if labels else []
