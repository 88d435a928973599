"""Effects of the parts around a mixer, from a factorial plan: main effects, interactions, and shares solved by corner.

The nats of mixer m at corner c under seed s are modelled as

    nats_mcs = mean_mc + block_s + error_mcs

by least squares, with HC3 standard errors (MacKinnon and White, 1985), which allow unequal variances. Effects are
contrasts of the means: corners with the part minus corners without it; for an interaction corners with both parts or
neither minus corners with one. Intervals are not adjusted for their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from attnbench.results.metrics import Primary
from attnbench.results.numbers import percent_of_nats
from attnbench.settings.corners import SIGN, corner_name
from attnbench.verdict.family import primary_figures
from attnbench.verdict.seeds import Figure
from attnbench.verdict.statistics import CONFIDENCE

MIN_SEEDS = 2

Corner = tuple[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An effect in nats, negative if it helps, and its 95 % interval."""

    name: str
    """A part, or "gate × positions"; both names of two inseparable effects."""
    mixer: str
    """Mixer whose difference from the mean over mixers this is; empty for the mean itself."""
    nats: float
    low: float
    high: float

    def in_percent(self) -> tuple[float, float, float]:
        percent, low, high = (percent_of_nats(value) for value in (self.nats, self.low, self.high))
        return percent, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Factorial:
    factors: list[str]
    corners: list[Corner]

    @classmethod
    def of(cls, variants: Sequence[str], factors: Sequence[str]) -> "Factorial":
        """Read the corners from variants' names; other variants are left out."""
        named = [(name.split(SIGN)[0], frozenset(name.split(SIGN)[1:])) for name in variants]
        return cls(factors=list(factors), corners=[corner for corner in named if corner[1] <= set(factors)])

    @property
    def mixers(self) -> list[str]:
        return list(dict.fromkeys(mixer for mixer, _ in self.corners))

    @property
    def levels(self) -> list[frozenset[str]]:
        return list(dict.fromkeys(high for _, high in self.corners))

    @property
    def is_half(self) -> bool:
        return len(self.levels) < 2 ** len(self.factors)

    def variant(self, mixer: str, high: frozenset[str]) -> str:
        return corner_name(mixer, [part for part in self.factors if part in high])

    def terms(self) -> dict[str, tuple[str, ...]]:
        """Name main effects and two-part interactions, inseparable ones once."""
        terms: dict[str, tuple[str, ...]] = {part: (part,) for part in self.factors}
        known: set[frozenset[str]] = set()
        for pair in combinations(self.factors, 2):
            rest = tuple(part for part in self.factors if part not in pair)
            if frozenset(pair) not in known:
                known |= {frozenset(pair), frozenset(rest)} if self.is_half else {frozenset(pair)}
                terms[_term(pair) + (f", or {_term(rest)}: not separable" if self.is_half else "")] = pair
        return terms

    def contrast(self, parts: Sequence[str]) -> dict[frozenset[str], float]:
        signs = {high: math.prod(1 if part in high else -1 for part in parts) for high in self.levels}
        return {high: 2 * sign / len(signs) for high, sign in signs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    effects: list[Effect]
    mixers: list[str]
    """Mixers with nats at every corner; means are over these."""
    seeds: list[int]
    gaps: list[str]
    """A sentence for each corner without nats, and for the effects that need it."""


def effects_on_nats(factorial: Factorial, figures: Sequence[Figure], primary: Primary) -> Effects:
    """Mixers with a failed or missing corner are left out."""
    measured = by_variant(figures, primary)
    values: dict[Corner, dict[int, float]] = {}
    gaps, incomplete = [], dict.fromkeys(factorial.mixers, False)
    for mixer, high in factorial.corners:
        variant = factorial.variant(mixer, high)
        obstacle = _obstacle(measured.get(variant))
        if obstacle:
            gaps.append(f"{variant}: {obstacle}.")
            incomplete[mixer] = True
        else:
            values[mixer, high] = measured[variant].values
    complete = [mixer for mixer, lacks in incomplete.items() if not lacks]
    lacking = [mixer for mixer, lacks in incomplete.items() if lacks]
    if lacking:
        left = f"means over mixers are of {', '.join(complete)}" if complete else "no effect is left"
        gaps.append(f"Cannot be estimated: every effect with {', '.join(lacking)}; {left}.")
    kept = {corner: by_seed for corner, by_seed in values.items() if corner[0] in complete}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in kept.values()))) if kept else []
    if kept and len(seeds) < MIN_SEEDS:
        gaps.append(f"Cannot be estimated: the corners share {len(seeds)} seeds, and effects need {MIN_SEEDS}.")
    if len(seeds) < MIN_SEEDS:
        return Effects(effects=[], mixers=complete, seeds=seeds, gaps=gaps)
    nats = np.array([[by_seed[seed] for seed in seeds] for by_seed in kept.values()])
    return Effects(effects=_estimated(factorial, list(kept), nats, complete), mixers=complete, seeds=seeds, gaps=gaps)


def by_variant(figures: Sequence[Figure], primary: Primary) -> dict[str, Figure]:
    hardest = primary_figures(figures, primary, [figure.variant for figure in figures])
    return {name: figure for figure in hardest.values() for name in figure.names}


def _obstacle(figure: Figure | None) -> str:
    if figure is None:
        return "was not measured"
    if figure.num_diverged or not figure.values:
        # Diverged seeds have the nats of the unigram, which show no effect of a part.
        return figure.obstacle or f"diverged at {figure.num_diverged} of {sum(figure.statuses.values())} seeds"
    if len(figure.values) < MIN_SEEDS:
        return f"has {len(figure.values)} seed, and effects need {MIN_SEEDS}"
    return ""


def _estimated(
    factorial: Factorial, corners: Sequence[Corner], nats_CS: np.ndarray, mixers: Sequence[str]
) -> list[Effect]:
    # Slow to import.
    from statsmodels.regression.linear_model import OLS

    num_corners, num_seeds = nats_CS.shape
    # The first seed's block is 0: contrasts of means cancel a common shift.
    means, blocks = np.eye(num_corners).repeat(num_seeds, axis=0), np.tile(np.eye(num_seeds)[:, 1:], (num_corners, 1))
    fitted = OLS(nats_CS.ravel(), np.hstack([means, blocks])).fit(cov_type="HC3", use_t=True)
    names, weights = [], []
    for name, parts in factorial.terms().items():
        contrast = factorial.contrast(parts)
        of_mixer = {
            mixer: np.array([contrast[high] if other == mixer else 0.0 for other, high in corners]) for mixer in mixers
        }
        mean = np.mean(list(of_mixer.values()), axis=0)
        names.append((name, ""))
        weights.append(mean)
        if len(parts) == 1 and len(mixers) > 1:
            names += [(name, mixer) for mixer in mixers]
            weights += [one - mean for one in of_mixer.values()]
    padded = np.pad(np.array(weights), ((0, 0), (0, num_seeds - 1)))
    test = fitted.t_test(padded)
    intervals = test.conf_int(alpha=1 - CONFIDENCE)
    return [
        Effect(name=name, mixer=mixer, nats=float(effect), low=float(low), high=float(high))
        for (name, mixer), effect, (low, high) in zip(names, np.atleast_1d(test.effect), intervals, strict=True)
    ]


def _term(parts: Sequence[str]) -> str:
    return " × ".join(parts)
