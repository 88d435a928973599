"""The section on methods: budgets, environments, failures."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.report.blocks import Block, Folded, Note
from attnbench.report.charts.plots import BUDGETS
from attnbench.report.inputs import Inputs
from attnbench.report.sections import words
from attnbench.report.sections.surroundings import surroundings_table
from attnbench.results.rows import is_search
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.seeds import Figure

MODEL_SIZES = (*BUDGETS, "state_bytes")


def making_parts(inputs: Inputs, figures: Sequence[Figure]) -> dict[str, list[Block]]:
    parts = {
        "Protocol": [_protocol(inputs)],
        "Around the mixers": [table] if (table := surroundings_table(inputs.rows)) is not None else [],
        "Budgets achieved": _budgets(figures),
        "What has no number": _failures(inputs, figures),
        "What is missing": _missing(inputs),
        "Environments": _environments(inputs),
    }
    return {title: shown for title, shown in parts.items() if shown}


def mixed_commits(inputs: Inputs) -> list[str]:
    commits = list(dict.fromkeys(row.identity.commit for row in inputs.rows))
    return commits if len(commits) > 1 else []


def _protocol(inputs: Inputs) -> dict[str, str]:
    protocol, identities = inputs.protocol, [row.identity for row in inputs.rows]

    def listed(column: str) -> str:
        values = dict.fromkeys(getattr(identity, column) for identity in identities)
        return words.listed(str(value) for value in values if value is not None)

    seeds = {identity.seed for identity in identities if not is_search(identity.seed)}
    # The head of the page has the variants, the device and the time.
    facts = {
        "Seeds": words.listed(map(str, sorted(seeds, key=str))),
        **{name: listed(name.lower()) for name in ("Corpus", "Precision", "Commit")},
        "Started": protocol.started or "",
    }
    return {name: value for name, value in facts.items() if value}


def _budgets(figures: Sequence[Figure]) -> list[Block]:
    sizes: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    backends: dict[tuple[str, str], str] = {}
    for figure in figures:
        metrics = {figure.metric: figure.mean} if figure.metric in MODEL_SIZES else {}
        # The model of a checkpoint evaluation is that of its training, which has its own line.
        if figure.identity.parameters is not None and figure.metric == "forward_flops_per_token":
            metrics = {"parameters": float(figure.identity.parameters), **metrics}
        for metric, mean in metrics.items():
            if mean is not None:
                variants = sizes.setdefault((figure.evaluation, words.where(figure.settings)), {})
                variants.setdefault(figure.label, {})[metric] = mean
                backends[figure.evaluation, figure.label] = figure.identity.backend
    # Settings with equal models share a line.
    alike: dict[str, tuple[str, list[str], dict[str, dict[str, float]]]] = {}
    for (evaluation, where), variants in sizes.items():
        if any("forward_flops_per_token" in metrics for metrics in variants.values()):
            alike.setdefault(json.dumps([evaluation, variants]), (evaluation, [], variants))[1].append(where)
    lines = []
    for evaluation, where, variants in alike.values():
        first = next(iter(variants.values()))
        task = _model(evaluation, where[0] if len(where) == 1 else f"{len(where)} settings")
        for variant, metrics in variants.items():
            cells = [_budget(metrics.get(metric), first.get(metric)) for metric in MODEL_SIZES]
            lines.append([variant, backends[evaluation, variant], task, *cells])
    if not lines:
        return []
    headers = ["Variant", "Backend", "Model of", "Parameters", "Forward FLOPs a token", "State bytes a sequence"]
    note = (
        f"Percentages are differences from {lines[0][0]}’s model of the same task. Models are matched by the width of "
        "their feed-forward layers; models without these, such as recall’s, differ by the sizes of their mixers."
    )
    return [Table(title="Budgets achieved", headers=headers, lines=lines, num_labels=3), Note(note)]


def _model(evaluation: str, where: str) -> str:
    return f"{evaluation}, {where}" if where else evaluation


def _budget(value: float | None, first: float | None) -> TableCell:
    if value is None:
        return TableCell(text=NOTHING)
    difference = f"{100 * (value / first - 1):+.2f}" if first else "0"
    notes = (f"{difference} %",) if float(difference) else ()
    return TableCell(text=words.shown_value(round(value)), notes=notes)


def _failures(inputs: Inputs, figures: Sequence[Figure]) -> list[Block]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for figure in figures:
        # A threshold that was not reached stands in the tables of numbers.
        status = next((status for status in figure.statuses if status not in ("ok", "not_reached")), None)
        if status is not None:
            key = (figure.label, _model(figure.evaluation, words.where(figure.settings)), status, figure.reason)
            groups.setdefault(key, []).append(words.metric_name(figure.metric))
    lines = [
        (variant, where, words.listed(metrics), words.status_name(status), words.without_addresses(reason))
        for (variant, where, status, reason), metrics in groups.items()
    ]
    failures = inputs.protocol.failures
    lines += [(entry.get("cell", NOTHING), NOTHING, "all", "failed", entry.get("reason", "")) for entry in failures]
    if not lines:
        return []
    headers = ["Variant", "Where", "What", "Status", "Reason"]
    marked = [[*line[:3], TableCell(text=line[3], mark="lost"), line[4]] for line in lines]
    return [Table(title="What has no number, and why", headers=headers, lines=marked, num_labels=5)]


def _missing(inputs: Inputs) -> list[Block]:
    missing = inputs.protocol.missing
    if not missing:
        return []
    text = f"{len(missing)} runs of the plan are not finished; the same command continues with them."
    cells = Table(title="Runs not done", headers=["Run"], lines=[[label] for label in missing])
    return [Note(text, kind=""), Folded("Which", "", cells)]


def _environments(inputs: Inputs) -> list[Block]:
    stamps = {name: stamp for name, stamp in inputs.environments.items() if stamp is not None}
    unknown = [name for name, stamp in inputs.environments.items() if stamp is None]
    parts: list[Block] = []
    commits = mixed_commits(inputs)
    if commits:
        text = f"These numbers come from {len(commits)} commits: {words.listed(commits)}."
        parts.append(Note(text, kind="callout", heading="Mixed commits. "))
    if stamps:
        names = list(dict.fromkeys(name for stamp in stamps.values() for name in stamp))
        values = {name: [stamp.get(name) for stamp in stamps.values()] for name in names}
        shared = [name for name in names if len(set(map(json.dumps, values[name]))) == 1]
        parts.append({name: _shown(values[name][0]) for name in shared})
        differing = [[name, *map(_shown, values[name])] for name in names if name not in shared]
        if differing:
            headers = ["What differs", *stamps]
            title = "What differs between the environments"
            parts.append(Table(title=title, headers=headers, lines=differing, num_labels=len(headers)))
            parts.append(_by_environment(inputs, stamps))
    if unknown:
        parts.append(Note(f"No file contains the environment {words.listed(unknown)}."))
    return parts


def _by_environment(inputs: Inputs, names: Iterable[str]) -> Table:
    lines = []
    for name in names:
        identities = [row.identity for row in inputs.rows if row.identity.environment == name]
        measured: dict[str, dict[str, None]] = {}
        for identity in identities:
            measured.setdefault(identity.evaluation, {})[identity.variant] = None
        what = "; ".join(f"{evaluation}: {words.listed(variants)}" for evaluation, variants in measured.items())
        lines.append([name, what, str(len(identities))])
    headers = ["Environment", "Measured there", "Rows"]
    return Table(title="Which rows come from which environment", headers=headers, lines=lines, num_labels=2)


def _shown(value: Any) -> str:
    return {None: NOTHING, True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
