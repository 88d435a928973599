"""Checks of settings that several evaluations have; each raises a UserError with setting, value and what is allowed."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from attnbench.mixers.layers import INITIAL_DEVIATION
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRECISIONS


def check_counts(prefix: str, minimum: int = 1, **values: int | None) -> None:
    """Whole numbers of at least `minimum`; null passes."""
    for name, value in values.items():
        if value is not None and value < minimum:
            raise UserError(f"{prefix}{name}={value}: must be at least {minimum}")


def check_different_counts(name: str, values: Any) -> None:
    """A list of different positive whole numbers, one at least."""
    if not (isinstance(values, list) and values and all(is_count(value) for value in values)):
        raise UserError(f"{name}={values}: must be a list of positive whole numbers")
    if len(set(values)) < len(values):
        raise UserError(f"{name}={values}: names one of them twice")


def is_count(value: Any) -> bool:
    """Whether it is a positive whole number."""
    return type(value) is int and value > 0


def probe_deviation(prefix: str, given: float | None, width: int) -> float:
    """Of a probe's projections: what is given, or 0.02 × sqrt(768 / width).

    GPT-2's 0.02 is that of a model 768 wide. At the width of a probe, scores would start so near to 0 that some seeds
    spend hundreds of steps there, and more than a thousand on long sequences.
    """
    if given is not None and not 0 < given < math.inf:
        raise UserError(f"{prefix}initial_deviation={given}: must be a positive number, or null")
    return INITIAL_DEVIATION * (768 / width) ** 0.5 if given is None else given


def mixer_wishes(conv_size: int | None, output_gate: bool | None) -> dict[str, Any]:
    """What a probe asks of every mixer that has the setting, see Task.mixer_options; null asks nothing."""
    wishes = {"conv_size": conv_size, "output_gate": output_gate}
    return {name: value for name, value in wishes.items() if value is not None}


def check_training(prefix: str, learning_rates: Any, precision: str) -> None:
    """The grid of rates and the precision of a probe."""
    numbers = isinstance(learning_rates, list) and all(type(rate) in (int, float) for rate in learning_rates)
    if not (numbers and learning_rates and all(0 < rate < math.inf for rate in learning_rates)):
        raise UserError(f"{prefix}learning_rates={learning_rates}: must be a list of positive numbers")
    if any(rate >= after for rate, after in pairwise(learning_rates)):
        raise UserError(f"{prefix}learning_rates={learning_rates}: must rise from one to the next")
    check_choice(f"{prefix}precision", precision, ("auto", *PRECISIONS))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise UserError(f"{name}={value}: must be one of {', '.join(choices)}")
