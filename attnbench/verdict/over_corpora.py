"""Verdicts over corpora, counted by outcome."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.results.corpora import split_name
from attnbench.verdict.ranking import Verdict

OUTCOMES = ("better", "worse", "equivalent", "undecided", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCorpora:
    evaluation: str
    first: str
    second: str
    verdicts: dict[str, Verdict]
    """By corpus."""

    @property
    def outcomes(self) -> dict[str, list[str]]:
        by_outcome: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for corpus, verdict in self.verdicts.items():
            is_equal = verdict.is_equivalent and verdict.winner is None
            by_outcome["equivalent" if is_equal else verdict.outcome].append(corpus)
        return {outcome: corpora for outcome, corpora in by_outcome.items() if corpora}


def over_corpora(verdicts: Sequence[Verdict]) -> list[OverCorpora]:
    """Evaluations that name no corpus are left out."""
    groups: dict[tuple[str, str, str], dict[str, Verdict]] = {}
    for verdict in verdicts:
        evaluation, corpus = split_name(verdict.pair.evaluation)
        if corpus is not None:
            groups.setdefault((evaluation, verdict.pair.first, verdict.pair.second), {})[corpus] = verdict
    return [
        OverCorpora(evaluation=evaluation, first=first, second=second, verdicts=by_corpus)
        for (evaluation, first, second), by_corpus in groups.items()
    ]
