"""Verdicts over corpora in words and in a table."""

from collections.abc import Sequence

from attnbench.report.blocks import Section
from attnbench.results.numbers import format_interval, format_within, percent_of_nats
from attnbench.results.tables import NOTHING, Table, TableCell
from attnbench.verdict.over_corpora import OverCorpora, over_corpora
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.statistics import Interval

PHRASES = {"equivalent": "equivalent", "undecided": "undecided", "none": "without a verdict"}


def corpora_lines(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    sentences = [f"{_counts(it)}." for it in over_corpora(verdicts)]
    return {"Over corpora": sentences} if sentences else {}


def _counts(it: OverCorpora) -> str:
    """Text such as "linear is better than softmax in 3 of 4 corpora (a, b, d), undecided in 1 (c)", most wins first."""
    outcomes = it.outcomes
    turned = len(outcomes.get("worse", [])) > len(outcomes.get("better", []))
    first, second = (it.second, it.first) if turned else (it.first, it.second)
    better, worse = ("worse", "better") if turned else ("better", "worse")
    total = f" of {len(it.verdicts)} corpora"
    if better in outcomes:
        opening = f"{first} is better than {second} in {it.evaluation}"
        parts = ["", *(["worse"] if worse in outcomes else []), *(name for name in PHRASES if name in outcomes)]
    else:
        opening = f"{first} and {second} in {it.evaluation}"
        parts = [name for name in PHRASES if name in outcomes]
    shown = []
    for name in parts:
        corpora = outcomes[{"": better, "worse": worse}.get(name, name)]
        phrase = PHRASES.get(name, name)
        shown.append(f"{phrase} in {len(corpora)}{total} ({', '.join(corpora)})".lstrip())
        total = ""
    return f"{opening}{' ' if better in outcomes else ': '}{', '.join(shown)}"


def _percent(interval: Interval) -> str:
    """Format a difference in nats as percent of the second's perplexity, whichever variant is better: as percent of the
    first's, it might be outside the range of all corpora."""
    mean = percent_of_nats(interval.mean)
    low, high = (None if end is None else percent_of_nats(end) for end in (interval.low, interval.high))
    return f"{format_within(mean, low, high, '+')} % {format_interval(low, high, '+', is_of_difference=True)}"


def corpora_section(verdicts: Sequence[Verdict]) -> Section | None:
    pairs = over_corpora(verdicts)
    if not pairs:
        return None
    corpora = list(dict.fromkeys(corpus for it in pairs for corpus in it.verdicts))
    lines = [
        [
            f"{it.first} − {it.second}",
            it.evaluation,
            *(_cell(it.verdicts.get(corpus)) for corpus in corpora),
        ]
        for it in pairs
    ]
    table = Table(
        title="Verdicts on each corpus",
        headers=["Pair", "Evaluation", *corpora],
        lines=lines,
        num_labels=2,
    )
    return Section(title="Over corpora", blocks=[table])


def _cell(verdict: Verdict | None) -> TableCell:
    if verdict is None:
        return TableCell(text=NOTHING)
    if verdict.outcome == "none":
        return TableCell(text="no verdict", notes=(verdict.reason,))
    outcome = "equivalent" if verdict.is_equivalent and verdict.winner is None else verdict.outcome
    mark = "best" if verdict.outcome == "better" else ""
    return TableCell(text=outcome, notes=(_difference(verdict),), mark=mark)


def _difference(verdict: Verdict) -> str:
    if verdict.difference is None:
        return ""
    interval = Interval(mean=verdict.difference, low=verdict.low, high=verdict.high)
    if verdict.pair.primary.kind == "nats":
        return _percent(interval)
    ends = interval.low, interval.high
    return f"{format_within(interval.mean, *ends, '+')} {format_interval(*ends, '+', is_of_difference=True)}"
