"""Check a comparison against its freeze.json."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from attnbench.results.protocol import PROTOCOL, rules
from attnbench.results.rows import IMPORTED, ResultRow, is_search
from attnbench.verdict.axes import grouped
from attnbench.verdict.rates import Choice

MAX_NAMED = 3
"""Variants without some seeds that a sentence names; the others are counted."""

NOT_FROZEN = "Not pre-registered: seeds, pairs and rules were not written down before the scores."


def frozen_sentence(
    freeze: Mapping[str, Any] | None,
    rows: Iterable[ResultRow],
    *,
    family: Collection[tuple[str, str, str]],
    protocols: Mapping[str, Mapping[str, Any]],
    first_scored: str | None,
    num_without_start: int = 0,
    committed: tuple[str, str] | None = None,
    rates: Iterable[Choice] = (),
) -> str:
    """State whether a comparison was frozen before its first score, and name deviations.

    Args:
        freeze: content of freeze.json, or None. Another format raises KeyError, TypeError or ValueError.
        rows: of all scored seeds, with the control's.
        protocols: rules of the latest run by evaluation; see `results.protocol`.
        first_scored: start of the first scored or timed run; None: unknown.
        committed: first commit with this freeze.json, and its date.
    """
    scored = [row for row in rows if not is_search(row.identity.seed)]
    measured = grouped(scored, lambda row: row.identity.evaluation)
    if freeze is None:
        others = _other_rules(measured, {name: str(entry.get("id")) for name, entry in protocols.items()})
        return " ".join([NOT_FROZEN, *(f"{fault[0].upper()}{fault[1:]}." for fault in others)])
    then = {str(name): str(entry["id"]) for name, entry in freeze["protocols"].items()}
    # Only these are scored at every seed of the plan.
    tested = [name for name, entry in freeze["protocols"].items() if entry["primary"] is not None]
    seeds = {*freeze["seeds"], *freeze["probe_seeds"], *freeze["control_seeds"]}
    more = sorted({row.identity.seed for name in tested for row in measured.get(name, [])} - seeds)
    pairs = {(entry["evaluation"], entry["first"], entry["second"]) for entry in freeze["family"]}
    changed = {
        name
        for entry in freeze["protocols"].values()
        for name, rule in rules((entry["primary"] or {}).get("kind")).items()
        if entry["rules"].get(name) != rule
    }
    faults = [
        _order(str(freeze["frozen"]), committed, first_scored),
        f"{num_without_start} results do not say when they were begun" if num_without_start else "",
        f"{_counted_seeds(more)} {'was' if len(more) == 1 else 'were'} scored and not frozen" if more else "",
        f"{len({*family} ^ pairs)} pairs of its family were changed" if {*family} != pairs else "",
        *_without_scores(freeze, measured),
        _searched_otherwise(freeze, rates),
        *_other_rules(measured, then),
        f"the rules of verdicts have changed since in {', '.join(sorted(changed))}" if changed else "",
    ]
    faults = [fault for fault in faults if fault]
    in_git = (
        f"freeze.json in git since {committed[0]}"
        if committed is not None
        else "freeze.json in no commit that is known here"
    )
    where = f"Frozen on {freeze['frozen']} at commit {freeze['commit'] or 'unknown'} ({in_git})"
    return f"{where}, but {'; '.join(faults)}." if faults else f"{where}, before the first score."


def imported_cells(rows: Iterable[ResultRow]) -> dict[str, Any]:
    """Count runs, imported runs, and imported runs by mark; empty if none was imported."""
    marks: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        identity = row.identity
        given = row.measurement.settings.get(IMPORTED)
        marks[identity.run, identity.config_hash] = given if isinstance(given, list) else []
    imported = [given for given in marks.values() if given]
    counts = Counter(json.dumps(mark, sort_keys=True) for given in imported for mark in given)
    files = [{"cells": number, **mark} for text, number in counts.items() if isinstance(mark := json.loads(text), dict)]
    return {"cells": len(imported), "of": len(marks), "files": files} if imported else {}


def imported_sentence(rows: Iterable[ResultRow]) -> str:
    found = imported_cells(rows)
    if not found:
        return ""
    files = [
        f"{it['cells']} on {it.get('when')} from the file of sha256 {str(it.get('sha256'))[:12]}"
        for it in found["files"]
    ]
    return f"Imported, not measured here: {found['cells']} of {found['of']} results, {'; '.join(files)}."


def _order(frozen: str, committed: tuple[str, str] | None, first_scored: str | None) -> str:
    if first_scored is None:
        return "no run says when it was scored"
    if datetime.fromisoformat(first_scored) < datetime.fromisoformat(frozen):
        return f"its first score is of {first_scored}, before that"
    if committed is not None and datetime.fromisoformat(first_scored) < datetime.fromisoformat(committed[1]):
        return f"it was committed on {committed[1]}, after its first score of {first_scored}"
    return ""


def _searched_otherwise(freeze: Mapping[str, Any], rates: Iterable[Choice]) -> str:
    """Describe language models with another search of rates than the frozen one. In files without `rates_in_full`, a
    search trains two rates in full."""
    others = [rate for rate in rates if len(rate.scores) > 2 and rate.after_an_epoch]
    if "rates_in_full" in freeze or not others:
        return ""
    return (
        f"the rates of {len(others)} language models were chosen with the neighbours of the best trained in full, "
        "where two rates were frozen"
    )


def _without_scores(freeze: Mapping[str, Any], measured: Mapping[str, Sequence[ResultRow]]) -> list[str]:
    """Name the variants of the family that lack scores at some frozen seeds: lost rows would change a verdict
    silently."""

    def has_cells(evaluation: str) -> bool:  # Cells of language models are labelled `training`.
        return any(cell["label"].startswith(f"{evaluation} ") for cell in freeze["cells"])

    probes = {evaluation for evaluation in measured if has_cells(evaluation)}
    sides = ("first", "second")
    members = {(pair["evaluation"], pair[which]): pair["metric"] for pair in freeze["family"] for which in sides}
    faults = []
    for (evaluation, variant), metric in members.items():
        frozen = {*freeze["probe_seeds" if evaluation in probes else "seeds"]}
        scored = {
            row.identity.seed
            for row in measured.get(evaluation, [])
            if (row.identity.variant, row.measurement.metric) == (variant, metric)
        }
        missing = sorted(frozen - scored) if frozen & scored else []
        if missing:
            faults.append(f"{variant} has no score of {evaluation} at {_counted_seeds(missing)}")
    more = len(faults) - MAX_NAMED
    return faults if more <= 0 else [*faults[:MAX_NAMED], f"{more} more lack seeds that were frozen"]


def _counted_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _other_rules(measured: Mapping[str, Sequence[ResultRow]], ids: Mapping[str, str]) -> list[str]:
    faults = []
    for evaluation, group in measured.items():
        others = {str(row.measurement.settings.get(PROTOCOL)) for row in group} - {ids.get(evaluation)}
        if others and evaluation in ids:
            named = "rows that name none" if others == {"None"} else f"protocol {', '.join(sorted(others))}"
            faults.append(f"{evaluation} was scored under other rules ({named}; now {ids[evaluation]})")
    return faults
