"""The learning rate of each step, and the last step of a training that stops early."""

import math

import torch
from torch import Tensor

from attnbench.settings.schema import TrainSettings

MIN_DECAY_STEPS = 100
"""Least number of steps over which a constant rate falls at the end."""


def learning_rates(settings: TrainSettings, num_steps: int, steps: range | None = None) -> Tensor:
    """The rates of a training's steps, one a step: a linear warm-up, then a fall to `final_rate_fraction`.

    The fall is a cosine over all steps that are left or, with `decay_fraction`, a line over the last of them behind a
    constant rate. Before that line a rate does not depend on `num_steps`, which `shortened` may still lower.

    Args:
        steps: those whose rates are wanted, from 0; None: all `num_steps` of them.
    """
    warmup = min(settings.warmup_steps, num_steps)
    floor = settings.learning_rate * settings.final_rate_fraction
    decay = num_decay_steps(settings, num_steps)
    rates = []
    for step in steps if steps is not None else range(num_steps):
        if step < warmup:
            rates.append(settings.learning_rate * (step + 1) / warmup)
        elif decay is None:
            progress = (step - warmup) / max(1, num_steps - 1 - warmup)
            rates.append(floor + (settings.learning_rate - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        else:
            share = min(1.0, (num_steps - 1 - step) / max(1, decay))
            rates.append(floor + (settings.learning_rate - floor) * share)
    return torch.tensor(rates, dtype=torch.float32)


def num_decay_steps(settings: TrainSettings, num_steps: int) -> int | None:
    """Number of steps at the end over which a constant rate falls, none of the warm-up among them; None: a cosine."""
    if settings.decay_fraction is None:
        return None
    wanted = max(MIN_DECAY_STEPS, math.ceil(num_steps * settings.decay_fraction))
    return min(wanted, max(0, num_steps - settings.warmup_steps))


def shortened(settings: TrainSettings, num_steps: int, step: int) -> int:
    """Return the last step of a training whose rate begins to fall after `step`, the fall inside `num_steps`."""
    assert settings.decay_fraction is not None
    fall = math.ceil(step * settings.decay_fraction / (1 - settings.decay_fraction))
    return min(num_steps, max(step, settings.warmup_steps) + max(MIN_DECAY_STEPS, fall))
