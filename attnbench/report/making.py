"""The section that says how the numbers were made: budgets, learning rates, environments, and what went wrong."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.report import words
from attnbench.report.inputs import Inputs, Rate
from attnbench.report.markup import Markup, TableCell, element, join, table
from attnbench.results.rows import SELECTION_SEED
from attnbench.verdict.seeds import Figure

BUDGETS = ("parameters", "forward_flops_per_token", "state_bytes")


def making_section(inputs: Inputs, figures: Sequence[Figure]) -> Markup:
    """Protocol, budgets achieved, learning rates, failures, environments."""
    parts = {
        "Protocol": [_protocol(inputs)],
        "Budgets achieved": _budgets(figures),
        "Learning rates": _rates(inputs),
        "What has no number": _failures(inputs, figures),
        "What is missing": _missing(inputs),
        "Environments": _environments(inputs),
    }
    content = [part for title, found in parts.items() if found for part in (element("h3", title), *found)]
    return element(
        "section", element("h2", "How it was made", id="making"), *content, class_="making", aria_labelledby="making"
    )


def mixed_commits(inputs: Inputs) -> list[str]:
    """The commits that the rows come from, if several."""
    commits = list(dict.fromkeys(row.identity.commit for row in inputs.rows))
    return commits if len(commits) > 1 else []


def _protocol(inputs: Inputs) -> Markup:
    protocol, identities = inputs.protocol, [row.identity for row in inputs.rows]
    seeds = {seed for seed in (identity.seed for identity in identities) if seed != SELECTION_SEED}
    facts = {
        "Plan": protocol.plan,
        "Command": element("code", protocol.command) if protocol.command else None,
        "Variants": words.listed(protocol.variants),
        "Seeds": words.listed(map(str, sorted(seeds, key=str))),
        "Corpus": words.listed(dict.fromkeys(i.corpus for i in identities if i.corpus is not None)),
        "Precision": words.listed(dict.fromkeys(identity.precision for identity in identities)),
        "Device": words.listed(dict.fromkeys(identity.device for identity in identities)),
        "Commit": words.listed(dict.fromkeys(identity.commit for identity in identities)),
        "Started": protocol.started,
        "Took": f"{words.shown_value(protocol.seconds)} s" if protocol.seconds is not None else None,
    }
    return _facts(facts)


def _budgets(figures: Sequence[Figure]) -> list[Markup]:
    """Parameters, forward FLOPs a token and state bytes of every model that was trained or built."""
    places: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    backends: dict[tuple[str, str], str] = {}
    for figure in figures:
        key = (figure.evaluation, words.place(figure.settings))
        metrics = {figure.metric: figure.mean} if figure.metric in BUDGETS else {}
        # What a checkpoint evaluation reads is the training's model, which has its own line.
        if figure.parameters is not None and figure.metric == "forward_flops_per_token":
            metrics = {"parameters": float(figure.parameters), **metrics}
        for metric, mean in metrics.items():
            if mean is not None:
                places.setdefault(key, {}).setdefault(figure.label, {})[metric] = mean
                backends[key[0], figure.label] = figure.backend
    # Models that are alike at several settings have one line for all of them.
    alike: dict[str, tuple[str, list[str], dict[str, dict[str, float]]]] = {}
    for (evaluation, where), variants in places.items():
        if any("forward_flops_per_token" in found for found in variants.values()):
            alike.setdefault(json.dumps([evaluation, variants]), (evaluation, [], variants))[1].append(where)
    lines = []
    for evaluation, where, variants in alike.values():
        first = next(iter(variants.values()))
        task = _model(evaluation, where[0] if len(where) == 1 else f"{len(where)} settings")
        for variant, found in variants.items():
            cells = [_budget(found.get(metric), first.get(metric)) for metric in BUDGETS]
            lines.append([variant, backends[evaluation, variant], task, *cells])
    if not lines:
        return []
    headers = ["Variant", "Backend", "Model of", "Parameters", "Forward FLOPs a token", "State bytes a sequence"]
    note = (
        f"Percentages are differences from {lines[0][0]}’s model of the same task. Models are matched by the width "
        "of their feed-forward: where a task’s models have none, as recall’s, they differ by what their mixers need."
    )
    return [table("Budgets achieved", headers, lines, num_labels=3), element("p", note, class_="note")]


def _model(evaluation: str, where: str) -> str:
    return f"{evaluation}, {where}" if where else evaluation


def _budget(value: float | None, first: float | None) -> Any:
    if value is None:
        return "–"
    text = element("span", words.shown_value(round(value)), class_="value")
    difference = f"{100 * (value / first - 1):+.2f}" if first else ""
    return text if float(difference or 0) == 0 else join([text, element("small", f"{difference} %")])


def _rates(inputs: Inputs) -> list[Markup]:
    """How each rate was chosen: from the comparison's record, or else what the rows name."""
    if inputs.protocol.rates:
        note = (
            "Under each rate stands what it reached on the validation data of a seed that is not scored afterwards: an "
            "accuracy for probes, nats per character (lower is better) for language models. A best rate at the edge of "
            "its grid, near which none inside comes, may not be the best there is."
        )
        return [_recorded_rates(inputs.protocol.rates), element("p", note, class_="note")]
    lines = _rates_of_rows(inputs)
    return [table("Learning rates used", ["Variant", "Task", "Remark", "Rate"], lines, num_labels=3)] if lines else []


