"""Sections on single evaluations, and notes for the table of all scores."""

from collections.abc import Sequence

from attnbench.report.blocks import Block, Examples, Folded, Note, Pictures, Section
from attnbench.report.charts.pictures import picture
from attnbench.report.charts.plots import plots_of
from attnbench.report.inputs import Protocol, about
from attnbench.report.sections import words
from attnbench.report.sections.answer import primary_column
from attnbench.report.sections.examples import examples
from attnbench.report.sections.scores import outcome_of
from attnbench.results.corpora import has_authors, split_name
from attnbench.results.metrics import AXES, DEFINITIONS, OF_TRAININGS
from attnbench.results.numbers import format_interval, format_number, format_within
from attnbench.results.protocol import TEST_NAMES
from attnbench.results.rows import TRAINING
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.seeds import MOST_MOVED, RATIO_NOTE, Figure, is_accuracy, sittings_lead
from attnbench.verdict.summary import headline_columns, primary_metrics

HOW_JUDGED = (
    "Nats and accuracies are paired by seed. The error is 0.05 over all pairs and metrics (Holm), for intervals of "
    "differences too. Equivalent: two one-sided tests find a difference within the margin, the largest that does not "
    "matter. Nothing else is tested."
)


def evaluation_section(
    figures: Sequence[Figure], verdicts: Sequence[Verdict], protocol: Protocol, variants: Sequence[str]
) -> Section:
    evaluation = figures[0].evaluation
    described = about(evaluation, protocol)
    drawn = [plot for plot in plots_of(figures, described.plots) if len(plot.positions) > 1 or plot.is_whole]
    lead = sittings_lead((words.metric_name(it.metric, it.unit), it) for it in figures)
    blocks: list[Block] = [Note(text, kind="callout") for text in (lead, _peaks(figures)) if text]
    primary = None if verdicts else primary_metrics([evaluation]).get(evaluation)
    column = next(iter(headline_columns(figures, evaluation)), None)
    column = (primary_column(figures, primary) if primary is not None else None) or column
    if not verdicts and column is not None:
        blocks.append(Note(f"{words.plain_answer(figures, column, primary)} Not tested.", kind="lead"))
    blocks += [Note(words.capitalized(described.purpose), kind="about")] if described.purpose else []
    blocks += [Examples(shown)] if (shown := examples(described.example)) else []
    blocks += [Pictures([picture(plot, variants) for plot in drawn])] if drawn else []
    blocks += _details(figures, first=column.metric if column is not None else "", is_open=not drawn)
    blocks += [_comparisons(verdicts)] if verdicts else []
    blocks += _definitions(figures)
    return Section(title=words.task(evaluation), evaluation=evaluation, blocks=blocks)


def evaluation_sections(
    figures: Sequence[Figure], verdicts: Sequence[Verdict], protocol: Protocol, variants: Sequence[str]
) -> list[Section]:
    return [
        evaluation_section(group, [it for it in verdicts if it.pair.evaluation == name], protocol, variants)
        for name, group in grouped(figures, lambda figure: figure.evaluation).items()
    ]


def _peaks(figures: Sequence[Figure]) -> str:
    """Say that shares of the device's peak are of unlike peaks; empty where all runs found about the same."""
    achieved = {(it.label, str(it.settings)): it.mean for it in figures if it.metric == "achieved_tflops"}
    shares = [it for it in figures if it.metric == "ceiling_fraction" and it.mean]
    found = {it.label: (achieved.get((it.label, str(it.settings))) or 0.0) / (it.mean or 1.0) for it in shares}
    low, high = (choose(found, key=found.__getitem__, default="") for choose in (min, max))
    if not found or found[high] <= MOST_MOVED * found[low]:
        return ""
    ends = " to ".join(f"{format_number(found[name])} ({name})" for name in (low, high))
    return f"Shares of the device’s peak are of unlike peaks, as each run timed its own: {ends} TFLOP/s."


def _definitions(figures: Sequence[Figure]) -> list[Folded]:
    metrics = {figure.metric: words.metric_name(figure.metric, figure.unit) for figure in figures}
    axes = dict.fromkeys(axis for figure in figures for axis in figure.settings)
    told = DEFINITIONS | AXES
    if "nats_per_character" in metrics:
        unit = words.symbols(figure.identity for figure in figures).removesuffix("s")
        told |= {
            "perplexity": told["perplexity"].replace("token", unit),
            "chance": f"score of the {unit}s’ frequencies",
        }
    if "steps_trained" in metrics or split_name(figures[0].evaluation)[0] == TRAINING:
        told["tokens_per_second"] += f", {OF_TRAININGS}"
    names = metrics | {axis: words.axis_name(axis) for axis in axes}
    lines = {words.capitalized(name): told[key] for key, name in names.items() if key in told}
    lines |= {"×": RATIO_NOTE.removeprefix("×: ")} if any(figure.ratio_text for figure in figures) else {}
    return [Folded("What the numbers are", f"{len(lines)} definitions", lines)] if lines else []


