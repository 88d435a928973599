"""Verdicts over corpora: counts of verdicts, and a descriptive estimate from a mixed model."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnbench.results.corpora import split_name
from attnbench.results.metrics import Primary
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.statistics import CONFIDENCE, Interval

MIN_CORPORA = 3
"""Fewer corpora do not show the variation between corpora."""

SINGULAR = 1e-4
"""Fits are singular if a smaller share of the variance of differences lies between corpora."""

EQUAL = 1e-10
"""Differences of one corpus are equal if a smaller share of the variance lies between seeds."""

SINGULAR_FIT = "its fit is singular: the difference varies between corpora no more than between seeds"

OUTCOMES = ("better", "worse", "equivalent", "undecided", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverCorpora:
    evaluation: str
    primary: Primary
    first: str
    second: str
    verdicts: dict[str, Verdict]
    estimate: Interval | None = None
    """Mean difference, first minus second, over corpora, with its 95 % interval; None without a fitted model."""
    between: float | None = None
    obstacle: str = ""

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
    return [_over_corpora(*key, by_corpus) for key, by_corpus in groups.items()]


def _over_corpora(evaluation: str, first: str, second: str, verdicts: dict[str, Verdict]) -> OverCorpora:
    primary = next(iter(verdicts.values())).pair.primary
    pair = OverCorpora(evaluation=evaluation, primary=primary, first=first, second=second, verdicts=verdicts)
    fitted = _obstacle(primary, verdicts) or mixed_model([verdict.pair.differences for verdict in verdicts.values()])
    if isinstance(fitted, str):
        return replace(pair, obstacle=fitted)
    return replace(pair, estimate=fitted[0], between=fitted[1])


def _obstacle(primary: Primary, verdicts: dict[str, Verdict]) -> str:
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
    """Fit a mixed model of differences by REML.

        d_cs = mean + u_c + e_cs,   u_c ~ N(0, between^2),   e_cs ~ N(0, within^2)

    `groups` has differences by corpus, at least two each, of at least three corpora. Returns the mean with Student's 95
    % interval, with (corpora - 1) degrees of freedom, and the standard deviation between corpora; or the reason why
    there is no fit. The normal interval of statsmodels is too narrow for few corpora.
    """
    import numpy as np
    from scipy.stats import t
    from statsmodels.regression.mixed_linear_model import MixedLM
    from statsmodels.tools.sm_exceptions import ConvergenceWarning

    values = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    # Scaled, because the optimizer's tolerances assume values near 1. Powell's method also converges if seeds vary far
    # less than corpora.
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
