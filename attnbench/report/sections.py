"""The sections of the page that answer: the summary, and one for each evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.report import words
from attnbench.report.answer import verdict_lines
from attnbench.report.blocks import Folded, Note
from attnbench.report.inputs import Protocol, about
from attnbench.report.plots import Plot, plots_of
from attnbench.results.tables import NOTHING, Table, TableCell, format_interval
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.seeds import Figure, same_models
from attnbench.verdict.summary import Column, Entry, headline_columns

HOW_JUDGED = (
    "Verdicts are on the primary metric of each evaluation alone: pairs by seed, Student’s test for nats, a sign-flip "
    "permutation test for accuracies, Holm-adjusted over all pairs and metrics at 0.05. The interval of a difference "
    "is that of its test at its Holm level. Equivalent: two one-sided tests within the margin. All else is descriptive."
)
HOW_INTERVALS = (
    "Brackets behind scores are 95 % intervals over seeds, of accuracies Clopper and Pearson’s, of others Student’s; "
    "for a single process’s timings the 20th and 80th percentile, for an exponent of growth one standard error either "
    "way. A seed that diverged counts as chance."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One evaluation: its figures, the verdicts on them, and its plots."""

    evaluation: str
    figures: list[Figure]
    verdicts: list[Verdict]
    plots: list[Plot]
    purpose: str
    """One line, as the evaluation says it; empty where nobody knows."""

    @property
    def title(self) -> str:
        """The evaluation's name as a heading."""
        return words.heading(self.evaluation)

    def answer(self) -> dict[str, list[str]]:
        """Write the verdicts by what they say."""
        return verdict_lines(self.verdicts)

    def lead(self) -> str:
        """Write one sentence from the numbers of an evaluation without verdicts."""
        columns = headline_columns(self.figures, self.evaluation) if not self.verdicts else []
        return words.plain_answer(self.figures, columns[0]) if columns else ""

    def details(self) -> list[Folded]:
        """Make the tables of every number and of every pair that was compared."""
        numbers = _details(self.figures, is_open=not self.plots)
        return [*numbers, _comparisons(self.verdicts)] if self.verdicts else numbers


def chapters(figures: Sequence[Figure], verdicts: Sequence[Verdict], protocol: Protocol) -> list[Chapter]:
    """Make a chapter of each evaluation, in the order in which the figures name them."""
    by_evaluation: dict[str, list[Figure]] = {}
    for figure in figures:
        by_evaluation.setdefault(figure.evaluation, []).append(figure)
    described = {evaluation: about(evaluation, protocol) for evaluation in by_evaluation}
    return [
        Chapter(
            evaluation=evaluation,
            figures=group,
            verdicts=[verdict for verdict in verdicts if verdict.pair.evaluation == evaluation],
            plots=plots_of(group, described[evaluation].plots),
            purpose=described[evaluation].purpose,
        )
        for evaluation, group in by_evaluation.items()
    ]


def summary_notes(protocol: Protocol) -> list[Note]:
    """Say how verdicts and intervals came about, and who is shown without being ranked."""
    texts = [f"{HOW_JUDGED} {HOW_INTERVALS}", _not_ranked(protocol)]
    return [Note(text) for text in texts if text]


def anchor(index: int) -> str:
    """Name the id of an evaluation's heading: a number, because names are the user's."""
    return f"evaluation-{index}"


def score_name(column: Column) -> str:
    """Write the metric of a score as it begins a line."""
    return words.capitalized(words.metric_name(column.metric, column.unit))


def score_place(column: Column) -> str:
    """Write the settings of a score that its name does not say."""
    skipped = ("split", "checkpoint", "chance")
    return words.where({name: value for name, value in column.settings.items() if name not in skipped})


def entry_cell(entry: Entry) -> TableCell:
    """Write a score with its interval, what its variant went without, and the verdict on it."""
    figure = entry.figure
    if figure is None:
        return TableCell(text=entry.text)
    is_lost = figure.mean is None
    spread = "" if is_lost else format_interval(figure.low, figure.high)
    outcome = "" if entry.verdict is None else _outcome(entry.verdict)
    mark = "best" if entry.is_best else "lost" if is_lost else ""
    return TableCell(text=entry.text, notes=(spread, figure.without, outcome), mark=mark)


