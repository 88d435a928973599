"""Freezing of a plan: what it will measure and how it will be judged, in freeze.json before its first score."""

import json
import logging
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.comparison.plan import Comparison
from attnbench.comparison.search import RATES_IN_FULL
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import source_commit
from attnbench.results.files import replace_file
from attnbench.results.folder import ROOT
from attnbench.results.protocol import protocol_id
from attnbench.results.rows import TRAINING, is_search
from attnbench.results.seed_blocks import check_blocks, outside_blocks, read_blocks
from attnbench.settings.errors import UserError
from attnbench.settings.escape import without_paths
from attnbench.settings.schema import SELECTION_SEED
from attnbench.settings.untrusted import read_object
from attnbench.verdict.family import check_family

log = logging.getLogger(__name__)

FREEZE = "freeze.json"

BLOCKS = Path("docs/results/SEEDS")
"""Seeds booked by published tables; in a checkout only."""

MADE_BY = ("frozen", "commit", "dirty", "command")
"""Entries of freeze.json on its origin."""

BUDGETS = re.compile(r"\.budgets\.[^.]+$")
"""Path of the budgets of a preset's cells in the options of an evaluation."""

MISSING = object()

MAX_VALUE_CHARACTERS = 60
"""Longest value quoted in a message."""


def freeze(comparison: Comparison) -> Path:
    """Write freeze.json into the plan's folder; nothing is trained. Refused are a plan that is frozen already or has
    scores, seeds that are missing or booked by another table, and a test that could not become significant."""
    path = comparison.folder / FREEZE
    if path.exists():
        raise UserError(
            f"{path}: this plan was frozen on {read_object(path).get('frozen')}; run it without freeze=true, or freeze "
            "a plan of another name, with seeds of its own"
        )
    if comparison.plan.in_looks:
        raise UserError("plan.seeds=auto: the scores decide how many seeds there are; a frozen plan names its seeds")
    plan = comparison.plan
    for score in comparison.scores:
        if not comparison.plain_seeds_of(score) and score.variant not in plan.unscored:
            setting = "plan.seeds" if score.evaluation == TRAINING else "plan.probe_seeds"
            raise UserError(f"{setting}=[]: a plan that is frozen names the seeds of {score.evaluation}")
    check_blocks(plan.table, _scored_seeds(comparison), read_blocks(ROOT / BLOCKS))
    check_family(comparison.family(), comparison.primaries(), *comparison.seeds_by_evaluation())
    scored = scored_folders(comparison.folder)
    if scored:
        raise UserError(
            f"{comparison.folder}: {len(scored)} runs were scored or timed before it was frozen, {scored[0].name} the "
            "first; freeze a plan of another name, with seeds of its own, or remove them"
        )
    commit, dirty = source_commit(ROOT)
    content = {
        "plan": plan.name,
        "command": comparison.settings.command,
        "frozen": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        **frozen_content(comparison),
    }
    comparison.folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(without_paths(content), indent=1) + "\n")
    return path


def unbooked_seeds(comparison: Comparison) -> list[int]:
    return outside_blocks(comparison.plan.table, _scored_seeds(comparison), read_blocks(ROOT / BLOCKS))


def _scored_seeds(comparison: Comparison) -> list[int]:
    return sorted({seed for score in comparison.scores for seed in comparison.seeds_of(score)})


def check_frozen(comparison: Comparison) -> bool:
    """Tell if the plan is frozen. A change since then is an error that names the first difference."""
    path = comparison.folder / FREEZE
    if not path.exists():
        return False
    content = read_object(path)
    difference = changed_since(comparison, content)
    if difference is not None:
        raise UserError(
            f"{path}: {difference}; a plan that was frozen runs as it was, and a changed one under another name with "
            "seeds of its own"
        )
    if "rates_in_full" not in content and "rates_in_full" in frozen_content(comparison):
        log.warning(
            f"{path}: this plan was frozen when a search of a language model's rate trained the best two in full; it "
            f"now trains {RATES_IN_FULL}, so that it may choose another rate, and the report says so"
        )
    return True


def changed_since(comparison: Comparison, frozen: dict[str, Any]) -> str | None:
    """Name the first difference from the content of a freeze.json."""
    then = {name: value for name, value in frozen.items() if name not in (*MADE_BY, "plan")}
    if not _trains_text(comparison):
        # Former files have num_steps even if no text is read; it depends on the length of the embedded text.
        for variant in then.get("variants", {}).values():
            variant.pop("num_steps", None)
    now = json.loads(json.dumps(frozen_content(comparison)))
    if "rates_in_full" not in then:
        now.pop("rates_in_full", None)
    then, now = without_paths(then), without_paths(now)
    _forgive_words(comparison, then, now)
    return _difference(then, now)


