"""Comparison of a mixer, or of any operator, with its definition in float64: outputs, gradients, tolerances.

`by_definition` and `by_backend` compute both sides, `compare` the errors, and `TOLERANCES` limits them. Where an output
nearly vanishes, a norm behind it amplifies the rounding of q and k in any kernel. So `deviation` excuses an error if
the same rounding changes the definition nearly as much.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.machine.precision import computing, dtype_of
from attnbench.mixers.base import Mixer, checked_return
from attnbench.mixers.relative_errors import (
    SMALLEST_MATRIX,
    parameter_error,
    position_error,
    possible_norm,
    relative_error,
    worst,
)
from attnbench.settings.schema import MixerSettings, ModelSettings

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.03, "tf32": 0.01, "float16": 0.01}
"""Largest relative error |a - b| / |b| of an output or of an input's gradient, by precision."""

PART_FACTOR = 2.5
"""Largest error of a single position or of a parameter's gradient, in tolerances: these errors do not average out."""

LENGTHS = (1, 63, 65, 133, 257)
"""Lengths around the borders of chunks of 64 and with ragged ends."""

MODEL = ModelSettings(name="one layer", dim=128, num_layers=1, head_width=64, feed_forward_width=0)

BATCH_SIZE = 2

NUM_STEPS = 16
"""Number of single steps in `by_state`."""

INPUT_SCALE = 5.0
"""Factor on the input, so that gates and scores leave their linear range: near it the gradients of query and key are
too small beside the value's to show an error."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    name: str
    """Title of its lines; empty for the usual case."""
    head_width: int = MODEL.head_width
    lengths: Sequence[int] = LENGTHS
    precisions: Sequence[str] = ("float32", "bfloat16")
    input_scale: float = INPUT_SCALE
    options: dict[str, Any] = field(default_factory=dict)
    """Options that replace the yaml's; a mixer without such an option skips the case."""

    @property
    def slack(self) -> float:
        """Factor on all tolerances: a narrow head has fewer channels to average errors over."""
        return max(1.0, (MODEL.head_width / self.head_width) ** 0.5)

    def of(self, settings: MixerSettings) -> MixerSettings:
        return replace(settings, options={**settings.options, **self.options})

    @property
    def model(self) -> ModelSettings:
        return replace(MODEL, dim=2 * self.head_width, head_width=self.head_width)


USUAL = Case(name="")


class Computed(NamedTuple):
    """Output of a mixer and the gradients of a weighted sum of it, on the CPU."""

    output_BTD: Tensor
    input_gradient_BTD: Tensor
    parameter_gradients: dict[str, Tensor]
    parameter_terms: dict[str, float]
    """Root of the sum over the sequences of each gradient's squared norms."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Deviation:
    """Relative errors of a backend against the definition, see relative_errors.py."""

    output: float
    input_gradient: float
    position: float
    """Error of output or input gradient at the worst position."""
    parameter_gradient: float
    """Error of the worst parameter."""
    parameter: str
    is_beyond_rounding: bool = False
    """True if errors that rounding of the definition explains (ROUNDING_FACTOR) are left out."""

    def is_within(self, tolerance: float) -> bool:
        # Written so that a NaN, which compares false with everything, fails.
        return all(getattr(self, name) <= limit for name, limit in limits(tolerance).items())


def limits(tolerance: float) -> dict[str, float]:
    part = PART_FACTOR * tolerance
    return {"output": tolerance, "input_gradient": tolerance, "position": part, "parameter_gradient": part}


def by_definition(mixer: Mixer, length: int, case: Case = USUAL) -> Computed:
    """Compute `reference` and its gradients in float64, on the CPU: it has thousands of small operations."""
    where = next(mixer.parameters()).device if mixer.defines_itself else torch.device("cpu")
    wide = copy.deepcopy(mixer).to(where, torch.float64)
    x_BTD, weight_BTD = (x.double() for x in example(length, case.model.dim, where, case.input_scale))
    rows = []
    for x_1TD, weight_1TD in zip(x_BTD.split(1), weight_BTD.split(1), strict=True):
        x_1TD.requires_grad_()
        rows.append(_computed(wide, x_1TD, wide.reference(x_1TD), weight_1TD))
    names = rows[0].parameter_gradients
    return Computed(
        output_BTD=torch.cat([row.output_BTD for row in rows]),
        input_gradient_BTD=torch.cat([row.input_gradient_BTD for row in rows]),
        parameter_gradients={
            name: torch.stack([row.parameter_gradients[name] for row in rows]).sum(0) for name in names
        },
        parameter_terms={name: math.hypot(*(row.parameter_terms[name] for row in rows)) for name in names},
    )


def by_backend(mixer: Mixer, length: int, precision: str, case: Case = USUAL) -> Computed:
    """Compute the training forward and its gradients as a model does in `precision`. Weights in float64 or bfloat16
    stay so."""
    return _in_precision(mixer, lambda x_BTD: checked_return(mixer(x_BTD), x_BTD)[0], length, precision, case)


def by_rounded_definition(mixer: Mixer, length: int, precision: str, case: Case = USUAL) -> Computed:
    return _in_precision(mixer, mixer.reference, length, precision, case)


def deviation(
    mixer: Mixer, length: int, precision: str, case: Case = USUAL, expected: Computed | None = None
) -> Deviation:
    """Compare the mixer's backend with its definition, `expected` if already computed."""
    actual = by_backend(mixer, length, precision, case)
    expected = by_definition(mixer, length, case) if expected is None else expected
    plain, allowed = compare(actual, expected, case), limits(TOLERANCES[precision] * case.slack)
    if all(getattr(plain, part) <= limit for part, limit in allowed.items()):
        return plain
    held = compare(actual, expected, case, by_rounded_definition(mixer, length, precision, case))
    within = {part: getattr(plain, part) for part, limit in allowed.items() if getattr(plain, part) <= limit}
    return replace(held, **within)


