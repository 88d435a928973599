"""The sections of the page that answer: the summary, and one for each evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnbench.report import words
from attnbench.report.inputs import Inputs, Protocol, about
from attnbench.report.markup import Markup, TableCell, breakable, element, join, scrolling, table
from attnbench.report.plots import Plot, chance_text, describe, missing_text, plots_of
from attnbench.verdict.ranking import Family
from attnbench.verdict.seeds import Figure, same_models
from attnbench.verdict.summary import Column, Entry, Summary, headline_columns

MIN_RANKED_SEEDS = 3
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
        """One sentence from the numbers, at the summary's setting where the variants differ most."""
        columns = headline_columns(self.figures, self.evaluation)
        if not columns:
            return ""
        own = [next((f for f in self.families if any(map(column.takes, f.figures))), None) for column in columns]
        ranked = [family for family in own if family is not None]
        if not ranked:
            return words.plain_answer(self.figures, columns[0])
        widest = max(ranked, key=_spread)
        same_metric = [family for family in self.families if family.metric == widest.metric]
        return f"{words.ranked_answer(widest)} {words.tally(same_metric)}".strip()


def chapters(figures: Sequence[Figure], families: Sequence[Family], protocol: Protocol) -> list[Chapter]:
    """One an evaluation, in the order in which the figures name them."""
    described = {name: about(name, protocol) for name in dict.fromkeys(figure.evaluation for figure in figures)}
    return [
        Chapter(
            evaluation=evaluation,
            figures=[figure for figure in figures if figure.evaluation == evaluation],
            families=[family for family in families if family.evaluation == evaluation],
            plots=plots_of([f for f in figures if f.evaluation == evaluation], own.plots),
            purpose=own.purpose,
        )
        for evaluation, own in described.items()
    ]


def summary_section(inputs: Inputs, summed: Summary, families: Sequence[Family], sections: Mapping[str, str]) -> Markup:
    """The answer: one sentence, and a table of evaluations and variants.

    Args:
        sections: the id of each evaluation's section.
    """
    return element(
        "section",
        element("h2", "The answer", id="answer"),
        _exploratory_note(families),
        element("p", _overall(summed, families), class_="lead"),
        _summary_table(summed, sections),
        element("p", HOW_INTERVALS, " ", HOW_RANKED, class_="note"),
        _not_ranked_note(inputs),
        aria_labelledby="answer",
    )


def evaluation_section(chapter: Chapter, index: int) -> Markup:
    """One evaluation: its answer, its plots, and its numbers in tables that open."""
    about = chapter.purpose
    return element(
        "section",
        element("h2", chapter.title, id=anchor(index)),
        element("p", chapter.answer(), class_="lead"),
        element("p", words.capitalized(about), class_="about") if about else None,
        element("div", *map(_figure, chapter.plots), class_="charts") if chapter.plots else None,
        *_details(chapter.figures, is_open=not chapter.plots),
        _comparisons(chapter.families),
        class_="evaluation",
        aria_labelledby=anchor(index),
    )


def anchor(index: int) -> str:
    """The id of an evaluation's heading; a number, because names are the user's."""
    return f"evaluation-{index}"


def _overall(summed: Summary, families: Sequence[Family]) -> str:
    """What the table says as a whole, without a winner where the comparisons found none."""
    return words.overall([f for f in families if any(column.takes(f.figures[0]) for column in summed.columns)])


def _summary_table(summed: Summary, sections: Mapping[str, str]) -> Markup:
    """A column a variant and a line a score, so that what is compared stands side by side."""
    variants = list(summed.lines)
    head = element("tr", *(element("th", breakable(name), scope="col") for name in ("Score", *variants)))
    bodies: dict[str, list[Markup]] = {}
    for index, column in enumerate(summed.columns):
        cells = (_summary_cell(line[index]) for line in summed.lines.values())
        bodies.setdefault(column.evaluation, []).append(element("tr", _score_header(column), *cells))
    groups = [
        element("tbody", _group_header(evaluation, sections[evaluation], len(variants)), *lines)
        for evaluation, lines in bodies.items()
    ]
    caption = "All variants on all evaluations"
    drawn = element(
        "table", element("caption", caption, class_="hidden"), element("thead", head), *groups, class_="summary"
    )
    return scrolling(drawn, caption)


def _group_header(evaluation: str, section: str, num_variants: int) -> Markup:
    link = element("a", words.heading(evaluation), href=f"#{section}")
    empty = element("td", colspan=str(num_variants))
    return element("tr", element("th", link, scope="rowgroup"), empty, class_="group")


def _score_header(column: Column) -> Markup:
    """What is measured, which way is better, where, and what chance would give."""
    skipped = ("split", "checkpoint", "chance")
    where = words.place({name: value for name, value in column.settings.items() if name not in skipped})
    direction = {True: "higher is better", False: "lower is better", None: ""}[column.higher_is_better]
    arrow = {True: "↑", False: "↓", None: ""}[column.higher_is_better]
    chance = words.chances(column.settings)
    return element(
        "th",
        words.capitalized(words.metric_name(column.metric, column.unit)),
        element("span", f" {arrow}", title=direction, aria_label=direction, role="img") if arrow else None,
        element("small", where) if where else None,
        element("small", chance) if chance else None,
        scope="row",
    )


