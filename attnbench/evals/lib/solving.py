"""When a probe's training looks at validation data, when that has solved its task, and when it ends.

A training has reached the threshold when `selection` passes it at two checks in a row. It ends at MASTERED, or after
twice the steps that reaching it took: the constant rate then falls, inside the budget. Solved is a training that has
reached the threshold, and the accuracy of whose test data passes it in the end.
"""

from attnbench.training.checkpoint import TrainState

SOLVED = 0.95
"""Accuracy of what is solved."""

MASTERED = 0.99
"""Value of `selection` that ends the constant rate at once."""

CHECK_STEPS, EARLY_STEPS, LATE_FACTOR = 20, 400, 5
"""Steps between two checks, in the first EARLY_STEPS; a multiple of them later, where a training is slow anyway."""

STOP_RULE = {
    "solved": SOLVED,
    "mastered": MASTERED,
    "check_steps": CHECK_STEPS,
    "early_steps": EARLY_STEPS,
    "late_factor": LATE_FACTOR,
}
"""The rule by its numbers, see `results.protocol`."""


def is_check(step: int) -> bool:
    """Tell if `selection` is looked at after so many steps."""
    return step % (CHECK_STEPS if step <= EARLY_STEPS else LATE_FACTOR * CHECK_STEPS) == 0


def is_over(state: TrainState, selection: float) -> bool:
    """Keep in `state` what a check showed, and tell if the training has done its work."""
    if selection < SOLVED:
        state.passed_step = None
    elif state.passed_step is None:
        state.passed_step = state.step
    elif state.reached_step is None:
        state.reached_step = state.passed_step
    return selection >= MASTERED or (state.reached_step is not None and state.step >= 2 * state.reached_step)
