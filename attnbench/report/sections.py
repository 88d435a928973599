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
from attnbench.verdict.ranking import Family
from attnbench.verdict.seeds import Figure, same_models
from attnbench.verdict.statistics import MIN_SEEDS
from attnbench.verdict.summary import Column, Entry, Summary, headline_columns

HOW_RANKED = (
    "“Best” stands only where a variant is separated from every other: a two-sided paired t-test over common seeds "
    "with Holm-adjusted p < 0.05, and a mean difference of at least the smallest that matters (0.01 in accuracy, 1 % "
    "in perplexity). Where a pair’s differences do not vary at all, only the size of the difference decides."
)
HOW_INTERVALS = (
    "Brackets are 95 % Student intervals over seeds, for a single process’s timings the 20th and 80th percentile, "
    "for an exponent of growth one standard error either way; they are not adjusted for the number of comparisons."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One evaluation: its figures, what is ranked of them, and its plots."""

    evaluation: str
    figures: list[Figure]
    families: list[Family]
    plots: list[Plot]
    purpose: str
    """One line, as the evaluation says it; empty where nobody knows."""

    @property
    def title(self) -> str:
        """The evaluation's name as a heading."""
        return words.heading(self.evaluation)

    def answer(self) -> str:
        """Write one sentence from the numbers, at the summary's setting where the variants differ most."""
        columns = headline_columns(self.figures, self.evaluation)
        if not columns:
            return ""
        ranked = [f for column in columns for f in self.families if any(map(column.takes, f.figures))]
        if not ranked:
            return words.plain_answer(self.figures, columns[0])
        widest = max(ranked, key=_spread)
        same_metric = [family for family in self.families if family.metric == widest.metric]
        return f"{words.ranked_answer(widest)} {words.tally(same_metric)}".strip()


def chapters(figures: Sequence[Figure], families: Sequence[Family], protocol: Protocol) -> list[Chapter]:
    """Make a chapter of each evaluation, in the order in which the figures name them."""
    by_evaluation: dict[str, list[Figure]] = {}
    for figure in figures:
        by_evaluation.setdefault(figure.evaluation, []).append(figure)
    described = {evaluation: about(evaluation, protocol) for evaluation in by_evaluation}
    return [
        Chapter(
            evaluation=evaluation,
            figures=group,
            families=[family for family in families if family.evaluation == evaluation],
            plots=plots_of(group, described[evaluation].plots),
            purpose=described[evaluation].purpose,
        )
        for evaluation, group in by_evaluation.items()
    ]


def summary_section(
    protocol: Protocol, content: Summary, families: Sequence[Family], sections: Mapping[str, str]
) -> Markup:
    """Write the answer: one sentence, and a table of evaluations and variants.

    Args:
        sections: the id of each evaluation's section.
    """
    few_seeds = f"Scores of fewer than {MIN_SEEDS} seeds are shown and not ranked; nothing of them is marked best."
    is_exploratory = any(family.exploratory for family in families)
    # The table as a whole, without a winner where the comparisons have none.
    shown = [f for f in families if any(column.takes(f.figures[0]) for column in content.columns)]
    return element(
        "section",
        element("h2", "The answer", id="answer"),
        paragraph(few_seeds, "callout", "Exploratory. ") if is_exploratory else None,
        paragraph(words.overall(shown), "lead"),
        _summary_table(content, sections),
        paragraph(f"{HOW_INTERVALS} {HOW_RANKED}", "note"),
        paragraph(_not_ranked(protocol), "note"),
        aria_labelledby="answer",
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
        _comparisons(chapter.families),
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
    notes = (spread, figure.without, "exploratory" * entry.is_exploratory)
    badge = element("span", "best", class_="badge") if entry.is_best else None
    content = cell_content(TableCell(text=entry.text, notes=notes, mark=mark))
    return element("td", badge, content, class_=f"number {mark}".strip())


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
        f"items {items} of {num_items:,}" if items else "",
        figure.without,
        *(f"{words.status_name(n)} {count} of {num_seeds}" for n, count in figure.statuses.items() if n != "ok"),
    )
    return TableCell(text=words.outcome(figure), notes=notes)


def _comparisons(families: Sequence[Family]) -> Markup | None:
    """Write every pair that was compared, with its difference and both p-values."""
    lines = [
        [
            f"{pair.first} − {pair.second}",
            words.capitalized(words.metric_name(family.metric)),
            words.where(family.settings) or NOTHING,
            pair.verdict,
            NOTHING if pair.difference is None else words.shown_value(pair.difference),
            words.interval(pair.low, pair.high) or NOTHING,
            *(NOTHING if p is None else f"{p:.2g}" for p in (pair.p_value, pair.adjusted_p_value)),
            str(pair.num_seeds),
        ]
        for family in families
        for pair in family.comparisons
    ]
    if not lines:
        return None
    headers = ["Pair", "Metric", "Setting", "Verdict", "Difference", "95 % interval", "p", "p, Holm", "Seeds"]
    table = Table(title="All pairs compared", headers=headers, lines=lines, num_labels=4)
    return opening("Comparisons", f"{len(lines)} pairs", to_html(table))


def _not_ranked(protocol: Protocol) -> str:
    others = [name for name in protocol.variants if name not in protocol.rank]
    parts = [f"Shown, not ranked: {words.listed(others)}."] if others else []
    parts += [f"{line}: one model, run once." for line in same_models(protocol.shared)]
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} alone, so only it could be best of all.")
    return " ".join(parts)


def _spread(family: Family) -> float:
    """Tell how far apart the variants are, in shares of their mean, so that different metrics can be compared."""
    means = [figure.mean for figure in family.figures if figure.mean is not None]
    return (max(means) - min(means)) / (abs(sum(means)) or 1.0) * len(means) if means else -1.0