def by_state(mixer: Mixer, length: int, precision: str) -> list[Tensor]:
    """Compute outputs through a state, (B, T, D) each and on the CPU: two pieces, and NUM_STEPS single steps."""
    x_BTD, _ = example(length, MODEL.dim, next(mixer.parameters()).device)
    x_BTD = x_BTD.to(dtype_of(precision))
    pieces = [length // 2, length - length // 2 - NUM_STEPS]
    with torch.no_grad(), computing(precision, x_BTD.device):
        y_BTD = in_pieces(mixer, x_BTD, [*pieces, *[1] * NUM_STEPS])
    return list(y_BTD.cpu().split([*pieces, NUM_STEPS], dim=1))


def in_pieces(mixer: Mixer, x_BTD: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the outputs of consecutive calls with a state; a piece of 1 is a step."""
    state = mixer.init_state(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype)
    outputs = []
    for piece_BTD in x_BTD.split(list(sizes), dim=1):
        if piece_BTD.shape[1] == 1:
            x_BD = piece_BTD[:, 0]
            y_BD, state = checked_return(mixer.step(x_BD, state), x_BD, "step")
            outputs.append(y_BD[:, None])
        else:
            y_BTD, state = checked_return(mixer(piece_BTD, state), piece_BTD, "forward with a state")
            outputs.append(y_BTD)
    return torch.cat(outputs, dim=1)


def example(length: int, dim: int, device: torch.device, scale: float = INPUT_SCALE) -> tuple[Tensor, Tensor]:
    """Return an input and the weights of the summed outputs, (B, T, D) float32 each."""
    # On the CPU: generators of two devices give different numbers.
    generator = torch.Generator().manual_seed(length)
    shape = (2, BATCH_SIZE, length, dim)
    x_BTD, weight_BTD = exact(torch.randn(shape, generator=generator)).to(device).unbind()
    return scale * x_BTD, weight_BTD


def exact(x: Tensor) -> Tensor:
    """Round x to numbers that bfloat16 has too."""
    return x.bfloat16().to(x.dtype)


def _in_precision(mixer: Mixer, form: Callable[[Tensor], Tensor], length: int, precision: str, case: Case) -> Computed:
    weight = next(mixer.parameters())
    inputs = example(length, case.model.dim, weight.device, case.input_scale)
    x_BTD, weight_BTD = (x.to(weight.dtype) for x in inputs)
    x_BTD.requires_grad_()
    with computing(precision, weight.device):
        output_BTD = form(x_BTD.to(torch.bfloat16) if precision == "bfloat16" else x_BTD)
        # Inside, because the products of the backward pass obey the same setting.
        return _computed(mixer, x_BTD, output_BTD, weight_BTD.to(output_BTD.dtype))


def _computed(mixer: Mixer, x_BTD: Tensor, output_BTD: Tensor, weight_BTD: Tensor) -> Computed:
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    of_input, *of_parameters = torch.autograd.grad(output_BTD, (x_BTD, *parameters), weight_BTD, materialize_grads=True)
    gradients = dict(zip(names, (gradient.cpu() for gradient in of_parameters), strict=True))
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    return Computed(output_BTD.detach().cpu(), of_input.cpu(), gradients, norms)


def compare(actual: Computed, expected: Computed, case: Case = USUAL, rounded: Computed | None = None) -> Deviation:
    """`rounded`, a `by_rounded_definition`, excuses some errors."""
    least = 1.0 if expected.output_BTD.shape[1] == 1 else SMALLEST_MATRIX
    by_name = {
        name: parameter_error(
            gradient,
            expected.parameter_gradients[name],
            expected.parameter_terms[name],
            possible_norm(gradient.numel(), expected.parameter_gradients.values()),
            case.head_width,
            least,
            None if rounded is None else rounded.parameter_gradients[name],
        )
        for name, gradient in actual.parameter_gradients.items()
    }
    largest = worst(by_name.values())
    name = next(name for name, error in by_name.items() if error == largest or math.isnan(error))
    excuses = (None, None) if rounded is None else rounded[:2]
    by_input = list(zip(actual[:2], expected[:2], excuses, strict=True))
    output, input_gradient = (relative_error(a, b, rounded=r) for a, b, r in by_input)
    return Deviation(
        output=output,
        input_gradient=input_gradient,
        position=worst(position_error(a, b, r) for a, b, r in by_input),
        parameter_gradient=largest,
        parameter=name,
        is_beyond_rounding=rounded is not None,
    )