def _summary_cell(entry: Entry) -> Markup:
    figure = entry.figure
    if figure is None:
        return element("td", element("span", entry.text, class_="value"), class_="number")
    without = element("small", figure.without) if figure.without else None
    if figure.mean is None:
        return element("td", _cross(entry.text), without, class_="number lost")
    spread = words.interval(figure.low, figure.high)
    return element(
        "td",
        element("span", "best", class_="badge") if entry.is_best else None,
        element("span", entry.text, class_="value"),
        element("small", spread) if spread else None,
        without,
        element("small", "exploratory") if entry.is_exploratory else None,
        class_="number best" if entry.is_best else "number",
    )


def _figure(plot: Plot) -> Markup:
    missing, chance = missing_text(plot), chance_text(plot)
    return element(
        "figure",
        element("figcaption", plot.title, element("small", f"dashed: {chance}") if chance else None),
        element("div", class_="plot", role="img", aria_label=describe(plot), data_chart=plot.name),
        element("p", _cross(missing), class_="missing") if missing else None,
    )


def _details(figures: Sequence[Figure], *, is_open: bool) -> list[Markup]:
    """Every number: a table for each metric with several settings, and one for all that have a single one."""
    metrics: dict[str, dict[str, dict[str, Figure]]] = {}
    for figure in figures:
        metrics.setdefault(figure.metric, {}).setdefault(_place(figure), {})[figure.label] = figure
    names = {figure.metric: words.capitalized(words.metric_name(figure.metric, figure.unit)) for figure in figures}
    several = {metric: lines for metric, lines in metrics.items() if len(lines) > 1}
    drawn = [
        _numbers(names[metric], "Setting", lines, f"{len(lines)} settings", is_open=is_open)
        for metric, lines in several.items()
    ]
    single = {
        names[metric] + (f", {where}" if where != "–" else ""): found
        for metric, lines in metrics.items()
        if metric not in several
        for where, found in lines.items()
    }
    if single:
        title = "Single numbers" if several else "Numbers"
        drawn.append(_numbers(title, "Metric", single, f"{len(single)} metrics", is_open=is_open))
    return drawn


def _numbers(title: str, header: str, lines: dict[str, dict[str, Figure]], count: str, *, is_open: bool) -> Markup:
    """A table that opens: a line a setting, a column a variant."""
    variants = list(dict.fromkeys(variant for found in lines.values() for variant in found))
    body = [[name, *(_value(found.get(variant)) for variant in variants)] for name, found in lines.items()]
    drawn = table(title, [header, *map(breakable, variants)], body)
    return element("details", element("summary", f"{title} ", element("small", count)), drawn, open=is_open)


def _place(figure: Figure) -> str:
    where = words.place(figure.settings) or "–"
    chance = words.chances(figure.settings)
    return f"{where} ({chance})" if chance else where


def _value(figure: Figure | None) -> object:
    if figure is None:
        return "–"
    if figure.mean is None:
        lost = " ".join(filter(None, (words.outcome(figure), figure.without)))
        return TableCell(content=_cross(lost), kind="lost")
    items, num_items = words.interval(figure.item_low, figure.item_high), len(figure.values) * (figure.num_samples or 0)
    lost = {name: count for name, count in figure.statuses.items() if name != "ok"}
    notes = [
        words.interval(figure.low, figure.high),
        f"items {items} of {num_items:,}" if items else "",
        figure.without,
        *(f"{words.status_name(name)} {count} of {sum(figure.statuses.values())}" for name, count in lost.items()),
    ]
    return join([element("span", words.outcome(figure), class_="value"), *(element("small", n) for n in notes if n)])


def _comparisons(families: Sequence[Family]) -> Markup | None:
    """Every pair that was compared, with its difference and both p-values."""
    lines = [
        [
            f"{pair.first} − {pair.second}",
            words.capitalized(words.metric_name(family.metric)),
            words.place(family.settings) or "–",
            pair.verdict,
            "–" if pair.difference is None else words.shown_value(pair.difference),
            words.interval(pair.low, pair.high) or "–",
            *("–" if p is None else f"{p:.2g}" for p in (pair.p_value, pair.adjusted_p_value)),
            pair.num_seeds,
        ]
        for family in families
        for pair in family.comparisons
    ]
    if not lines:
        return None
    headers = ["Pair", "Metric", "Setting", "Verdict", "Difference", "95 % interval", "p", "p, Holm", "Seeds"]
    count = element("small", f"{len(lines)} pairs")
    return element(
        "details", element("summary", "Comparisons ", count), table("All pairs compared", headers, lines, num_labels=4)
    )


def _exploratory_note(families: Sequence[Family]) -> Markup | None:
    if not any(family.exploratory for family in families):
        return None
    return element(
        "p",
        element("strong", "Exploratory. "),
        f"Scores of fewer than {MIN_RANKED_SEEDS} seeds are shown and not ranked; nothing of them is marked best.",
        class_="callout",
    )


def _not_ranked_note(inputs: Inputs) -> Markup | None:
    protocol = inputs.protocol
    others = [name for name in protocol.variants if name not in protocol.rank]
    parts = []
    if others:
        parts.append(f"Shown, not ranked: {words.listed(others)}.")
    parts += [f"{line}: one model, run once." for line in same_models(protocol.shared)]
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} alone, so only it could be best of all.")
    return element("p", " ".join(parts), class_="note") if parts else None


def _cross(text: str) -> Markup:
    return join([element("span", "×", class_="cross", aria_hidden="true"), " ", text])


def _spread(family: Family) -> float:
    """How far apart the variants are, in shares of their mean, so that different metrics can be compared."""
    means = [figure.mean for figure in family.figures if figure.mean is not None]
    return (max(means) - min(means)) / (abs(sum(means)) or 1.0) * len(means) if means else -1.0
