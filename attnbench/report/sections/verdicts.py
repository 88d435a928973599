"""Verdicts in sentences: better, equivalent, undecided, and without verdict."""

from collections.abc import Callable, Sequence

from attnbench.report.sections import words
from attnbench.results.numbers import without_rounding
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict, common_reference

MANY = 6
"""Most variants beside a reference that have their own sentences."""


def verdict_lines(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Group verdicts by outcome and omit empty groups: a sentence for each pair or, with one reference and many
    variants, for each evaluation."""
    winners = [it for it in verdicts if it.winner is not None]
    alike = [it for it in verdicts if it.is_equivalent and it.winner is None]
    reference = common_reference(verdicts)
    if reference is not None and len({it.pair.first for it in verdicts}) > MANY:
        better, equivalent = _better_together(winners, reference), _equivalent_together(alike, reference)
    else:
        better, equivalent = _by_pair(winners, _better), _by_pair(alike, _equivalent)
    lines = {
        "Better": better,
        "Equivalent": equivalent,
        "Undecided": _undecided([it for it in verdicts if it.outcome == "undecided" and not it.is_decided]),
        "Not separated": _without_verdict([it for it in verdicts if it.pair.limit], len(verdicts)),
        "No verdict": _without_verdict([it for it in verdicts if not it.pair.limit], len(verdicts)),
    }
    return {term: sentences for term, sentences in lines.items() if sentences}


def _better_together(verdicts: Sequence[Verdict], reference: str) -> list[str]:
    groups = grouped(verdicts, lambda it: (_what(it), it.winner == reference, _size(it)))
    sentences = []
    for (what, is_worse, size), group in groups.items():
        who = f"{reference} is better than" if is_worse else f"better than {reference} {_are(group)}"
        sentences.append(f"{words.capitalized(what)}{size}: {who} {_in_order(group)}.")
    return sentences


def _equivalent_together(verdicts: Sequence[Verdict], reference: str) -> list[str]:
    groups = grouped(verdicts, lambda it: f"{words.capitalized(_what(it))}, within {it.pair.primary.margin_text}")
    return [f"{what}: as good as {reference} {_are(group)} {_in_order(group)}." for what, group in groups.items()]


def _are(verdicts: Sequence[Verdict]) -> str:
    return "are" if len(verdicts) > 1 else "is"


def _in_order(verdicts: Sequence[Verdict]) -> str:
    ordered = sorted(verdicts, key=lambda it: -abs(without_rounding(it.difference or 0.0)))
    return ", ".join(f"{it.pair.first} {words.difference(it)}" for it in ordered)


def _by_pair(verdicts: Sequence[Verdict], sentence: Callable[[list[Verdict]], str]) -> list[str]:
    return [sentence(group) for group in grouped(verdicts, _names).values()]


def _names(verdict: Verdict) -> tuple[str, str]:
    pair = verdict.pair
    return (pair.second, pair.first) if verdict.winner == pair.second else (pair.first, pair.second)


def _better(verdicts: list[Verdict]) -> str:
    def by_how_much(verdict: Verdict) -> str:
        # Perplexity is always the variant's compared with the reference's, whichever is better.
        is_others = verdict.pair.primary.kind == "nats" and verdict.winner == verdict.pair.second
        whose = f" of {verdict.pair.first}" if is_others else ""
        return f"{_what(verdict)}{whose} {words.difference(verdict)}{_size(verdict)}"

    first, second = _names(verdicts[0])
    return f"{first} is better than {second}: {'; '.join(map(by_how_much, verdicts))}."


def _size(verdict: Verdict) -> str:
    if verdict.is_equivalent:
        return ", less than matters"
    return f", more than {verdict.pair.primary.margin_text}" if verdict.exceeds_margin else ""


def _equivalent(verdicts: list[Verdict]) -> str:
    first, second = _names(verdicts[0])
    parts = [
        f"{_what(verdict)} {words.difference(verdict)}, within {verdict.pair.primary.margin_text}"
        for verdict in verdicts
    ]
    return f"{first} and {second}: {'; '.join(parts)}."


def _undecided(verdicts: Sequence[Verdict]) -> list[str]:
    groups = grouped((it for it in verdicts if not it.reason), lambda it: (_what(it), it.num_seeds))
    return [
        *(
            f"{evaluation} at {num_seeds} seeds; would be decided by: {'; '.join(_by_seeds(group))}."
            for (evaluation, num_seeds), group in groups.items()
        ),
        *(f"{_what(it)}: {it.pair.first} and {it.pair.second}, {it.reason}." for it in verdicts if it.reason),
    ]


def _by_seeds(group: Sequence[Verdict]) -> list[str]:
    pairs = grouped(group, words.seeds_text)
    if len(pairs) == 1 and len(group) > 2:
        return [f"all {len(group)} pairs {next(iter(pairs))}"]
    names = {text: ", ".join(f"{it.pair.first} and {it.pair.second}" for it in some) for text, some in pairs.items()}
    return [f"{named} {text}" for text, named in names.items()]


def _what(verdict: Verdict) -> str:
    condition = words.of_seeds(verdict).removeprefix(", of ")
    return f"{verdict.pair.evaluation} ({condition})" if condition else verdict.pair.evaluation


def _without_verdict(verdicts: Sequence[Verdict], num: int) -> list[str]:
    groups: dict[str, list[tuple[str, Verdict]]] = {}
    for verdict in verdicts:
        if verdict.outcome == "none":
            both = verdict.pair.first, verdict.pair.second
            whose = next((it for it in both if verdict.reason.startswith(f"{it} ")), "")
            groups.setdefault(verdict.reason.removeprefix(f"{whose} "), []).append((whose, verdict))
    sentences = []
    for reason, group in groups.items():
        if len(group) > 1 and all(whose for whose, _ in group):
            variants: dict[str, dict[str, None]] = {}
            for whose, it in group:
                variants.setdefault(it.pair.evaluation, {})[whose] = None
            of_each = "; ".join(f"{evaluation} of {', '.join(names)}" for evaluation, names in variants.items())
            sentences.append(f"{words.capitalized(reason)}: {of_each}.")
        else:
            told = group[0][1].reason
            sentences.append(f"{words.capitalized(told)}: {_all_or_listed([it for _, it in group], num)}.")
    return sentences


def _all_or_listed(verdicts: Sequence[Verdict], num: int) -> str:
    if len(verdicts) == num:
        return f"all {num} pairs" if num > 1 else "the only pair"
    return "; ".join(f"{it.pair.first} and {it.pair.second} in {it.pair.evaluation}" for it in verdicts)