def _recorded_rates(rates: Sequence[Rate]) -> Markup:
    """A column a rate, so that scores of one rate stand below each other."""
    grid = sorted({value for rate in rates for value in (*rate.grid, *([rate.chosen] if rate.chosen else []))})
    lines = []
    for rate in rates:
        source = rate.taken_from if isinstance(rate.taken_from, str) else words.place(rate.taken_from or {})
        task = _model(rate.evaluation, words.place(rate.settings))
        scores = {float(name): score for name, score in rate.scores.items()}
        cells = [_score(value, scores, rate) for value in grid]
        lines.append([rate.variant, task, _remark(rate.at_edge, source), *cells])
    headers = ["Variant", "Task", "Remark", *(f"{value:g}" for value in grid)]
    return table("Learning rates chosen", headers, lines, num_labels=3)


def _score(value: float, scores: dict[float, float | None], rate: Rate) -> object:
    """The selection score of one rate of the grid, marked where it was chosen; empty outside the grid."""
    score = scores.get(value)
    text = words.shown_value(score) if score is not None else "–" if value in rate.grid else ""
    if value != rate.chosen:
        return text
    return TableCell(content=join([element("span", text, class_="value"), element("small", "chosen")]), kind="best")


def _remark(at_edge: bool, source: str) -> object:
    if source:
        return f"rate of {source}"
    return TableCell(content="at the edge of its grid", kind="warn") if at_edge else "–"


def _rates_of_rows(inputs: Inputs) -> list[list[object]]:
    found: dict[str, list[object]] = {}
    for row in inputs.rows:
        settings, identity = row.measurement.settings, row.identity
        if settings.get("learning_rate") is None or identity.seed == SELECTION_SEED:
            continue
        source = settings.get("rate_from")
        source = words.place(source) if isinstance(source, dict) else str(source or "")
        rate = f"{settings['learning_rate']:g}"
        line = [identity.variant, identity.evaluation, _remark(bool(settings.get("rate_at_edge")), source), rate]
        found.setdefault(json.dumps([identity.variant, identity.evaluation, rate, source]), line)
    return list(found.values())


def _failures(inputs: Inputs, figures: Sequence[Figure]) -> list[Markup]:
    """Everything that was tried and has no number, with its reason."""
    groups: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        if any(status != "ok" for status in figure.statuses):
            status = next(status for status in figure.statuses if status != "ok")
            key = (figure.label, figure.evaluation, words.place(figure.settings), status, figure.reason)
            groups.setdefault(key, []).append(figure)
    lines: list[list[object]] = [
        [
            variant,
            _model(evaluation, where),
            words.listed(words.metric_name(f.metric) for f in own),
            _status(status),
            words.without_addresses(reason),
        ]
        for (variant, evaluation, where, status, reason), own in groups.items()
    ]
    lines += [
        [entry.get("cell", "–"), "–", "all", _status("failed"), entry.get("reason", "")]
        for entry in inputs.protocol.failures
    ]
    lines += [[name, "–", "its last rows", _status("cut off"), "the file lacks its end"] for name in inputs.incomplete]
    if not lines:
        return [element("p", "Nothing: every measurement that was begun has a number.")]
    return [table("What has no number, and why", ["Variant", "Where", "What", "Status", "Reason"], lines, num_labels=5)]


def _missing(inputs: Inputs) -> list[Markup]:
    """Cells of the plan that are still to be run."""
    if not inputs.protocol.missing:
        return []
    text = f"{len(inputs.protocol.missing)} cells of the plan are not done; the same command goes on with them."
    items = (element("li", label) for label in inputs.protocol.missing)
    return [element("p", text), element("details", element("summary", "Which"), element("ul", *items))]


def _status(status: str) -> TableCell:
    cross = element("span", "×", class_="cross", aria_hidden="true")
    return TableCell(content=Markup(cross + " " + element("span", words.status_name(status))), kind="lost")


def _environments(inputs: Inputs) -> list[Markup]:
    """What all environments share, and a table of what differs."""
    stamps = {name: stamp for name, stamp in inputs.environments.items() if stamp is not None}
    unknown = [name for name, stamp in inputs.environments.items() if stamp is None]
    parts = []
    commits = mixed_commits(inputs)
    if commits:
        text = f"These numbers come from {len(commits)} commits: {words.listed(commits)}."
        parts.append(element("p", element("strong", "Mixed commits. "), text, class_="callout"))
    if stamps:
        names = list(dict.fromkeys(name for stamp in stamps.values() for name in stamp))
        shared = [name for name in names if len({json.dumps(stamp.get(name)) for stamp in stamps.values()}) == 1]
        first = next(iter(stamps.values()))
        parts.append(_facts({name: _shown(first[name]) for name in shared}))
        differing = [
            [name, *(_shown(stamp.get(name)) for stamp in stamps.values())] for name in names if name not in shared
        ]
        if differing:
            headers = ["What differs", *stamps]
            parts.append(table("What differs between the environments", headers, differing, num_labels=len(headers)))
            parts.append(_by_environment(inputs, stamps))
    if unknown:
        parts.append(element("p", f"No file holds the environment {words.listed(unknown)}.", class_="note"))
    return parts


def _by_environment(inputs: Inputs, names: Iterable[str]) -> Markup:
    lines = []
    for name in names:
        own = [row.identity for row in inputs.rows if row.identity.environment == name]
        measured: dict[str, list[str]] = {}
        for identity in own:
            measured.setdefault(identity.evaluation, []).append(identity.variant)
        what = "; ".join(
            f"{evaluation}: {words.listed(dict.fromkeys(variants))}" for evaluation, variants in measured.items()
        )
        lines.append([name, what, len(own)])
    return table(
        "Which rows come from which environment", ["Environment", "Measured there", "Rows"], lines, num_labels=2
    )


def _shown(value: Any) -> str:
    return {None: "–", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _facts(facts: dict[str, Any]) -> Markup:
    pairs = [(name, value) for name, value in facts.items() if value]
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))