def _outcome(verdict: Verdict) -> str:
    """Write the verdict on a score in a word or two: "better than softmax"."""
    if verdict.winner is not None:
        return f"{verdict.outcome} than {verdict.pair.second}"
    return (
        f"equivalent to {verdict.pair.second}" if verdict.is_equivalent else "undecided" * (verdict.outcome != "none")
    )


def _details(figures: Sequence[Figure], *, is_open: bool) -> list[Folded]:
    """Write every number: a table for each metric with several settings, and one for all that have a single one."""
    metrics: dict[str, dict[str, dict[str, Figure]]] = {}
    for figure in figures:
        metrics.setdefault(figure.metric, {}).setdefault(_place(figure), {})[figure.label] = figure
    names = {figure.metric: words.capitalized(words.metric_name(figure.metric, figure.unit)) for figure in figures}
    several = {metric: lines for metric, lines in metrics.items() if len(lines) > 1}
    parts = [
        _numbers(names[metric], "Setting", lines, f"{len(lines)} settings", is_open=is_open)
        for metric, lines in several.items()
    ]
    single = {
        names[metric] + (f", {where}" if where != NOTHING else ""): by_variant
        for metric, lines in metrics.items()
        if metric not in several
        for where, by_variant in lines.items()
    }
    if single:
        title = "Single numbers" if several else "Numbers"
        parts.append(_numbers(title, "Metric", single, f"{len(single)} metrics", is_open=is_open))
    return parts


def _numbers(title: str, header: str, lines: dict[str, dict[str, Figure]], count: str, *, is_open: bool) -> Folded:
    """Write a table that opens: a line a setting, a column a variant."""
    variants = list(dict.fromkeys(variant for by_variant in lines.values() for variant in by_variant))
    body = [[name, *(_value(by_variant.get(variant)) for variant in variants)] for name, by_variant in lines.items()]
    table = Table(title=title, headers=[header, *variants], lines=body)
    return Folded(title, count, table, is_open)


def _place(figure: Figure) -> str:
    where, chance = words.where(figure.settings) or NOTHING, words.chances(figure.settings)
    return f"{where} ({chance})" if chance else where


def _value(figure: Figure | None) -> str | TableCell:
    if figure is None:
        return NOTHING
    if figure.mean is None:
        return TableCell(text=" ".join(filter(None, (words.outcome(figure), figure.without))), mark="lost")
    items = format_interval(figure.item_low, figure.item_high)
    num_items = len(figure.values) * (figure.num_samples or 0)
    num_seeds = sum(figure.statuses.values())
    notes = (
        format_interval(figure.low, figure.high),
        items and (f"over blocks of text {items}" if figure.unit == "nat" else f"items {items} of {num_items:,}"),
        figure.without,
        *(f"{words.status_name(n)} {count} of {num_seeds}" for n, count in figure.statuses.items() if n != "ok"),
    )
    return TableCell(text=words.outcome(figure), notes=notes)


def _comparisons(verdicts: Sequence[Verdict]) -> Folded:
    """Write every pair that was compared, with its difference and its p-values."""
    lines = [
        [
            f"{verdict.pair.first} − {verdict.pair.second}",
            words.capitalized(words.metric_name(verdict.pair.primary.metric)),
            words.where(verdict.pair.settings) or NOTHING,
            _outcome(verdict) or verdict.reason,
            NOTHING if verdict.difference is None else words.shown_value(verdict.difference),
            format_interval(verdict.low, verdict.high) or NOTHING,
            *(
                NOTHING if p is None else f"{p:.2g}"
                for p in (verdict.p_value, verdict.adjusted_p_value, verdict.adjusted_equivalence_p_value)
            ),
            str(verdict.num_seeds),
        ]
        for verdict in verdicts
    ]
    headers = ["Pair", "Metric", "Setting", "Verdict", "Difference", "Holm interval", "p", "p, Holm"]
    headers += ["p of equivalence, Holm", "Seeds"]
    table = Table(title="All pairs compared", headers=headers, lines=lines, num_labels=4)
    return Folded("Comparisons", f"{len(lines)} pairs", table)


def _not_ranked(protocol: Protocol) -> str:
    others = [name for name in protocol.variants if name not in protocol.rank]
    parts = [f"Shown, not ranked: {words.listed(others)}."] if others else []
    parts += [f"{line}: one model, run once." for line in same_models(protocol.shared)]
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} alone, so only it could be best of all.")
    return " ".join(parts)
