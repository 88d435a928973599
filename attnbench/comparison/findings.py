"""Findings: each is run as a plan, then decided and written."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product, starmap
from pathlib import Path
from typing import Any

from attnbench.comparison.compare import run_plan
from attnbench.comparison.freeze import check_frozen, freeze
from attnbench.comparison.imports import import_for
from attnbench.comparison.plan import Comparison
from attnbench.comparison.transfer import CELLS, export_cells
from attnbench.comparison.variants import Compose
from attnbench.machine.device import resolve_device
from attnbench.results.files import replace_file
from attnbench.results.folder import holding
from attnbench.results.row_files import read_results
from attnbench.results.rows import TRAINING, ResultRow
from attnbench.settings.combinations import check_plan
from attnbench.settings.errors import UserError
from attnbench.settings.escape import without_paths
from attnbench.settings.finding import FindingSettings, FindingsSettings
from attnbench.settings.schema import ComparisonSettings, LoggerSettings, PlanSettings
from attnbench.verdict.bounds import NOT_RUN
from attnbench.verdict.claims import Decision, decide, variant_at

log = logging.getLogger(__name__)

TABLE = "findings"
"""Name under which docs/results/SEEDS books the seeds of all findings, and of their folder under outputs/."""

FINDINGS = "findings.json"
"""Verdicts and figures, in that folder."""


def run_findings(settings: FindingsSettings, findings: Sequence[FindingSettings], compose: Compose) -> Path:
    """Decide findings, print a line each, and write findings.json and the page; return their folder.

    Raises:
        UserError: a named finding cannot run here, or was changed after it was frozen; or an import or export fails.
    """
    folder = Path(settings.outputs_dir) / TABLE
    if settings.exported is not None:
        _export(folder, Path(settings.exported), [finding.name for finding in findings])
        return folder
    imported = {finding.name: _carried(settings, finding) for finding in findings}
    if settings.imported is not None and not any(imported.values()):
        raise UserError(f"import={settings.imported}: has the runs of none of these findings: {', '.join(imported)}")
    ready = {finding.name: _ready(settings, finding, compose) for finding in findings}
    obstacles = {name: it for name, it in ready.items() if isinstance(it, str)}
    if settings.names and obstacles:
        name, reason = next(iter(obstacles.items()))
        raise UserError(f"{name}: {reason}")
    decisions, rows = [], []
    for finding in findings:
        comparison = ready[finding.name]
        if isinstance(comparison, str):
            decisions.append(Decision(finding=finding, verdict=NOT_RUN, reason=comparison))
        elif settings.freeze:
            log.info(f"frozen: {freeze(comparison, table=TABLE, claim=claim_of(finding))}")
            continue
        else:
            decision, of_finding = _carry_out(comparison, finding, settings, imported[finding.name], compose)
            decisions.append(decision)
            rows += of_finding
        print(decisions[-1].line, flush=True)
    if not settings.freeze:
        _write(folder, settings, decisions, rows)
    return folder


def plan_of(settings: FindingsSettings, finding: FindingSettings) -> ComparisonSettings:
    """Return a finding as settings of attnbench compare: each variant at its rates, nothing ranked."""
    words = {
        variant_at(name, rates, finding): [*variant.words, *starmap(_rate_word, rates.items())]
        for name, variant in finding.variants.items()
        for rates in _combined(variant.rates or {})
    }
    plan = PlanSettings(
        name=finding.name,
        overrides=finding.overrides,
        variants=words,
        evaluations=finding.evaluations,
        seeds=settings.seeds,
        probe_seeds=settings.seeds,
        learning_rates=None,
        rank=[],
        num_workers=settings.num_workers,
        devices=settings.devices,
        stack=settings.stack,
    )
    check_plan(plan)
    return ComparisonSettings(
        plan=plan,
        logger=LoggerSettings(mode="none"),
        outputs_dir=str(Path(settings.outputs_dir) / TABLE),
        device=settings.device,
        rerun=settings.rerun,
        report=False,
        exported=None,
        imported=None,
        command=settings.command,
    )


def _combined(rates: Mapping[str, Sequence[float]]) -> Iterator[dict[str, float]]:
    """Yield each choice of one rate for every name."""
    return (dict(zip(rates, chosen, strict=True)) for chosen in product(*rates.values())) if rates else iter(())


def _rate_word(name: str, rate: float) -> str:
    return f"train.learning_rate={rate!r}" if name == TRAINING else f"eval.{name}.learning_rates=[{rate!r}]"


def claim_of(finding: FindingSettings) -> dict[str, Any]:
    """Return the frozen settings of a finding: all but its duration."""
    return {name: value for name, value in asdict(finding).items() if name != "minutes"}


def _ready(settings: FindingsSettings, finding: FindingSettings, compose: Compose) -> Comparison | str:
    device = resolve_device(settings.device).type
    if finding.needs:
        return f"needs {', '.join(finding.needs)}"
    if device not in finding.minutes:
        return f"device={device}: too slow to decide it; it takes {' or '.join(finding.minutes)}"
    unsearched = [name for name, variant in finding.variants.items() if variant.rates is None]
    if unsearched:
        return f"no learning rate was searched for {', '.join(unsearched)} yet"
    try:
        comparison = Comparison(plan_of(settings, finding), compose)
    except UserError as error:
        return str(error)
    known = {
        variant_at(name, rates, finding): rates
        for name, it in finding.variants.items()
        for rates in _combined(it.rates or {})
    }
    unsearched = [score.name for score in comparison.scores if score.evaluation not in known[score.variant]]
    if unsearched:
        return f"no learning rate was searched for {', '.join(unsearched)} yet"
    return "; ".join(f"{name}: {reason}" for name, reason in comparison.failures.items()) or comparison


def _carried(settings: FindingsSettings, finding: FindingSettings) -> Path | None:
    path = Path(settings.imported or "") / finding.name / CELLS
    return path if settings.imported is not None and path.exists() else None


def _carry_out(
    comparison: Comparison,
    finding: FindingSettings,
    settings: FindingsSettings,
    imported: Path | None,
    compose: Compose,
) -> tuple[Decision, list[ResultRow]]:
    with holding(comparison.folder, waits=False):
        if imported is not None:
            import_for(comparison.settings, compose, imported, claim_of(finding))
        files = run_plan(comparison, is_frozen=check_frozen(comparison, claim=claim_of(finding)))
    rows = [row for path in files for row in read_results(path)]
    if comparison.failures:
        name, reason = next(iter(comparison.failures.items()))
        again = f"{name}: {reason}; the same command tries it again"
        return Decision(finding=finding, verdict=NOT_RUN, reason=again), rows
    return decide(finding, rows, settings.seeds), rows


def _export(folder: Path, target: Path, names: Sequence[str]) -> None:
    found = {name: folder.glob(f"{name}/**/results/*.jsonl") for name in names}
    written = {name: target / name / CELLS for name, paths in found.items() if any(paths)}
    if not written:
        raise UserError(f"export={target}: none of these findings has results in {folder}: {', '.join(names)}")
    for name, path in written.items():
        log.info(f"{export_cells(folder / name, path)} results written to {path}")


def _write(folder: Path, settings: FindingsSettings, decisions: Sequence[Decision], rows: Sequence[ResultRow]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "command": without_paths(settings.command),
        "seeds": settings.seeds,
        "findings": list(map(described_decision, decisions)),
    }
    replace_file(folder / FINDINGS, json.dumps(content, indent=1) + "\n")
    if settings.report:
        from attnbench.report.findings_page import write_findings

        page = write_findings(decisions, rows, target=folder, command=settings.command)
        log.info(f"report, for a browser: {page}")


def described_decision(decision: Decision) -> dict[str, Any]:
    """Describe a decision as findings.json has it."""
    finding = decision.finding
    return {
        "name": finding.name,
        "statement": finding.statement,
        "source": finding.source,
        "setting": finding.setting,
        "other_answer": decision.other_answer,
        "verdict": decision.verdict,
        "reason": decision.reason,
        "contrasts": [
            {"figure": it.label.removesuffix(":"), **asdict(it.estimate), "asked": it.asked, "verdict": it.verdict,
             "seeds_needed": it.seeds_needed, "text": it.text}
            for it in decision.tested
        ],
    }  # fmt: skip
