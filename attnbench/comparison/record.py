"""comparison.json: the plan and its choices, which the report reads beside the rows."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from attnbench.comparison.freeze import described_protocols
from attnbench.comparison.plan import Comparison
from attnbench.report.inputs import purpose_of
from attnbench.report.sections.examples import example_lines
from attnbench.results.corpora import units_of
from attnbench.results.files import replace_file
from attnbench.results.job import Job
from attnbench.results.row_files import started_at
from attnbench.results.rows import TRAINING
from attnbench.settings.escape import without_paths
from attnbench.settings.untrusted import read_object
from attnbench.training.job import Run, corpus_label
from attnbench.verdict.frozen import imported_cells


def write_record(comparison: Comparison, started: datetime, seconds: float, former: dict[str, Any]) -> None:
    """Write comparison.json.

    Args:
        started, seconds: of this sitting.
        former: record of former sittings, as `former_record` read it when this one began.
    """
    plan, shown = comparison.plan, comparison.shown()
    files = comparison.results_of(shown)
    content = {
        "plan": plan.name,
        "command": comparison.settings.command,
        "variants": list(plan.variants),
        "factors": list(plan.factors),
        "rank": plan.ranked,
        "tested": list(comparison.primaries()),
        "descriptive": comparison.descriptive(),
        "reference": plan.reference,
        "in_looks": plan.in_looks,
        "control_seeds": comparison.control_seeds(),
        "shared": comparison.shared_by_evaluation(),
        **({"corpora": asdict(comparison.corpora)} if comparison.corpora is not None else {}),
        "evaluations": _described(comparison),
        "protocols": described_protocols(comparison),
        **_beginnings(files),
        "imported": imported_cells(row for job in shown for row in comparison.rows_of(job)),
        "missing": _missing(comparison, shown),
        "sittings": _sittings(comparison, shown),
        "files": [str(path.relative_to(comparison.folder)) for path in files],
        **({"controls": [asdict(it) for it in comparison.controls]} if comparison.controls else {}),
        **({"samples": comparison.samples} if plan.claim is not None else {}),
        "rates": [asdict(choice) for choice in comparison.choices],
        "failures": [{"cell": label, "reason": reason} for label, reason in comparison.failures.items()],
        "trained": _trained(shown),
        "started": former.get("started", started.isoformat(timespec="seconds")),
        "seconds": round(seconds) + former.get("seconds", 0),
    }
    comparison.folder.mkdir(parents=True, exist_ok=True)
    replace_file(comparison.folder / "comparison.json", json.dumps(without_paths(content), indent=1) + "\n")


def _trained(jobs: Sequence[Job]) -> str:
    """Describe the schedule of the language models; empty without one, or if they differ."""
    runs = [job for job in jobs if isinstance(job, Run)]
    units = {units_of(corpus_label(run.corpus)) for run in runs}
    sizes = {(run.num_steps, run.settings.train.batch_size, run.settings.seq_len) for run in runs}
    if len(sizes) != 1 or len(units) != 1:
        return ""
    (num_steps, batch_size, length), (unit,) = sizes.pop(), units
    return f"{num_steps:,} steps of {batch_size} × {length:,} {unit}"


def former_record(comparison: Comparison) -> dict[str, Any]:
    """Read the record of former sittings; empty without one, or where all is run again."""
    path = comparison.folder / "comparison.json"
    is_anew = comparison.settings.rerun and comparison.settings.plan.only is None
    return {} if is_anew or not path.exists() else read_object(path)


def _missing(comparison: Comparison, shown: Sequence[Job]) -> list[str]:
    """List the unfinished runs of evaluations that are requested or have finished runs."""
    jobs = [(job, comparison.is_finished(job)) for job in (*comparison.in_order(comparison.searched), *shown)]
    begun = {job.evaluation for job, is_done in jobs if is_done}
    waiting = [*((job.evaluation, job.label) for job, is_done in jobs if not is_done), *comparison.undecided]
    return [label for group, label in waiting if group in begun or comparison.is_wanted(group)]


def _beginnings(files: Sequence[Path]) -> dict[str, Any]:
    """Return the start of the first of these results, and the number of results without a start."""
    moments = [started_at(path) for path in files]
    known = [moment for moment in moments if moment is not None]
    first = min(known).isoformat(timespec="seconds") if known else None
    return {"first_scored": first, "without_start": len(moments) - len(known)}


def _sittings(comparison: Comparison, jobs: Sequence[Job]) -> dict[str, str]:
    """Return the sitting of each timed run and training by config_hash; rows of a table do not have it."""
    rows = [row for job in jobs if job.is_timed or job.evaluation == TRAINING for row in comparison.rows_of(job)]
    return {row.identity.config_hash: row.sitting for row in rows if row.sitting}


def _described(comparison: Comparison) -> dict[str, Any]:
    primaries = comparison.primaries()
    return {
        name: {
            "purpose": purpose_of(cls),
            "example": example_lines(cls),
            "plots": [list(pair) for pair in cls.plots],
            "primary": asdict(primaries[name]) if name in primaries else None,
        }
        for name, cls in comparison.evaluations().items()
    }
