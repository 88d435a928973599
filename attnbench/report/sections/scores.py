"""The table of variants and their scores, for the page, the terminal and Markdown."""

from collections.abc import Sequence
from dataclasses import replace

from attnbench.report.sections import words
from attnbench.results.metrics import Primary
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.seeds import Figure, is_accuracy, sittings_lead
from attnbench.verdict.summary import Column, Entry, Summary, primary_metrics

MAX_COLUMNS = 8
"""Most variants that have a column each on a terminal or a published page; more have a line each."""

SOLVED = "Solved: a seed with 95 % on validation data at two checks in a row, and on test data."

SIGNS = {"better": "▲", "worse": "▼", "equivalent": "≈"}


def summary_table(content: Summary, *, with_intervals: bool = False, title: str = "") -> Table:
    """A line per score and a column per variant, or the other way round for many variants."""
    table = score_table(content, with_intervals=with_intervals, title=title)
    return table if len(content.lines) > MAX_COLUMNS else turned(table)


def turned(table: Table) -> Table:
    """Return the table with lines for columns; it has one column of labels."""
    names = [line[0] for line in table.lines]
    lines = [[header, *(line[1 + index] for line in table.lines)] for index, header in enumerate(table.headers[1:])]
    return Table(title=table.title, lead=table.lead, headers=["", *names], lines=lines, notes=table.notes)


def score_table(content: Summary, *, with_intervals: bool = False, with_seeds: bool = False, title: str = "") -> Table:
    """Return a line per variant: numbers with the digits that matter, the best marked, and signs of verdicts.

    Args:
        with_seeds: behind accuracies of few seeds these stand one by one: 33 may be (3, 2, 95).
    """
    primaries = primary_metrics(column.evaluation for column in content.columns)
    columns = []
    for index, column in enumerate(content.columns):
        entries = [line[index] for line in content.lines.values()]
        cells = _cells(column, entries, primaries.get(column.evaluation), with_intervals=with_intervals)
        if with_seeds and is_accuracy(column.metric):
            cells = [_with_seeds(*pair, primaries.get(column.evaluation)) for pair in zip(cells, entries, strict=True)]
        columns.append(cells)
    lines = [[variant, *(cells[row] for cells in columns)] for row, variant in enumerate(content.lines)]
    headers = ["variant", *(_header(column, content.columns) for column in content.columns)]
    names = [f"{_name(column)} at {_place(column, content.columns)}" for column in content.columns]
    named = [(name, entry.figure) for line in content.lines.values() for name, entry in zip(names, line, strict=True)]
    lead = sittings_lead((name, figure) for name, figure in named if figure is not None)
    return Table(title=title, lead=lead, headers=headers, lines=lines, notes=content.ratio_notes)


def signs_note(content: Summary, reference: str | None) -> str:
    has_reference = reference is not None
    signs = {_sign(entry, has_reference=has_reference) for line in content.lines.values() for entry in line} - {""}
    named = {"▲": "better", "▼": "worse", "≈": "equivalent"}
    told = ", ".join(f"{sign} {word}" for sign, word in named.items() if sign in signs)
    whom = "Signs are against every other variant" if reference is None else f"Signs are against {reference}"
    tested = f" {whom}: {told}, at 5 % over all tests; without a sign: not decided, or not tested." if told else ""
    tested += " Brackets of sentences: intervals of differences, for all tests together." * bool(told)
    solved = [SOLVED] if any(entry.solved for line in content.lines.values() for entry in line) else []
    mixed = {name: words.validated_on(name) for name in (column.evaluation for column in content.columns)}
    solved += [f"Validation data of {name}: {told}." for name, told in mixed.items() if solved and told]
    return " ".join([f"Shaded: the best mean of a column.{tested}", *solved, *content.ratio_notes])


def _header(column: Column, columns: Sequence[Column]) -> TableCell:
    arrow = {True: " ↑", False: " ↓", None: ""}[column.higher_is_better]
    return TableCell(text=f"{_name(column)}{arrow}", notes=(_place(column, columns),))


