"""Verdicts on a family of pairs: better, worse, equivalent or undecided.

Tests of a difference and of equivalence are two families, each adjusted by Holm's procedure over all its members.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.results.metrics import Primary
from attnbench.results.numbers import reaches
from attnbench.results.protocol import SIGNIFICANCE
from attnbench.settings.schema import LOOKS
from attnbench.verdict.axes import grouped
from attnbench.verdict.family import Pair, fewest_seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    pair: Pair
    outcome: str
    """better | worse (first than second) | undecided | none (no verdict possible)."""
    is_equivalent: bool = False
    """The difference is within the margin; also possible for better and worse."""
    num_seeds: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    """Interval of the difference at `level`; excludes 0 exactly if the outcome is better or worse."""
    level: float = 1 - SIGNIFICANCE
    p_value: float | None = None
    adjusted_p_value: float | None = None
    equivalence_p_value: float | None = None
    adjusted_equivalence_p_value: float | None = None
    equivalence_level: float = 1 - SIGNIFICANCE
    reason: str = ""
    """Reason for no verdict, or for not declaring the better one the winner."""

    @property
    def is_decided(self) -> bool:
        """True if more seeds would add nothing."""
        return self.outcome in ("better", "worse") or self.is_equivalent

    @property
    def winner(self) -> str | None:
        return {"better": self.pair.first, "worse": self.pair.second}.get(self.outcome)

    @property
    def exceeds_margin(self) -> bool:
        """True if the whole interval is beyond the margin."""
        margin = self.pair.primary.margin
        if self.low is None or self.high is None:
            return False
        return not (reaches(margin, self.low) and reaches(self.high, -margin))

    @property
    def seeds_needed(self) -> int | None:
        """Seeds that would decide with probability 0.8; None: over 100, or unknown."""
        if self.outcome != "undecided" or self.is_equivalent or self.reason or self.difference is None:
            return None
        pair = self.pair
        return pair.test.seeds_needed(
            self.difference,
            pair.spread,
            pair.primary.margin,
            alpha=1 - self.level,
            equivalence_alpha=1 - self.equivalence_level,
            more_than=self.num_seeds,
            seen=pair.differences,
        )


def common_reference(verdicts: Sequence[Verdict]) -> str | None:
    seconds = {verdict.pair.second for verdict in verdicts}
    return seconds.pop() if len(seconds) == 1 else None


def judge(pairs: Sequence[Pair], significance: float = SIGNIFICANCE) -> list[Verdict]:
    """Test every pair of a family once, with all its seeds, at this error rate of the family.

    A pair without a verdict counts with a p-value of 1: a missing result must not make the other tests easier.
    """
    testable = [not pair.obstacle and not pair.limit and len(pair.differences) > 1 for pair in pairs]
    p_values = [
        pair.test.p_value(pair.sample, resolution=pair.resolution) if can else 1.0
        for pair, can in zip(pairs, testable, strict=True)
    ]
    equivalence = [
        pair.test.equivalence_p_value(pair.sample, pair.primary.margin, resolution=pair.resolution) if can else 1.0
        for pair, can in zip(pairs, testable, strict=True)
    ]
    differing, same = holm(p_values, significance), holm(equivalence, significance)
    verdicts = []
    for index, (pair, can) in enumerate(zip(pairs, testable, strict=True)):
        if not can:
            at_limit = pair.limit and f"both are at the {pair.limit}"
            too_few = f"a test needs two common seeds, and there is {len(pair.differences) or 'none'}"
            reason = pair.obstacle or at_limit or too_few
            verdicts.append(Verdict(pair=pair, outcome="none", reason=reason, num_seeds=len(pair.differences)))
            continue
        level = 1 - differing.levels[index]
        low, high = pair.test.interval(pair.sample, level, resolution=pair.resolution)
        verdict = Verdict(
            pair=pair,
            outcome="undecided",
            is_equivalent=same.rejected[index],
            num_seeds=len(pair.differences),
            difference=float(np.mean(pair.differences)),
            low=low,
            high=high,
            level=level,
            p_value=p_values[index],
            adjusted_p_value=differing.adjusted[index],
            equivalence_p_value=equivalence[index],
            adjusted_equivalence_p_value=same.adjusted[index],
            equivalence_level=1 - same.levels[index],
        )
        verdicts.append(_with_winner(verdict) if differing.rejected[index] else verdict)
    return verdicts


def judge_in_looks(pairs: Sequence[Pair]) -> list[Verdict]:
    """Test the pairs of a family whose seeds came in LOOKS, each look with its share of the error.

    A verdict of one look is final, and its pair stays in the family at later looks: the shares add up to SIGNIFICANCE.
    """
    verdicts: list[Verdict] = []
    for num_seeds, error in LOOKS.items():
        seen = [_at_look(pair, num_seeds) for pair in pairs]
        for index, verdict in enumerate(verdicts):
            if verdict.is_decided:
                seen[index] = replace(seen[index], obstacle="it was decided with fewer seeds")
        judged = judge(seen, error)
        # An incomplete look keeps the verdict of the look before, if any.
        verdicts = [
            before if after.outcome == "none" else after
            for before, after in zip(verdicts or judged, judged, strict=True)
        ]
    return verdicts


def _at_look(pair: Pair, num_seeds: int) -> Pair:
    kept = [index for index, seed in enumerate(pair.seeds) if seed < num_seeds]
    at_look = replace(
        pair,
        differences=tuple(pair.differences[index] for index in kept),
        seeds=tuple(pair.seeds[index] for index in kept),
        scores=tuple(tuple(values[index] for index in kept) for values in pair.scores),
    )
    if pair.obstacle or len(kept) == num_seeds:
        return at_look
    return replace(at_look, obstacle=f"an interim test takes {num_seeds} common seeds, and there are {len(kept)}")


def next_look(verdict: Verdict) -> int | None:
    if verdict.outcome != "undecided" or verdict.is_equivalent:
        return None
    return next((num_seeds for num_seeds in LOOKS if num_seeds > verdict.num_seeds), None)


def _with_winner(verdict: Verdict) -> Verdict:
    pair = verdict.pair
    first_wins = ((verdict.difference or 0.0) > 0) == pair.primary.higher_is_better
    winner = pair.first if first_wins else pair.second
    if winner in pair.failed:
        return replace(verdict, reason=f"{winner} would be better, but some of its seeds diverged")
    return replace(verdict, outcome="better" if first_wins else "worse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holm:
    rejected: list[bool]
    adjusted: list[float]
    levels: list[float]
    """Level of each test; for tests not rejected, the level at which the procedure ended."""


def holm(p_values: Sequence[float], significance: float = SIGNIFICANCE) -> Holm:
    if not p_values:
        return Holm(rejected=[], adjusted=[], levels=[])
    from statsmodels.stats.multitest import multipletests

    rejected, adjusted, *_ = multipletests(p_values, alpha=significance, method="holm")
    num, num_rejected = len(p_values), int(sum(rejected))
    # Equal p-values share the level of their first step, whatever their order.
    ranks = np.searchsorted(np.sort(p_values), p_values, side="left")
    levels = [significance / (num - min(int(rank), num_rejected, num - 1)) for rank in ranks]
    return Holm(rejected=[bool(value) for value in rejected], adjusted=np.asarray(adjusted).tolist(), levels=levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    evaluation: str
    primary: Primary
    num_pairs: int
    num_seeds: int
    """Smallest number of common seeds of any pair."""
    detectable: tuple[float, ...]
    """By pair, detected with probability 0.8 at the family's first Holm step; pairs with too few seeds are left out."""
    fewest_seeds: int
    """Fewest seeds with which a difference of any size is significant at that step."""


def noise_floor(pairs: Sequence[Pair], *, in_looks: bool = False) -> list[Noise]:
    """Return the noise floor of each primary metric; `in_looks`: the seeds came by plan.seeds=auto."""
    floors = []
    # Seeds that diverged count as chance, so the spread of their pairs is not noise.
    by_evaluation = grouped((pair for pair in pairs if not pair.failed), lambda pair: pair.evaluation)

    def alpha(num_seeds: int) -> float:
        return (LOOKS.get(num_seeds, max(LOOKS.values())) if in_looks else SIGNIFICANCE) / len(pairs)

    for evaluation, group in by_evaluation.items():
        test, sizes = group[0].test, [len(pair.differences) for pair in group]
        held_to = [(pair, num, alpha(num)) for pair, num in zip(group, sizes, strict=True)]
        enough = [it for it in held_to if it[1] > 1 and test.smallest_p(it[1]) <= it[2]]
        floors.append(
            Noise(
                evaluation=evaluation,
                primary=group[0].primary,
                num_pairs=len(group),
                num_seeds=min(sizes),
                fewest_seeds=fewest_seeds(test, alpha(0)),
                detectable=tuple(test.detectable(it.spread, error, num) for it, num, error in enough),
            )
        )
    return floors
