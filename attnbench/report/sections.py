"""The sections of the page that answer: the summary, and one for each evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnbench.report import words
from attnbench.report.html import (
    Markup,
    breakable,
    cell_content,
    crossed,
    element,
    opening,
    paragraph,
    scrolling,
    small,
    to_html,
)
from attnbench.report.inputs import Protocol, about
from attnbench.report.plots import Plot, chance_text, describe, missing_text, plots_of
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.ranking import Verdict, noise_floor
from attnbench.verdict.seeds import Figure, same_models
from attnbench.verdict.summary import Column, Entry, Summary, headline_columns

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

    def answer(self) -> str:
        """Write the verdicts, or where there are none one sentence from the numbers."""
        if self.verdicts:
            return " ".join(map(words.verdict_sentence, self.verdicts))
        columns = headline_columns(self.figures, self.evaluation)
        return words.plain_answer(self.figures, columns[0]) if columns else ""


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


def summary_section(
    protocol: Protocol, content: Summary, verdicts: Sequence[Verdict], sections: Mapping[str, str]
) -> Markup:
    """Write the answer: one sentence, and a table of evaluations and variants.

    Args:
        sections: the id of each evaluation's section.
    """
    return element(
        "section",
        element("h2", "The answer", id="answer"),
        _answer(verdicts),
        _summary_table(content, sections),
        paragraph(f"{HOW_JUDGED} {HOW_INTERVALS}", "note"),
        paragraph(_not_ranked(protocol), "note"),
        aria_labelledby="answer",
    )


def _answer(verdicts: Sequence[Verdict]) -> Markup | None:
    """List the verdicts, decided ones first, then the noise floor; without any say why."""
    if not verdicts:
        return paragraph(
            "No verdict: fewer than two variants were scored in an evaluation with a primary metric.", "lead"
        )
    floors = "; ".join(words.noise_sentence(noise) for noise in noise_floor([verdict.pair for verdict in verdicts]))
    return element(
        "div",
        element(
            "ul",
            *(
                element("li", words.verdict_sentence(verdict))
                for verdict in sorted(verdicts, key=lambda verdict: not verdict.is_decided)
            ),
            class_="lead",
        ),
        paragraph(f"What this comparison could have detected with a probability of 0.8: {floors}.", "note"),
    )


def evaluation_section(chapter: Chapter, index: int) -> Markup:
    """Write one evaluation: its answer, its plots, and its numbers in tables that open."""
    return element(
        "section",
        element("h2", chapter.title, id=anchor(index)),
        element("p", chapter.answer(), class_="lead"),
        paragraph(words.capitalized(chapter.purpose), "about"),
        element("div", *map(_figure, chapter.plots), class_="charts") if chapter.plots else None,
        *_details(chapter.figures, is_open=not chapter.plots),
        _comparisons(chapter.verdicts),
        class_="evaluation",
        aria_labelledby=anchor(index),
    )


def anchor(index: int) -> str:
    """Name the id of an evaluation's heading: a number, because names are the user's."""
    return f"evaluation-{index}"


def _summary_table(content: Summary, sections: Mapping[str, str]) -> Markup:
    """Write a column a variant and a line a score, so that what is compared stands side by side."""
    head = element("tr", *(element("th", breakable(name), scope="col") for name in ("Score", *content.lines)))
    bodies: dict[str, list[Markup]] = {}
    for index, column in enumerate(content.columns):
        cells = (_summary_cell(entries[index]) for entries in content.lines.values())
        bodies.setdefault(column.evaluation, []).append(element("tr", _score_header(column), *cells))
    groups = []
    for evaluation, lines in bodies.items():
        link = element("a", words.heading(evaluation), href=f"#{sections[evaluation]}")
        empty = element("td", colspan=str(len(content.lines)))
        group = element("tr", element("th", link, scope="rowgroup"), empty, class_="group")
        groups.append(element("tbody", group, *lines))
    return scrolling("All variants on all evaluations", element("thead", head), *groups, kind="summary")


def _score_header(column: Column) -> Markup:
    """Write the metric, which way is better, its settings, and what chance would give."""
    skipped = ("split", "checkpoint", "chance")
    where = words.where({name: value for name, value in column.settings.items() if name not in skipped})
    arrow = None
    if column.higher_is_better is not None:
        sign, direction = ("↑", "higher is better") if column.higher_is_better else ("↓", "lower is better")
        arrow = element("span", f" {sign}", title=direction, aria_label=direction, role="img")
    name = words.capitalized(words.metric_name(column.metric, column.unit))
    return element("th", name, arrow, *small([where, words.chances(column.settings)]), scope="row")


def _summary_cell(entry: Entry) -> Markup:
    figure = entry.figure
    if figure is None:
        return element("td", element("span", entry.text, class_="value"), class_="number")
    is_lost = figure.mean is None
    mark = "best" if entry.is_best else "lost" if is_lost else ""
    spread = "" if is_lost else words.interval(figure.low, figure.high)
    outcome = "" if entry.verdict is None else _outcome(entry.verdict)
    notes = (spread, figure.without, outcome)
    badge = element("span", "best", class_="badge") if entry.is_best else None
    content = cell_content(TableCell(text=entry.text, notes=notes, mark=mark))
    return element("td", badge, content, class_=f"number {mark}".strip())


def _outcome(verdict: Verdict) -> str:
    """Write the verdict on a score in a word or two: "better than softmax"."""
    if verdict.winner is not None:
        return f"{verdict.outcome} than {verdict.pair.second}"
    return (
        f"equivalent to {verdict.pair.second}" if verdict.is_equivalent else "undecided" * (verdict.outcome != "none")
    )


def _figure(plot: Plot) -> Markup:
    missing, chance = missing_text(plot), chance_text(plot)
    return element(
        "figure",
        element("figcaption", plot.title, *small([f"dashed: {chance}" if chance else ""])),
        element("div", class_="plot", role="img", aria_label=describe(plot), data_chart=plot.name),
        paragraph(crossed(missing) if missing else "", "missing"),
    )


def _details(figures: Sequence[Figure], *, is_open: bool) -> list[Markup]:
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


def _numbers(title: str, header: str, lines: dict[str, dict[str, Figure]], count: str, *, is_open: bool) -> Markup:
    """Write a table that opens: a line a setting, a column a variant."""
    variants = list(dict.fromkeys(variant for by_variant in lines.values() for variant in by_variant))
    body = [[name, *(_value(by_variant.get(variant)) for variant in variants)] for name, by_variant in lines.items()]
    table = Table(title=title, headers=[header, *variants], lines=body)
    return opening(title, count, to_html(table), is_open=is_open)


def _place(figure: Figure) -> str:
    where, chance = words.where(figure.settings) or NOTHING, words.chances(figure.settings)
    return f"{where} ({chance})" if chance else where


def _value(figure: Figure | None) -> str | TableCell:
    if figure is None:
        return NOTHING
    if figure.mean is None:
        return TableCell(text=" ".join(filter(None, (words.outcome(figure), figure.without))), mark="lost")
    items, num_items = words.interval(figure.item_low, figure.item_high), len(figure.values) * (figure.num_samples or 0)
    num_seeds = sum(figure.statuses.values())
    notes = (
        words.interval(figure.low, figure.high),
        items and (f"over blocks of text {items}" if figure.unit == "nat" else f"items {items} of {num_items:,}"),
        figure.without,
        *(f"{words.status_name(n)} {count} of {num_seeds}" for n, count in figure.statuses.items() if n != "ok"),
    )
    return TableCell(text=words.outcome(figure), notes=notes)


def _comparisons(verdicts: Sequence[Verdict]) -> Markup | None:
    """Write every pair that was compared, with its difference and its p-values."""
    if not verdicts:
        return None
    lines = [
        [
            f"{verdict.pair.first} − {verdict.pair.second}",
            words.capitalized(words.metric_name(verdict.pair.primary.metric)),
            words.where(verdict.pair.settings) or NOTHING,
            _outcome(verdict) or verdict.reason,
            NOTHING if verdict.difference is None else words.shown_value(verdict.difference),
            words.interval(verdict.low, verdict.high) or NOTHING,
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
    return opening("Comparisons", f"{len(lines)} pairs", to_html(table))


def _not_ranked(protocol: Protocol) -> str:
    others = [name for name in protocol.variants if name not in protocol.rank]
    parts = [f"Shown, not ranked: {words.listed(others)}."] if others else []
    parts += [f"{line}: one model, run once." for line in same_models(protocol.shared)]
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} alone, so only it could be best of all.")
    return " ".join(parts)
