"""Rules for validating, solving and ending a probe's training.

A training has reached the threshold when `selection` passes it at two checks in a row. It ends at MASTERED, or after
twice the steps to the threshold. It is solved if its accuracy on test data passes the threshold too.
"""

from collections.abc import Iterable

from attnbench.results.numbers import reaches
from attnbench.training.checkpoint import TrainState

SOLVED = 0.95

MASTERED = 0.99
"""Value of `selection` that ends the constant rate at once."""

CHECK_STEPS, EARLY_STEPS, LATE_FACTOR = 20, 400, 5
"""Steps between two checks in the first EARLY_STEPS, and its multiple later."""

STOP_RULE = {
    "solved": SOLVED,
    "mastered": MASTERED,
    "check_steps": CHECK_STEPS,
    "early_steps": EARLY_STEPS,
    "late_factor": LATE_FACTOR,
}
"""The rule by its numbers, see `results.protocol`."""

RISE = (0.1, 0.9)
"""Values of `selection` that a rise in accuracy is timed between."""


def stop_rule(interval: int | None) -> dict[str, float]:
    """Return the rule's numbers for `interval` steps between checks; None: STOP_RULE."""
    return STOP_RULE if interval is None else {**STOP_RULE, "check_steps": interval, "late_factor": 1}


def is_check(step: int, interval: int | None = None) -> bool:
    if interval is not None:
        return step % interval == 0
    return step % (CHECK_STEPS if step <= EARLY_STEPS else LATE_FACTOR * CHECK_STEPS) == 0


def rise_share(selections: Iterable[tuple[int, float]]) -> float | None:
    """Return the share of the steps to the upper end of RISE that lie between its ends, from step and value of every
    check; None if no check reached it."""
    low, high = RISE
    begun = None
    for step, selection in selections:
        begun = step if begun is None and reaches(selection, low) else begun
        if begun is not None and reaches(selection, high):
            return (step - begun) / step
    return None


def is_over(state: TrainState, selection: float) -> bool:
    """Record a check in `state`; True if the training has done its work."""
    if not reaches(selection, SOLVED):
        state.passed_step = None
    elif state.passed_step is None:
        state.passed_step = state.step
    elif state.reached_step is None:
        state.reached_step = state.passed_step
    return reaches(selection, MASTERED) or (state.reached_step is not None and state.step >= 2 * state.reached_step)
