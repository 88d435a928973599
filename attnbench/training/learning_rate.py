"""Learning rates by step, and the last step of a training that stops early."""

import math

import torch
from torch import Tensor

from attnbench.settings.schema import TrainSettings

MIN_DECAY_STEPS = 100
"""Fewest steps of the decay after a constant rate."""


def learning_rates(settings: TrainSettings, num_steps: int, steps: range | None = None) -> Tensor:
    """Return the learning rates of steps (by default all): a linear warm-up, then a decay to `final_rate_fraction`.

    The decay is a cosine over all remaining steps or, with `decay_fraction`, linear over the last steps after a
    constant rate (0: none, 1: from the warm-up on); rates before it do not depend on `num_steps`, which `shortened` may
    lower. With `rate_interval_steps` n, the rate changes at every n-th step alone.
    """
    warmup = min(settings.warmup_steps, num_steps)
    floor = settings.learning_rate * settings.final_rate_fraction
    decay = num_decay_steps(settings, num_steps)
    rates = []
    interval = settings.rate_interval_steps or 1
    for step in steps if steps is not None else range(num_steps):
        step -= step % interval
        if step < warmup:
            rates.append(settings.learning_rate * (step + 1) / warmup)
        elif decay is None:
            progress = (step - warmup) / max(1, num_steps - 1 - warmup)
            rates.append(floor + (settings.learning_rate - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        else:
            share = min(1.0, (num_steps - 1 - step) / max(1, decay)) if settings.decay_fraction else 1.0
            rates.append(floor + (settings.learning_rate - floor) * share)
    return torch.tensor(rates, dtype=torch.float32)


def num_decay_steps(settings: TrainSettings, num_steps: int) -> int | None:
    """Return the number of steps of the linear decay, outside the warm-up; None: a cosine."""
    if settings.decay_fraction is None:
        return None
    wanted = max(MIN_DECAY_STEPS, math.ceil(num_steps * settings.decay_fraction)) if settings.decay_fraction else 0
    return min(wanted, max(0, num_steps - settings.warmup_steps))


def shortened(settings: TrainSettings, num_steps: int, step: int) -> int:
    """Return the last step, at most `num_steps`, of a training whose rate begins to decay after `step`."""
    assert settings.decay_fraction is not None
    fall = math.ceil(step * settings.decay_fraction / (1 - settings.decay_fraction))
    return min(num_steps, max(step, settings.warmup_steps) + max(MIN_DECAY_STEPS, fall))
