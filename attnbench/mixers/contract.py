"""Checks of a mixer's contract. A check returns the fault of a broken promise, or an empty string; an exception breaks
the promise too. The tests run all checks on every yaml of conf/attn, `attnbench doctor` on mixers from outside."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from attnbench.mixers.base import Mixer, checked_return, state_bytes
from attnbench.mixers.causality import (
    LEAK,
    POSITIONS,
    differences,
    gradient_in,
    input_of,
    largest_difference,
    seen_of_the_future,
)
from attnbench.mixers.definition import (
    INPUT_SCALE,
    TOLERANCES,
    USUAL,
    Case,
    by_backend,
    by_definition,
    compare,
    in_pieces,
)
from attnbench.mixers.flops import UncountableError, counted_mixing
from attnbench.ops.common.precision import accumulation_dtype
from attnbench.settings.registry import is_own

LONGEST = 133
"""Positions over two chunks of 64 with a ragged end."""

ALL_LENGTHS = replace(USUAL, lengths=(1, 63, 64, 65, LONGEST))
"""Case with lengths around and beyond a chunk of 64."""

FORGETTING_SCALE = 8 * INPUT_SCALE
"""Factor on the input that gives log decays of nearly 0 and far below -5 side by side."""

FLOP_LENGTHS = (31, 127)
"""Primes, see OperationCounter. A quadratic count is 17 times as large at the second."""
MAX_FLOP_RATIO = 1.5
MAX_GROWTH_DIFFERENCE = 0.2
"""Between exponents of the growth: n log n is 0.2 above n here."""


class Promise(NamedTuple):
    words: str
    check: Callable[[Mixer, Case], str]
    """Function of a mixer and a case that returns the fault, or an empty string."""
    needs_state: bool = False
    """True if a backend that only trains need not keep it."""


def shape_and_dtype(mixer: Mixer, case: Case) -> str:
    for length in case.lengths:
        x_BTD = input_of(mixer, length, case.model.dim)
        y_BTD, state = checked_return(mixer(x_BTD), x_BTD)
        if y_BTD.dtype != x_BTD.dtype:
            return f"an input of {x_BTD.dtype} became {y_BTD.dtype}"
        if state is not None:
            return "a forward pass without a state returns one"
        if not y_BTD.isfinite().all():
            return f"at length {length} the output is not finite"
    return ""


def causality(mixer: Mixer, case: Case) -> str:
    """Check causality: exactly for a mixer of attnbench, within rounding for another."""
    is_exact = is_own(type(mixer).__module__) and not mixer.defines_itself
    return seen_of_the_future(mixer, case.model.dim, LONGEST, is_exact=is_exact)


def past(mixer: Mixer, case: Case) -> str:
    x_BTD = input_of(mixer, LONGEST, case.model.dim)
    position = POSITIONS[-1]
    gradient_BTD = gradient_in(mixer(x_BTD.requires_grad_())[0][:, position], x_BTD)
    return "" if gradient_BTD[:, :position].any() else f"position {position} sees no position before it"


def independence(mixer: Mixer, case: Case) -> str:
    x_BTD = input_of(mixer, 70, case.model.dim)
    y_BTD, _ = mixer(x_BTD.requires_grad_())
    for index, other in ((0, 1), (1, 0)):
        gradient_BTD = gradient_in(y_BTD[index], x_BTD)
        share = float(gradient_BTD[other].norm() / gradient_BTD.norm())
        if not share <= LEAK["float32"]:
            return f"sequence {index} of a batch sees sequence {other}: {share:.1e} of its gradient is there"
        alone_BTD, _ = mixer(x_BTD[index : index + 1].detach())
        error = largest_difference(alone_BTD, y_BTD[index : index + 1])
        if not error <= _tolerance(mixer):
            return f"a sequence alone differs by {error:.1e} from the same in a batch"
    return ""


def definition(mixer: Mixer, case: Case) -> str:
    allowed = _tolerance(mixer)
    for length in case.lengths:
        actual, expected = by_backend(mixer, length, "float32", case), by_definition(mixer, length, case)
        errors = compare(actual, expected, case)
        if not errors.is_within(allowed):
            return (
                f"at length {length} forward differs from reference by {errors.output:.1e} in the output, "
                f"{errors.input_gradient:.1e} in the input's gradient, {errors.position:.1e} at a single position, "
                f"{errors.parameter_gradient:.1e} in the gradient of {errors.parameter}"
            )
    return ""


def forgetting(mixer: Mixer, case: Case) -> str:
    """Check `log_decay`'s shape and sign, and the definition again with decays that clear the memory: an exponential
    that overflows behind a mask leaves outputs right and gradients wrong."""
    x_BTD = input_of(mixer, 3, case.model.dim)
    decay = mixer.log_decay(x_BTD)
    if decay is None:
        return ""
    shape = tuple(decay.shape)
    if decay.ndim not in (3, 4) or shape[:2] != x_BTD.shape[:2]:
        return f"log_decay of {tuple(x_BTD.shape)} is {shape}, not (B, T, H) or (B, T, H, K)"
    if not (decay <= 0).all():
        return f"log_decay is up to {float(decay.max()):.3g}; a logarithm of what the memory keeps is at most 0"
    # In float32 at least: saturated gates leave gradients of bfloat16 few digits.
    wide = mixer.to(accumulation_dtype(next(mixer.parameters()).dtype))
    broken = definition(wide, replace(case, input_scale=FORGETTING_SCALE, lengths=case.lengths[-1:]))
    return broken and f"where it forgets, {broken}"


def pieces(mixer: Mixer, case: Case) -> str:
    with torch.no_grad():
        for length in case.lengths:
            x_BTD = input_of(mixer, length, case.model.dim)
            whole_BTD, _ = mixer(x_BTD)
            for words, sizes in _cuts(length):
                error_T = differences(in_pieces(mixer, x_BTD, sizes), whole_BTD)
                wrong = [index for index, error in enumerate(error_T) if not error <= _tolerance(mixer)]
                if wrong:
                    return (
                        f"{length} positions {words} differ from the whole, from position {wrong[0]} on, "
                        f"by up to {float(error_T.max()):.1e}"
                    )
    return ""


def _cuts(length: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    third = max(length // 3, 1)
    thirds = (third,) * (length // third) + (length % third,) * (length % third > 0)
    yield "read into a state at once", (length,)
    yield "in single steps", (1,) * length
    yield f"in pieces of {third}", thirds
    if length == LONGEST:
        for sizes in ((64, 65, 1, 3), (1, 1, 63, 68)):
            yield f"in pieces of {', '.join(map(str, sizes))}", sizes


def state(mixer: Mixer, case: Case) -> str:
    """Check that calls update the state in place, and that it grows with `max_length` as the class says."""
    x_BTD = input_of(mixer, 71, case.model.dim)
    short, long = (state_bytes(mixer.init_state(1, length, x_BTD.dtype)) for length in (64, 128))
    if (long > short) != mixer.state_grows or long < short:
        return f"state_grows is {mixer.state_grows}, and it has {short} bytes for 64 positions, {long} for 128"
    with torch.no_grad():
        carried = mixer.init_state(x_BTD.shape[0], 71, x_BTD.dtype)
        addresses = [tensor.data_ptr() for tensor in carried]
        _, carried = checked_return(mixer(x_BTD[:, :70], carried), x_BTD[:, :70], "forward with a state")
        _, after = checked_return(mixer.step(x_BTD[:, 70], carried), x_BTD[:, 70], "step")
    if any([tensor.data_ptr() for tensor in one] != addresses for one in (carried, after)):
        return "the state that comes out lies elsewhere than the one that was given"
    return "" if any(tensor.any() for tensor in after) else "after 71 positions the state is all zeros"


def gradients(mixer: Mixer, case: Case) -> str:
    x_BTD = input_of(mixer, 70, case.model.dim)
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    total = mixer(x_BTD)[0].square().sum()
    by_name = dict(zip(names, torch.autograd.grad(total, parameters, allow_unused=True), strict=True))
    missing = [name for name, gradient in by_name.items() if gradient is None or not gradient.any()]
    infinite = [name for name, gradient in by_name.items() if gradient is not None and not gradient.isfinite().all()]
    if missing:
        return f"{', '.join(missing)} gets no gradient"
    return f"{', '.join(infinite)} gets a gradient that is not finite" if infinite else ""


def flops(mixer: Mixer, case: Case) -> str:
    """Compare `mixing_flops` with the definition's operations, in growth and, within MAX_FLOP_RATIO, in size."""
    if mixer.defines_itself:
        return ""
    given = [mixer.mixing_flops(length) for length in FLOP_LENGTHS]
    try:
        counted = [counted_mixing(mixer, length, case.model.dim) for length in FLOP_LENGTHS]
    except UncountableError as error:
        if not any(given):
            return ""
        return (
            f"the definition runs {error}, whose operations cannot be counted; return None from mixing_flops, or "
            "give torch.utils.flop_counter.register_flop_formula their number"
        )
    stated = [number for number in given if isinstance(number, int) and number > 0]
    if len(stated) < len(given):
        return f"mixing_flops({FLOP_LENGTHS[0]}) is {given[0]!r}, not a positive integer"
    words = f"mixing_flops({FLOP_LENGTHS[-1]}) is {stated[-1]:,}, and the definition does {counted[-1]:,.0f} operations"
    if min(counted) <= 0:
        return f"{words} that are not of a matrix used once a position"
    growth, expected = (math.log(b / a) / math.log(FLOP_LENGTHS[1] / FLOP_LENGTHS[0]) for a, b in (stated, counted))
    if abs(growth - expected) > MAX_GROWTH_DIFFERENCE:
        return f"{words}; it grows as length^{growth:.2f}, they as length^{expected:.2f}"
    ratio = stated[-1] / counted[-1]
    return "" if 1 / MAX_FLOP_RATIO <= ratio <= MAX_FLOP_RATIO else f"{words}, {1 / ratio:.2g} times as many"


PROMISES = (
    Promise("keeps shape and dtype", shape_and_dtype),
    Promise("sees nothing of the future", causality),
    Promise("sees something of the past", past),
    Promise("keeps sequences of a batch apart", independence),
    Promise("equals its definition", definition),
    Promise("equals it where it forgets", forgetting),
    Promise("whole = pieces = single steps", pieces, needs_state=True),
    Promise("updates its state in place", state, needs_state=True),
    Promise("trains every parameter", gradients),
    Promise("states the FLOPs of its mixing", flops),
)


def _tolerance(mixer: Mixer) -> float:
    return TOLERANCES[str(next(mixer.parameters()).dtype).removeprefix("torch.")]
