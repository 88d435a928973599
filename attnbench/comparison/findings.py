"""Findings: plans with a published claim. Each is carried out as a plan, then decided and written."""

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
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
from attnbench.results.rows import ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.escape import without_paths
from attnbench.settings.schema import ComparisonSettings
from attnbench.verdict.claims import NOT_RUN, Decision, decide

log = logging.getLogger(__name__)

DECISIONS = "findings.json"
"""Words and figures, in outputs/findings."""


def run_findings(settings: Sequence[ComparisonSettings], compose: Compose) -> Path:
    """Decide findings, print a line each, and write findings.json and the page; return their folder. The settings of
    the findings differ only in the plan."""
    first = settings[0]
    folder = Path(first.outputs_dir)
    if first.exported is not None:
        _export(folder, Path(first.exported), [one.plan.name for one in settings])
        return folder
    carried = [_carried(one) for one in settings]
    if first.imported is not None and not any(carried):
        names = ", ".join(one.plan.name for one in settings)
        raise UserError(f"import={first.imported}: has the runs of none of these findings: {names}")
    ready = [_ready(one, compose) for one in settings]
    obstacles = [it for it in ready if isinstance(it, Decision)]
    if len(obstacles) == len(ready):
        raise UserError(f"{obstacles[0].plan.name}: {obstacles[0].reason}")
    decisions, rows = [], []
    for comparison, imported in zip(ready, carried, strict=True):
        decision, of_finding = comparison, []
        if isinstance(comparison, Comparison):
            with nullcontext() if first.plan.dry_run else holding(comparison.folder, waits=False):
                if first.freeze:
                    log.info(f"frozen: {freeze(comparison)}")
                    continue
                decision, of_finding = _carry_out(comparison, imported, compose)
        if isinstance(decision, Decision):
            decisions.append(decision)
            rows += of_finding
            print(decision.line, flush=True)
    if decisions and not (first.freeze or first.plan.dry_run):
        _write(folder, first, decisions, rows)
    return folder


def _ready(settings: ComparisonSettings, compose: Compose) -> Comparison | Decision:
    """Resolve the plan of a finding, or say why it cannot run here."""
    claim, device = settings.plan.claim, resolve_device(settings.device).type
    assert claim is not None
    not_run = Decision(plan=settings.plan, word=NOT_RUN)
    if claim.needs:
        return replace(not_run, reason=f"needs {', '.join(claim.needs)}")
    if device not in claim.minutes:
        return replace(not_run, reason=f"device={device}: too slow to decide it; it takes {' or '.join(claim.minutes)}")
    try:
        return Comparison(settings, compose)
    except UserError as error:
        return replace(not_run, reason=str(error))


def _carried(settings: ComparisonSettings) -> Path | None:
    path = Path(settings.imported or "") / settings.plan.name / CELLS
    return path if settings.imported is not None and path.exists() else None


def _carry_out(
    comparison: Comparison, imported: Path | None, compose: Compose
) -> tuple[Decision | None, list[ResultRow]]:
    """A dry run decides nothing."""
    plan = comparison.plan
    if imported is not None:
        import_for(comparison.settings, compose, imported)
    files = run_plan(comparison, is_frozen=check_frozen(comparison))
    if plan.dry_run:
        return None, []
    rows = [row for path in files for row in read_results(path)]
    if comparison.failures:
        name, reason = next(iter(comparison.failures.items()))
        again = f"{name}: {reason}; the same command tries it again"
        return Decision(plan=plan, word=NOT_RUN, reason=again), rows
    return decide(plan, comparison.controls, rows, comparison.samples), rows


def _export(folder: Path, target: Path, names: Sequence[str]) -> None:
    found = {name: folder.glob(f"{name}/**/results/*.jsonl") for name in names}
    written = {name: target / name / CELLS for name, paths in found.items() if any(paths)}
    if not written:
        raise UserError(f"export={target}: none of these findings has results in {folder}: {', '.join(names)}")
    for name, path in written.items():
        log.info(f"{export_cells(folder / name, path)} results written to {path}")


def _write(
    folder: Path, settings: ComparisonSettings, decisions: Sequence[Decision], rows: Sequence[ResultRow]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": without_paths(settings.command), "findings": list(map(described_decision, decisions))}
    replace_file(folder / DECISIONS, json.dumps(content, indent=1) + "\n")
    if settings.report:
        from attnbench.report.findings_page import write_findings

        page = write_findings(decisions, rows, target=folder, command=settings.command)
        log.info(f"report, for a browser: {page}")


def described_decision(decision: Decision) -> dict[str, Any]:
    return {
        "name": decision.plan.name,
        "statement": decision.claim.statement,
        "source": decision.claim.source,
        "tier": decision.claim.tier,
        "word": decision.word,
        "reason": decision.reason,
        "controls": [asdict(it) for it in decision.controls],
        "scores": dict(decision.scores),
        "contrasts": [
            {"figure": it.label, **asdict(it.found), "adjusted_p_value": it.adjusted, "text": it.text}
            for it in decision.tested
        ],
    }
