"""Settings that several probes have: their rates, the initial weights, and options that they ask of a mixer."""

from itertools import pairwise
from typing import Any

from attnbench.mixers.around import Gate
from attnbench.mixers.layers import INITIAL_DEVIATION
from attnbench.settings.check import check_value
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PRECISIONS


def probe_deviation(group: str, given: float | None, width: int) -> float:
    """Standard deviation of a probe's projections: the given one, or 0.02 × sqrt(768 / width).

    GPT-2's 0.02 is that of a model 768 wide. At the width of a probe, scores would start so near to 0 that some seeds
    spend hundreds of steps there, and more than a thousand on long sequences.
    """
    check_value(f"{group}.initial_deviation", given, above=0)
    return INITIAL_DEVIATION * (768 / width) ** 0.5 if given is None else given


def mixer_wishes(conv_size: int | None, output_gate: Gate | None) -> dict[str, Any]:
    """Options that a probe asks of every mixer that has them, see Task.mixer_options; null asks nothing."""
    wishes = {"conv_size": conv_size, "output_gate": output_gate}
    return {name: value for name, value in wishes.items() if value is not None}


def check_training(group: str, learning_rates: list[float], precision: str) -> None:
    """Raise UserError for a grid of rates that does not rise, or a precision that no probe has."""
    check_value(f"{group}.learning_rates", learning_rates, kind=list[float], distinct=True, above=0)
    if any(rate >= after for rate, after in pairwise(learning_rates)):
        raise UserError(f"{group}.learning_rates={learning_rates}: must rise from one to the next")
    check_value(f"{group}.precision", precision, choices=("auto", *PRECISIONS))
