"""Windows and sensitivities of curves of scores by learning rate."""

import math

import pytest

from attnbench.verdict.rates import rate_dots, rate_sensitivity, rate_window


@pytest.mark.parametrize(
    ("scores", "window", "sensitivity"),
    [
        ({1e-3: 1.0, 1e-2: 1.0, 1e-1: 0.0}, 1.1, 1 / 3),
        # Two windows with a gap between them.
        ({1e-4: 1.0, 1e-3: 0.0, 1e-2: 1.0, 1e-1: 1.0}, 0.1 + 0.1 + 1, 1 / 3),
        # What failed is at 0, and what is more than a decade away says nothing about sensitivity.
        ({1e-4: None, 1e-3: 0.8, 1e-2: 0.72}, 1.1, 0.04),
        ({1e-3: 0.0, 1e-2: 0.0}, None, 0.0),
        ({1e-3: None, 1e-2: None}, None, None),
        ({1e-2: 1.0}, None, None),
    ],
)
def test_accuracies(scores, window, sensitivity):
    assert rate_window(scores, higher_is_better=True) == pytest.approx(window)
    assert rate_sensitivity(scores, 1e-2, higher_is_better=True) == pytest.approx(sensitivity)


def test_nats_are_near_the_best_within_a_tenth_of_perplexity_and_a_failed_rate_is_infinitely_bad():
    tenth = -math.log(0.9)
    scores = {1e-4: 3.0, 1e-3: 1.0 + 2 * tenth, 1e-2: 1.0, 1e-1: 1.0 + tenth}
    assert rate_window(scores, higher_is_better=False) == pytest.approx(0.5 + 1)
    assert rate_sensitivity(scores, 1e-2, higher_is_better=False) == pytest.approx(tenth)
    scores[1e-1] = None
    assert rate_window(scores, higher_is_better=False) == pytest.approx(0.5)
    assert rate_sensitivity(scores, 1e-2, higher_is_better=False) is None


def test_a_curve_has_a_dot_a_seed():
    assert rate_dots({"0.01": [0.9, None], "0.1": [0.5]}) == [(0.01, 0.9), (0.1, 0.5)]