def frozen_content(comparison: Comparison) -> dict[str, Any]:
    """Describe everything that a frozen plan may not change."""
    plan, primaries = comparison.plan, comparison.primaries()
    pairs = [(evaluation, first, second, primaries[evaluation]) for evaluation, first, second in comparison.family()]
    return {
        "device": resolve_device(comparison.settings.device).type,
        "reference": plan.reference,
        "family": [
            {"evaluation": where, "first": first, "second": second, "metric": it.metric, "kind": it.kind,
             "margin": it.margin}
            for where, first, second, it in pairs
        ],
        "seeds": plan.seeds,
        "probe_seeds": plan.probe_seeds,
        "control_seeds": comparison.control_seeds(),
        "search_seeds": [SELECTION_SEED + index for index in range(plan.num_search_seeds)],
        "evaluations": plan.evaluations,
        "shared": comparison.shared_by_evaluation(),
        "variants": {name: _resolved(comparison, name) for name in comparison.variants},
        "rates": {score.name: list(score.grid) for score in comparison.scores},
        **({"rates_in_full": RATES_IN_FULL} if any(score.first_stage for score in comparison.scores) else {}),
        "protocols": described_protocols(comparison),
        "cells": [
            {"label": f"{score.name}, seed {seed}",
             "hashes": [job.config_hash for job in score.at(score.grid[0], seed, None).parts]}
            for score in comparison.scores
            for seed in comparison.seeds_of(score)
        ],
        "timed": [job.label for job in comparison.timed],
        **({"corpora": asdict(comparison.corpora)} if comparison.corpora is not None else {}),
        **({"claim": asdict(replace(plan.claim, minutes={}))} if plan.claim is not None else {}),
    }  # fmt: skip


def described_protocols(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Describe the present protocol of each evaluation, with its id."""
    return {name: {"id": protocol_id(content), **content} for name, content in comparison.protocols().items()}


def _trains_text(comparison: Comparison) -> bool:
    return any(score.evaluation == TRAINING for score in comparison.scores)


def _forgive_words(comparison: Comparison, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Accept other overrides of a variant if they resolve to the frozen options and runs."""
    if _difference(then.get("cells"), now["cells"]) is not None:
        return
    # `mixers` and `model` describe the language model, which a plan of probes does not train.
    has_text = _trains_text(comparison) or bool(comparison.timed)
    free = ("words",) if has_text else ("words", "mixers", "model")
    for name, variant in now.get("variants", {}).items():
        frozen, nothing = then.get("variants", {}).get(name), dict.fromkeys(free)
        if frozen is not None and _difference({**frozen, **nothing}, {**variant, **nothing}) is None:
            variant.update({entry: frozen.get(entry) for entry in free})


def _resolved(comparison: Comparison, name: str) -> dict[str, Any]:
    run = comparison.variants[name].run
    return {
        "words": comparison.plan.variants[name],
        "mixers": [{"target": mixer.target, **mixer.options} for mixer in run.mixers],
        "model": asdict(run.matched.model),
        **({"num_steps": run.num_steps} if _trains_text(comparison) else {}),
        "train": asdict(run.train),
        "match": run.settings.match,
        "evaluations": {entry.name: entry.options for entry in run.settings.evaluations},
    }


def scored_folders(folder: Path) -> list[Path]:
    """List the folders of scored or timed runs, finished or begun."""
    places = [f"{place}{name}" for place in ("*", "cells/*") for name in ("/config.yaml", "/results")]
    folders = {path.parent for place in places for path in folder.glob(place)}
    seeds = {path: re.search(r"-seed(\d+)-", path.name) for path in folders}
    return sorted(path for path, seed in seeds.items() if seed is None or not is_search(int(seed[1])))


def _difference(then: Any, now: Any) -> str | None:
    found = first_difference(then, now)
    if found is None:
        return None
    where, then, now = found
    if then is MISSING or now is MISSING:
        return f"{where} was {'not ' if then is MISSING else ''}there when it was frozen"
    return f"{where} was frozen as {shown_value(then)} and is {shown_value(now)} now"


def first_difference(then: Any, now: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Find the first entry in which two contents differ: its place and both values, MISSING for an absent one.

    A later or former setting that is null or false is no difference, as in `identity.config_hash`, nor is a budget of
    another cell.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*then, *now]):
            inside = f"{where}.{name}".lstrip(".")
            if name not in now or name not in then:
                value = now.get(name, then.get(name))
                if value is None or value is False or (name in now and BUDGETS.search(where)):
                    continue
                return inside, then.get(name, MISSING), now.get(name, MISSING)
            found = first_difference(then[name], now[name], inside)
            if found is not None:
                return found
        return None
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        inside = (
            first_difference(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(then, now, strict=True))
        )
        found = next(filter(None, inside), None)
        # The whole list says more than its first difference, unless it holds objects.
        if found is None or any(isinstance(item, dict | list) for item in then):
            return found
    return (where, then, now) if then != now else None


def shown_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."
