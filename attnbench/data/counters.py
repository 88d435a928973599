"""Random numbers without a generator: a number is a hash of its counters, whatever else was drawn.

torch's int64 arithmetic wraps around exactly, so every device gives the same numbers.
"""

import torch
from torch import Tensor


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), with the multipliers and
# shifts of David Stafford's "Mix13".
INCREMENT = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = _signed(0x94D049BB133111EB)


def hashed(state: Tensor | int, *counters: Tensor | int) -> Tensor:
    """Hash all arguments to int64 over their broadcast shape; all 64 bits are random.

    `hashed(state, i)` is what SplitMix64, seeded with `state`, returns at call i, from 0. Each further counter starts
    from the hash of those before it.
    """
    hash_ = torch.as_tensor(state)
    for counter in counters:
        hash_ = _mix(hash_ + _spread(counter))
    return hash_


def _spread(counter: Tensor | int) -> Tensor | int:
    if isinstance(counter, Tensor):
        return (counter + 1) * INCREMENT
    # A Python integer does not wrap around; a tensor of it could be on another device.
    return _signed((counter + 1) * INCREMENT % 2**64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * FIRST_FACTOR
    x = (x ^ _shifted(x, 27)) * SECOND_FACTOR
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own shift copies the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
