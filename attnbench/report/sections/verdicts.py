"""Verdicts in sentences."""

from collections.abc import Callable, Sequence

from attnbench.report.sections import words
from attnbench.results.numbers import without_rounding
from attnbench.verdict.axes import grouped
from attnbench.verdict.ranking import Verdict, common_reference

MANY = 6
"""Most variants beside a reference that have their own sentences."""

MOST, FEW = 5, 3
"""Most sentences of the first screen, and most variants that one of them names beside a winner or a reference."""


def verdict_lines(verdicts: Sequence[Verdict]) -> dict[str, list[str]]:
    """Group verdicts by outcome and omit empty groups: a sentence for each winner of an evaluation or, with one
    reference and many variants, for each evaluation."""
    alike = [it for it in verdicts if it.is_equivalent and it.winner is None]
    reference = common_reference(verdicts)
    is_many = reference is not None and len({it.pair.first for it in verdicts}) > MANY
    lines = {
        "Better": [_won(group, sized=True) for group in _by_winner(verdicts, sized=True)],
        "Equivalent": _equivalent_together(alike, reference) if is_many and reference else _by_pair(alike, _equivalent),
        "Undecided": _undecided([it for it in verdicts if it.outcome == "undecided" and not it.is_decided]),
        "Not separated": _without_verdict([it for it in verdicts if it.pair.limit], len(verdicts)),
        "No verdict": _without_verdict([it for it in verdicts if not it.pair.limit], len(verdicts)),
    }
    return {term: sentences for term, sentences in lines.items() if sentences}


def first_sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the verdicts in MOST sentences at most: winners, the largest lead of each evaluation first; then who is
    equivalent and what is undecided."""
    groups = grouped(_by_winner(verdicts), lambda group: group[0].pair.evaluation).values()
    ranked = [(rank, -_lead(group), group) for of_it in groups for rank, group in enumerate(sorted(of_it, key=_order))]
    others = [text for text in (_all_equivalent(verdicts), _all_undecided(verdicts)) if text]
    won = [_won(group, most=FEW) for _, _, group in sorted(ranked, key=lambda it: it[:2])]
    return [*won[: MOST - len(others)], *others]


def _order(group: Sequence[Verdict]) -> float:
    return -_lead(group)


def _lead(group: Sequence[Verdict]) -> float:
    """Return the largest lead, in margins."""
    return max(abs(it.difference or 0.0) / it.pair.primary.margin for it in group)


def _by_winner(verdicts: Sequence[Verdict], *, sized: bool = False) -> list[list[Verdict]]:
    """Group the verdicts of an evaluation that one sentence tells: of one winner or, with many variants beside one
    reference, of all that are better than it."""
    reference = common_reference(verdicts)
    is_many = reference is not None and len({it.pair.first for it in verdicts}) > MANY

    def key(it: Verdict) -> tuple[str, str | None, str]:
        winner = None if is_many and it.winner != reference else it.winner
        return _what(it), winner, _size(it) if sized else ""

    groups = grouped((it for it in verdicts if it.winner is not None), key).values()
    return [sorted(group, key=lambda it: -abs(without_rounding(it.difference or 0.0))) for group in groups]


def _won(group: Sequence[Verdict], *, sized: bool = False, most: int | None = None) -> str:
    """Return "b has 12 % [10, 14] lower perplexity than a, 3 % [1, 5] than c", or for several winners "b has 12 % [10,
    14] lower perplexity than a; also c 3 % [1, 5], and 4 others"."""
    first, *others = group
    verb, amount, what = words.advantage(first)
    noted = _noted if sized else lambda it: _noted(it) * (it is first)
    text = f"{first.winner} {verb} {amount} {what} than {words.loser(first)}{noted(first)}"
    told = others if most is None else others[: most - 1]
    are_winners = any(it.winner != first.winner for it in others)
    parts = [
        f"{it.winner} {words.advantage(it)[1]}{noted(it)}"
        if are_winners
        else f"{words.advantage(it)[1]} than {words.loser(it)}{noted(it)}"
        for it in told
    ]
    left = len(others) - len(told)
    parts += [f"and {'' if are_winners else 'than '}{left} other{'s' * (left > 1)}"] if left else []
    joined = f"; also {', '.join(parts)}" if are_winners else "".join(f", {part}" for part in parts)
    condition = words.of_seeds(first)
    return f"{text}{joined}{condition}{_size(first) if sized else ', less than matters' * first.is_equivalent}."


def _noted(verdict: Verdict) -> str:
    return f" ({'; '.join(notes)})" if (notes := words.notes(verdict)) else ""


def _all_equivalent(verdicts: Sequence[Verdict]) -> str:
    alike = [it for it in verdicts if it.is_equivalent and it.winner is None]
    return _all_pairs(alike, "Equivalent", common_reference(verdicts))


def _all_undecided(verdicts: Sequence[Verdict]) -> str:
    others = [it for it in verdicts if it.winner is None and not it.is_equivalent]
    return _all_pairs(others, "Not decided", common_reference(verdicts))


def _all_pairs(verdicts: Sequence[Verdict], outcome: str, reference: str | None) -> str:
    """Text such as "Equivalent to a: b and c in recall, b in copy.", at most FEW names or pairs an evaluation."""
    parts = []
    for evaluation, group in grouped(verdicts, lambda it: it.pair.evaluation).items():
        pairs = [it.pair.first if reference else f"{it.pair.first} and {it.pair.second}" for it in group]
        left = len(pairs) - FEW
        shown = [*pairs[:FEW], f"{left} others" if reference else f"{left} other pairs"] if left > 1 else pairs
        parts.append(f"{words.listed(shown) if reference else ', '.join(shown)} in {words.task(evaluation).lower()}")
    whom = {"Equivalent": f" to {reference}", "Not decided": f" against {reference}"}[outcome] if reference else ""
    return f"{outcome}{whom}: {'; '.join(parts)}." if parts else ""


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
    return verdict.pair.first, verdict.pair.second


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
