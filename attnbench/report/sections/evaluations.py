"""Sections on single evaluations, and notes for the table of all scores."""

from collections.abc import Sequence

from attnbench.report.blocks import Block, Examples, Folded, Note, Pictures, Section
from attnbench.report.charts.pictures import picture, table_of_singles
from attnbench.report.charts.plots import plots_of
from attnbench.report.inputs import Protocol, about
from attnbench.report.sections import words
from attnbench.report.sections.examples import examples
from attnbench.report.sections.scores import outcome_of
from attnbench.results.corpora import has_authors
from attnbench.results.metrics import AXES, DEFINITIONS
from attnbench.results.numbers import format_interval, format_within
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.seeds import RATIO_NOTE, Figure, same_models, sittings_lead
from attnbench.verdict.summary import headline_columns

POSITION = "position_bucket"

HOW_JUDGED = (
    "Verdicts are on the primary metric of each evaluation only: paired by seed, Student’s test for nats, a sign-flip "
    "permutation test for accuracies, Holm-adjusted over all pairs and metrics at 0.05. The interval of a difference "
    "is that of its test at its Holm level. Equivalent: two one-sided tests within the margin. All else is descriptive."
)
HOW_INTERVALS = (
    "Brackets after scores are 95 % intervals over seeds, Student’s or, for shares, Clopper and Pearson’s; for timings "
    "of a single process, the 20th and 80th percentiles; for an exponent of growth, one standard error either way. "
    "After accuracies, and after any score of at most four seeds, come the lowest and the highest seed; after "
    "accuracies also how many seeds solve the task. A diverged seed counts as chance."
)


def evaluation_section(
    figures: Sequence[Figure], verdicts: Sequence[Verdict], protocol: Protocol, variants: Sequence[str]
) -> Section:
    evaluation = figures[0].evaluation
    described = about(evaluation, protocol)
    # Positions in the window have a section of their own.
    plots = [plot for plot in plots_of(figures, described.plots) if plot.axis != POSITION]
    singles = [plot for plot in plots if len(plot.positions) == 1 and not plot.is_whole]
    drawn = [plot for plot in plots if plot not in singles]
    blocks: list[Block] = sittings_note(sittings_lead((words.metric_name(it.metric, it.unit), it) for it in figures))
    if not verdicts and (columns := headline_columns(figures, evaluation)):
        blocks.append(Note(words.plain_answer(figures, columns[0]), kind="lead"))
    blocks += [Note(words.capitalized(described.purpose), kind="about")] if described.purpose else []
    blocks += [Examples(shown)] if (shown := examples(described.example)) else []
    blocks += [Pictures([picture(plot, variants) for plot in drawn])] if drawn else []
    blocks += [table_of_singles(singles)] if singles else []
    blocks += _details(figures, is_open=not plots)
    blocks += [_comparisons(verdicts)] if verdicts else []
    blocks += _definitions(figures)
    return Section(title=words.heading(evaluation), evaluation=evaluation, blocks=blocks)


def evaluation_sections(
    figures: Sequence[Figure], verdicts: Sequence[Verdict], protocol: Protocol, variants: Sequence[str]
) -> list[Section]:
    return [
        evaluation_section(group, [it for it in verdicts if it.pair.evaluation == name], protocol, variants)
        for name, group in grouped(figures, lambda figure: figure.evaluation).items()
    ]


def position_section(figures: Sequence[Figure], variants: Sequence[str]) -> Section | None:
    located = [figure for figure in figures if POSITION in figure.settings]
    pairs = dict.fromkeys((figure.evaluation, figure.metric) for figure in located)
    plots = [
        plot
        for evaluation, metric in pairs
        for plot in plots_of([figure for figure in located if figure.evaluation == evaluation], [(metric, POSITION)])
    ]
    pictures = Pictures([picture(plot, variants) for plot in plots if len(plot.positions) > 1])
    text = f"A mark counts the {AXES[POSITION]}."
    return Section(title="By position", blocks=[Note(text), pictures]) if pictures.shown else None


def sittings_note(text: str) -> list[Block]:
    return [Note(text, kind="callout")] if text else []


def _definitions(figures: Sequence[Figure]) -> list[Folded]:
    metrics = {figure.metric: words.metric_name(figure.metric, figure.unit) for figure in figures}
    axes = dict.fromkeys(axis for figure in figures for axis in figure.settings)
    lines = {words.capitalized(name): DEFINITIONS[metric] for metric, name in metrics.items() if metric in DEFINITIONS}
    lines |= {words.capitalized(words.axis_name(axis)): AXES[axis] for axis in axes if axis in AXES}
    lines |= {"×": RATIO_NOTE.removeprefix("×: ")} if any(figure.ratio_text for figure in figures) else {}
    return [Folded("What the numbers are", f"{len(lines)} definitions", lines)] if lines else []


def summary_notes(protocol: Protocol) -> list[Note]:
    others = [name for name in protocol.variants if name not in protocol.rank]
    parts = [f"Shown, not ranked: {words.listed(others)}."] if others else []
    parts += [f"{line}: one model, run once." for line in same_models(protocol.shared)]
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} only, so only it could be best of all.")
    return [Note(f"{HOW_JUDGED} {HOW_INTERVALS}"), *([Note(" ".join(parts))] if parts else [])]


def _outcome(verdict: Verdict) -> str:
    if verdict.pair.limit:
        return f"at the {verdict.pair.limit} like {verdict.pair.second}, not separated"
    text = outcome_of(verdict)
    if verdict.winner is not None:
        return f"{text} than {verdict.pair.second}"
    return f"{text} to {verdict.pair.second}{words.of_seeds(verdict)}" if verdict.is_equivalent else text


def _details(figures: Sequence[Figure], *, is_open: bool) -> list[Folded]:
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
        parts.append(
            _numbers(
                title, "Metric", single, f"{len(single)} {'metric' if len(single) == 1 else 'metrics'}", is_open=is_open
            )
        )
    return parts


def _numbers(title: str, header: str, lines: dict[str, dict[str, Figure]], count: str, *, is_open: bool) -> Folded:
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
    blocks = "authors" if has_authors(figure.identity.corpus) else "blocks of text"
    num_items = len(figure.values) * (figure.num_samples or 0)
    num_seeds = sum(figure.statuses.values())
    notes = (
        figure.spread,
        items and (f"over {blocks} {items}" if figure.unit == "nat" else f"items {items} of {num_items:,}"),
        figure.without,
        *(f"{words.status_name(n)} {count} of {num_seeds}" for n, count in figure.statuses.items() if n != "ok"),
    )
    return TableCell(text=words.outcome(figure, in_table=True), notes=notes)


def _comparisons(verdicts: Sequence[Verdict]) -> Folded:
    lines = [
        [
            f"{verdict.pair.first} − {verdict.pair.second}",
            words.capitalized(words.metric_name(verdict.pair.primary.metric)),
            words.where(verdict.pair.settings) or NOTHING,
            _outcome(verdict) or verdict.reason,
            NOTHING if verdict.difference is None else format_within(verdict.difference, verdict.low, verdict.high),
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
    return Folded("Comparisons", "1 pair" if len(lines) == 1 else f"{len(lines)} pairs", table)
