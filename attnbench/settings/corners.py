"""Factorial plans: every variant with each combination of parts, or with half of the combinations.

A corner is named after its variant and the parts at their second level: `linear`, `linear+gate`. The half fraction of k
parts has the defining relation I = (product of all parts): it keeps the 2^(k-1) corners with an even number of parts at
their second level, and aliases every effect with that of all other parts.
"""

from collections.abc import Mapping, Sequence
from itertools import product

from attnbench.settings.errors import UserError

FRACTIONS = ("full", "half")
SIGN = "+"
"""Separates the names of a variant and its parts."""

MIN_HALVED = 4
"""Parts of a half fraction: with three, each main effect would be aliased with a two-part interaction."""


def expand(variants: Mapping[str, list[str]], factors: Mapping[str, list[str]], fraction: str) -> dict[str, list[str]]:
    """Return every variant at every corner, in the order of the variants.

    Args:
        variants: name to words of a command line.
        factors: part to two words, its levels; corners are named after the second.
    """
    _check(variants, factors, fraction)
    return {
        corner_name(variant, high): [*words, *(levels[part in high] for part, levels in factors.items())]
        for variant, words in variants.items()
        for high in corners(list(factors), fraction)
    }


def corners(factors: Sequence[str], fraction: str) -> list[tuple[str, ...]]:
    levels = product((False, True), repeat=len(factors))
    high = [tuple(part for part, is_high in zip(factors, row, strict=True) if is_high) for row in levels]
    return [parts for parts in high if fraction == "full" or len(parts) % 2 == 0]


def corner_name(variant: str, high: Sequence[str]) -> str:
    return SIGN.join([variant, *high])


def _check(variants: Mapping[str, list[str]], factors: Mapping[str, list[str]], fraction: str) -> None:
    if fraction not in FRACTIONS:
        raise UserError(f"plan.fraction={fraction}: must be one of {', '.join(FRACTIONS)}")
    if len(factors) < 2:
        raise UserError(f"plan.factors={factors}: must name at least two parts")
    if fraction == "half" and len(factors) < MIN_HALVED:
        raise UserError(
            f"plan.fraction=half: needs at least {MIN_HALVED} parts, as of {len(factors)} a main effect could not be "
            "told from an interaction of two parts; fraction=full has all corners"
        )
    for part, levels in factors.items():
        if len(set(levels)) != 2 or len(levels) != 2:
            raise UserError(f"plan.factors.{part}={levels}: must be two different words of a command line")
    for name in (*variants, *factors):
        if SIGN in name:
            raise UserError(f"plan: {name} has a {SIGN}, which in a factorial stands between a variant and its parts")
