"""Error and power of the ladder's verdicts by simulation, as a Markdown table: `python tools/simulate_ladder.py`.

Doublings are simulated, the test is that of attnbench/verdict: a number here is a property of the rules alone.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from attnbench.results.protocol import SIGNIFICANCE
from attnbench.verdict.levels import UNPAIRED

NUM_SEEDS, SPREAD = 8, 0.3
"""Seeds of a variant, and the standard deviation of its doublings where nothing fails."""

FAILING = 1 / 12
"""Probability that a seed fails: it holds no level."""

PAIRS = 60
"""Pairs of a family: all of six variants, at four probes."""

Draw = Callable[[np.random.Generator, float, tuple[int, ...]], np.ndarray]
"""Draws doublings of this mean."""


def normal(spread: float) -> Draw:
    return lambda rng, mean, shape: rng.normal(mean, spread, shape)


def two_peaked(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw scores of which half lie a doubling above the mean, and half a doubling below."""
    return rng.normal(mean, SPREAD / 3, shape) + rng.choice([-1.0, 1.0], shape)


def failing(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw scores of which one in twelve is of a seed that failed, so that the others lie above the mean."""
    fails = rng.random(shape) < FAILING
    return np.where(fails, 0.0, rng.normal(mean / (1 - FAILING), SPREAD, shape))


usual = normal(SPREAD)

SHAPES: dict[str, tuple[Draw, Draw]] = {
    "normal, equal spreads": (usual, usual),
    "normal, one spread three times the other": (normal(SPREAD / 3), usual),
    "normal, one spread ten times the other": (normal(SPREAD / 10), usual),
    "two-peaked": (two_peaked, two_peaked),
    "two-peaked against normal": (two_peaked, usual),
    "one failing seed in twelve": (failing, failing),
    "one failing seed in twelve against none": (failing, usual),
}
"""How the doublings of the two variants of a pair are drawn."""


def rejected(shape: str, effect: float, levels: Sequence[float], number: int, seed: int = 0) -> list[float]:
    """Return the shares of simulated pairs that are found to differ at each level, the second variant being `effect`
    better."""
    rng, (first, second) = np.random.default_rng(seed), SHAPES[shape]
    size = (number, NUM_SEEDS)
    pairs = zip(first(rng, 4.0, size), second(rng, 4.0 + effect, size), strict=True)
    p_values = np.array([UNPAIRED.p_value(pair, resolution=0) for pair in pairs])
    return [float(np.mean(p_values <= level)) for level in levels]


def table(number: int) -> str:
    levels = (SIGNIFICANCE, SIGNIFICANCE / PAIRS)
    lines = [
        f"| doublings of {NUM_SEEDS} seeds | error at {SIGNIFICANCE} | error at {SIGNIFICANCE}/{PAIRS} "
        "| power for 0.5, 1 and 2 doublings at that level |",
        "| --- | --: | --: | --: |",
    ]
    for shape in SHAPES:
        errors = rejected(shape, 0.0, levels, number)
        powers = [rejected(shape, effect, levels[1:], number, seed=1)[0] for effect in (0.5, 1.0, 2.0)]
        shown = ", ".join(f"{power:.2f}" for power in powers)
        lines.append(f"| {shape} | {errors[0]:.3f} | {errors[1]:.4f} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000, help="simulated pairs for each figure")
    print(table(parser.parse_args().number))
