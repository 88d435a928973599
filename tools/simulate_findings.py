"""Error and power of the tests of claims, by simulation, as Markdown tables: `python tools/simulate_findings.py`.

The first table is of shares: each seed learns the task with the true share, and scores 1 or 0. The others are of scores
about a mean, with a spread of 1: normal, with three times the spread on one side, with two peaks, and with one seed in
twelve that fails, four spreads below the others.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from attnbench.verdict import contrasts
from attnbench.verdict.contrasts import HOLDS, LEVEL, OPPOSITE, Found
from attnbench.verdict.levels import UNPAIRED

SHARES = [round(0.1 * tenth, 1) for tenth in range(11)]

Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.normal(size=num)


def wide(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.normal(scale=3, size=num)


def two_peaked(rng: np.random.Generator, num: int) -> np.ndarray:
    """Half of the seeds around -1, half around 1."""
    return rng.choice([-0.98, 0.98], size=num) + rng.normal(scale=0.2, size=num)


def failing(rng: np.random.Generator, num: int) -> np.ndarray:
    """One seed in twelve fails; the mean is 0."""
    return rng.normal(size=num) - 4 * (rng.random(num) < 1 / 12) + 4 / 12


SCORES: dict[str, tuple[Draw, Draw]] = {
    "normal": (normal, normal),
    "three times the spread": (wide, normal),
    "two peaks": (two_peaked, two_peaked),
    "one failing in twelve": (failing, failing),
}
"""Scores of the first and of the second variant; the first is also the one whose value is published."""


@cache
def share(kind: str, first: int, second: int, num: int) -> Found:
    """What a contrast finds where so many of `num` seeds have learned the task."""
    scores = [[1.0] * count + [0.0] * (num - count) for count in (first, second)]
    if kind == "difference":
        return contrasts.difference(*scores, 0.5)
    if kind == "best_of":
        return contrasts.best_of(scores[0], 0.5, 3)
    return contrasts.existence(scores[0], 0.5, claimed=kind == "existence")


def shares(kind: str, first: float, second: float, num: int, num_draws: int) -> dict[str, float]:
    """Shares of draws in which a contrast of solved seeds holds, and in which its opposite does."""
    rng = np.random.default_rng(0)
    found = [share(kind, *map(int, rng.binomial(num, [first, second])), num) for _ in range(num_draws)]
    holds = [it.outcome == HOLDS if it.p_value is None else it.p_value <= LEVEL for it in found]
    opposite = [it.outcome == OPPOSITE if it.opposite_p_value is None else it.opposite_p_value <= LEVEL for it in found]
    return {HOLDS: float(np.mean(holds)), OPPOSITE: float(np.mean(opposite))}


def order(kind: str, effect: float, num: int, num_draws: int) -> float:
    """Share of draws in which an order is significant; the means differ by so many spreads."""
    rng, (first, second) = np.random.default_rng(0), SCORES[kind]
    drawn = ((first(rng, num) + effect, second(rng, num)) for _ in range(num_draws))
    return float(np.mean([UNPAIRED.one_sided(pair, 0.0)[0] <= LEVEL for pair in drawn]))


def value(kind: str, gap: float, margin: float, num: int, num_draws: int) -> float:
    """Share of draws in which a value holds; the mean is so many margins from the published one."""
    rng, (first, _) = np.random.default_rng(0), SCORES[kind]
    drawn = (contrasts.value(first(rng, num).tolist(), gap * margin, margin) for _ in range(num_draws))
    return float(np.mean([it.outcome == HOLDS for it in drawn]))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    table(
        ["true share", "existence, 5 seeds", "10 seeds", "20 seeds", "claimed none, 10 seeds: holds", "contradicted",
         "difference from 0, 5 seeds", "10 seeds", "20 seeds", "from an equal share, 10 seeds", "best of 3, 10 seeds"],
        [[it, *(shares("existence", it, 0, num, draws)[HOLDS] for num in (5, 10, 20)),
          *shares("none", it, 0, 10, draws).values(),
          *(shares("difference", it, 0, num, draws)[HOLDS] for num in (5, 10, 20)),
          shares("difference", it, it, 10, draws)[HOLDS], shares("best_of", it, 0, 10, draws)[HOLDS]]
         for it in SHARES],
    )  # fmt: skip
    effects = (0, 1, 2, 3)
    table(
        ["scores", *(f"order, {num} seeds, {effect} spreads" for num in (5, 8) for effect in effects)],
        [[name, *(order(name, effect, num, draws) for num in (5, 8) for effect in effects)] for name in SCORES],
    )
    gaps = (0, 1, 2, 3)
    table(
        ["scores", *(f"value, {num} seeds, {gap} margins off" for num in (5, 10) for gap in gaps)],
        [[name, *(value(name, gap, 1, num, draws) for num in (5, 10) for gap in gaps)] for name in SCORES],
    )


def table(headers: Sequence[str], lines: Sequence[Sequence[float | str]]) -> None:
    """Print a table of Markdown and an empty line."""
    print(f"| {' | '.join(headers)} |\n|{' --: |' * len(headers)}")
    for name, *numbers in lines:
        print(f"| {name} | {' | '.join(f'{float(number):.2f}' for number in numbers)} |")
    print(flush=True)


if __name__ == "__main__":
    main()