def _name(column: Column) -> str:
    return words.score_name(column.evaluation, column.metric, column.unit)


def _place(column: Column, columns: Sequence[Column]) -> str:
    widths = {str(it.settings.get("width")) for it in columns if it.evaluation == column.evaluation}
    skipped = ("split", "checkpoint", "context", *(("width",) if len(widths) == 1 else ()))
    place = words.where({name: value for name, value in column.place.items() if name not in skipped})
    return place.replace("sequence length", "length")


def _cells(
    column: Column, entries: Sequence[Entry], primary: Primary | None, *, with_intervals: bool
) -> list[TableCell]:
    figures = [entry.figure for entry in entries]
    judge = primary if primary is not None and column.judged_by == primary.metric else None
    signs = [_sign(entry, has_reference=any(it.verdict is not None for it in entries)) for entry in entries]
    texts, best = [], ""
    # A score that is worse by a test gets digits that show it.
    for more in range(3):
        texts = [words.score(it, judge, more=more) if it is not None else NOTHING for it in figures]
        best = _best(column, figures, texts)
        if (best, SIGNS["worse"]) not in zip(texts, signs, strict=True):
            break
    cells = []
    with_solved = with_intervals or not all(entry.is_solved for entry in entries)
    for entry, figure, text, sign in zip(entries, figures, texts, signs, strict=True):
        notes = _notes(entry, with_intervals=with_intervals, with_solved=with_solved)
        if figure is None or figure.mean is None:
            cells.append(TableCell(text=text, notes=notes, mark="lost" if figure else ""))
            continue
        mark = "best" if text == best and sign != SIGNS["worse"] else ""
        cells.append(TableCell(text=text, notes=notes, mark=mark, sign=sign))
    return cells


def _best(column: Column, figures: Sequence[Figure | None], texts: Sequence[str]) -> str:
    """Return the text of the best mean; empty where all are equal, or where numbers of several sittings stand."""
    shown = {text: it.mean if it.ratio is None else it.ratio for it, text in zip(figures, texts, strict=True) if it}
    means = {text: value for text, value in shown.items() if value is not None}
    is_mixed = sittings_lead((column.header, figure) for figure in figures if figure is not None)
    if column.higher_is_better is None or is_mixed or len(means) < 2:
        return ""
    return (max if column.higher_is_better else min)(means, key=means.__getitem__)


def _notes(entry: Entry, *, with_intervals: bool, with_solved: bool) -> tuple[str, ...]:
    figure = entry.figure
    if figure is None:
        return ()
    solved = entry.solved if with_solved else ""
    spread = _spread(figure) if with_intervals and figure.mean is not None else ""
    limit = entry.verdict.pair.limit if entry.verdict is not None else ""
    at_limit = f"at the {limit}, not separated" * bool(limit)
    return tuple(
        filter(None, (spread, solved, at_limit, figure.partly if figure.mean is not None else "", figure.without))
    )


def _with_seeds(cell: TableCell, entry: Entry, primary: Primary | None) -> TableCell:
    if entry.figure is None or entry.figure.mean is None or not entry.figure.is_of_few:
        return cell
    return replace(cell, notes=(f"({words.seed_scores(entry.figure, primary)})", *cell.notes))


def _spread(figure: Figure) -> str:
    if not is_accuracy(figure.metric) or not figure.has_range:
        return figure.spread
    low, high = figure.range
    return f"({100 * low:.1f} to {100 * high:.1f})"


def _sign(entry: Entry, *, has_reference: bool) -> str:
    verdict = entry.verdict
    if verdict is None:
        return "▲" if entry.is_best and not has_reference else ""
    return SIGNS.get(outcome_of(verdict), "")


def outcome_of(verdict: Verdict) -> str:
    """Return better, worse, equivalent, undecided, or an empty text without a verdict."""
    if verdict.winner is not None:
        return verdict.outcome
    return "equivalent" if verdict.is_equivalent else "undecided" * (verdict.outcome != "none")