def summary_notes(protocol: Protocol, figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> list[Note]:
    """Explain tests, intervals and seeds, as far as the page has them."""
    others = [name for name in protocol.variants if name not in protocol.rank] if protocol.rank else []
    parts = [f"Shown, not ranked: {words.listed(others)}."] if others else []
    if protocol.reference is not None:
        parts.append(f"All others are compared with {protocol.reference} only, so only it could be best of all.")
    kinds = dict.fromkeys(it.pair.primary.kind for it in verdicts)
    tests = "; ".join(f"{TEST_NAMES[kind]} ({kind})" for kind in kinds)
    how = [f"Verdicts are on one metric of each evaluation, by its kind: {tests}.", HOW_JUDGED] if verdicts else []
    with_interval = any(len(it.values) > 1 and it.low is not None and not it.has_range for it in figures)
    how += ["An interval over seeds is Student’s."] if with_interval else []
    how += ["A diverged seed counts as chance."] if any(it.num_diverged for it in figures) else []
    return [Note(" ".join(sentences)) for sentences in (how, parts) if sentences]


def _outcome(verdict: Verdict) -> str:
    if verdict.pair.limit:
        return f"at the {verdict.pair.limit} like {verdict.pair.second}, not separated"
    text = outcome_of(verdict)
    if verdict.winner is not None:
        return f"{text} than {verdict.pair.second}"
    return f"{text} to {verdict.pair.second}{words.of_seeds(verdict)}" if verdict.is_equivalent else text


def _details(figures: Sequence[Figure], *, first: str, is_open: bool) -> list[Folded]:
    """List all numbers, those of the metric `first` before others."""
    metrics = grouped(sorted(figures, key=lambda it: it.metric != first), lambda figure: figure.metric)
    several = [group for group in metrics.values() if len({figure.key for figure in group}) > 1]
    single = [figure for group in metrics.values() if group not in several for figure in group]
    parts = [_numbers(_metric(group[0]), "setting", group, is_open=is_open) for group in several]
    title = "Single numbers" if several else "Numbers"
    return [*parts, *([_numbers(title, "metric", single, is_open=is_open)] if single else [])]


def _numbers(title: str, header: str, figures: Sequence[Figure], *, is_open: bool) -> Folded:
    """List figures by setting or by metric; settings that all have stand below the table."""
    first = figures[0].place.items()
    common = {name: value for name, value in first if all(it.place.get(name) == value for it in figures)}
    lines: dict[str, dict[str, Figure]] = {}
    for it in figures:
        is_validation = it.metric == "selection"
        skipped = {*common, "split"} if is_validation else common
        place = words.where({name: value for name, value in it.place.items() if name not in skipped})
        data = words.validated_on(it.evaluation) if is_validation else ""
        parts = [_metric(it) if header == "metric" else "", place, data, words.chances(it.settings)]
        lines.setdefault(", ".join(filter(None, parts)) or NOTHING, {})[it.label] = it
    variants = list(dict.fromkeys(it.label for it in figures))
    body = [[name, *(_value(by_variant.get(variant)) for variant in variants)] for name, by_variant in lines.items()]
    notes = " ".join([*([f"All at {where}."] if (where := words.where(common)) else []), *_brackets(figures)])
    headers = [words.capitalized(header), *variants]
    table = Table(title=title, headers=headers, lines=body, notes=[notes] if notes else [])
    return Folded(title, f"{len(lines)} {header}{'s' * (len(lines) > 1)}", table, is_open)


def _metric(figure: Figure) -> str:
    return words.capitalized(words.metric_name(figure.metric, figure.unit))


def _brackets(figures: Sequence[Figure]) -> list[str]:
    """Say what the brackets of a table are, and how large the test is."""
    kinds = {
        words.interval_name([it]): "(…)" if it.has_range else "[…]"
        for it in figures
        if it.spread and it.metric != "solved"
    }
    told = [f"{bracket}: {kind}." for kind, bracket in kinds.items()]
    sizes = {it.num_samples for it in figures if it.num_samples and is_accuracy(it.metric)}
    told += [f"Each seed answers {words.listed(f'{size:,}' for size in sorted(sizes))} test items."] if sizes else []
    halves = [(it.item_high - it.item_low) / 2 for it in figures if it.unit == "nat" and it.item_low and it.item_high]
    if halves:
        whose = "authors" if has_authors(figures[0].identity.corpus) else "blocks of text"
        told.append(
            f"On another text of this length all variants would move together, by up to {max(halves):.2g} nats "
            f"(95 % interval over {whose})."
        )
    return told


def _value(figure: Figure | None) -> str | TableCell:
    if figure is None:
        return NOTHING
    if figure.mean is None:
        return TableCell(text=" ".join(filter(None, (words.outcome(figure), figure.without))), mark="lost")
    num_seeds = sum(figure.statuses.values())
    notes = (
        figure.spread if figure.metric != "solved" else "",
        figure.without,
        *(f"{words.status_name(n)} {count} of {num_seeds}" for n, count in figure.statuses.items() if n == "diverged"),
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
