"""Verdicts over corpora: how many say what of a pair, and one estimate from a mixed model of all of them.

The verdicts are those of the family, each on its corpus. The estimate is no test of it, and says so.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.statistics import CONFIDENCE, Interval

MIN_CORPORA = 3
"""Fewer say nothing of how a difference varies from corpus to corpus."""

SINGULAR = 1e-4
"""Share of the variance of differences between corpora below which a fit has none."""

EQUAL = 1e-10
"""Share of the variance of differences between seeds below which there is none to fit."""

SINGULAR_FIT = "its fit is singular: the difference varies between corpora no more than between seeds"

OUTCOMES = ("better", "worse", "equivalent", "undecided", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCorpora:
    """Verdicts on one pair on every corpus, and what they come to."""

    evaluation: str
    primary: Primary
    first: str
    second: str
    verdicts: dict[str, Verdict]
    """By corpus."""
    estimate: Interval | None = None
    """Mean difference, first minus second, over corpora, and its 95 % interval; None where no model could be fitted."""
    between: float | None = None
    """Standard deviation of the difference from corpus to corpus, of the model."""
    obstacle: str = ""
    """Reason why no model could be fitted."""

    @property
    def outcomes(self) -> dict[str, list[str]]:
        """The corpora of each outcome that there is, in the order of OUTCOMES."""
        by_outcome: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for corpus, verdict in self.verdicts.items():
            is_equal = verdict.is_equivalent and verdict.winner is None
            by_outcome["equivalent" if is_equal else verdict.outcome].append(corpus)
        return {outcome: corpora for outcome, corpora in by_outcome.items() if corpora}


def over_corpora(verdicts: Sequence[Verdict]) -> list[OverCorpora]:
    """Sum up the verdicts on each pair of variants over the corpora that their evaluations name."""
    groups: dict[tuple[str, str, str], dict[str, Verdict]] = {}
    for verdict in verdicts:
        evaluation, corpus = split_name(verdict.pair.evaluation)
        if corpus is not None:
            groups.setdefault((evaluation, verdict.pair.first, verdict.pair.second), {})[corpus] = verdict
    return [_summed_up(*key, by_corpus) for key, by_corpus in groups.items()]


def _summed_up(evaluation: str, first: str, second: str, verdicts: dict[str, Verdict]) -> OverCorpora:
    primary = next(iter(verdicts.values())).pair.primary
    differences = {corpus: list(verdict.pair.differences) for corpus, verdict in verdicts.items()}
    estimate, between, obstacle = None, None, _obstacle(primary, verdicts)
    if not obstacle:
        fitted = mixed_model(list(differences.values()))
        if isinstance(fitted, str):
            obstacle = fitted
        else:
            estimate, between = fitted
    return OverCorpora(
        evaluation=evaluation,
        primary=primary,
        first=first,
        second=second,
        verdicts=verdicts,
        estimate=estimate,
        between=between,
        obstacle=obstacle,
    )


def _obstacle(primary: Primary, verdicts: dict[str, Verdict]) -> str:
    """Return why these differences have no common model; empty where they may have one."""
    if primary.kind != "nats":
        return "differences of accuracies are not normal"
    if len(verdicts) < MIN_CORPORA:
        return f"{len(verdicts)} corpora are too few, {MIN_CORPORA} would do"
    without = [corpus for corpus, verdict in verdicts.items() if len(verdict.pair.differences) < 2]
    if without:
        return f"fewer than two common seeds on {', '.join(without)}"
    diverged = [corpus for corpus, verdict in verdicts.items() if verdict.pair.failed]
    return f"seeds diverged on {', '.join(diverged)}" if diverged else ""


def mixed_model(groups: Sequence[Sequence[float]]) -> tuple[Interval, float] | str:
    """Fit differences by one mean, a random deviation of each group, and one of each seed in it, by REML.

        d_cs = mean + u_c + e_cs,   u_c ~ N(0, between^2),   e_cs ~ N(0, within^2)

    The interval of the mean is Student's with one degree of freedom less than there are groups, which is exact where
    all groups have equally many seeds; the normal one that statsmodels prints is too narrow for a few groups.

    Args:
        groups: differences by corpus, at least two each, of at least three corpora.

    Returns:
        The mean with its 95 % interval and the standard deviation between groups; or why there is no fit.
    """
    import numpy as np
    from scipy.stats import t
    from statsmodels.regression.mixed_linear_model import MixedLM
    from statsmodels.tools.sm_exceptions import ConvergenceWarning

    values = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    # In units of their own spread: the optimizer's steps and tolerances are made for numbers about 1. Powell's method
    # also finds the optimum where seeds differ ten thousand times less than corpora do.
    scale = float(np.std(values))
    within_groups = float(np.mean([np.var(np.asarray(group, dtype=float)) for group in groups]))
    if scale == 0 or within_groups < EQUAL * scale**2:
        return "the differences of each corpus are equal, whatever the seed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            fit = MixedLM(values / scale, np.ones((len(values), 1)), groups=labels).fit(reml=True, method="powell")
        except (ConvergenceWarning, np.linalg.LinAlgError, ValueError):
            return SINGULAR_FIT
    mean, error, variance = (float(np.squeeze(it)) for it in (fit.fe_params[0], fit.bse_fe[0], fit.cov_re))
    if not all(map(math.isfinite, (mean, error, variance))) or variance < SINGULAR * (variance + float(fit.scale)):
        return SINGULAR_FIT
    half = error * float(t.ppf((1 + CONFIDENCE) / 2, len(groups) - 1))
    interval = Interval(mean=mean * scale, low=(mean - half) * scale, high=(mean + half) * scale)
    return interval, math.sqrt(variance) * scale
