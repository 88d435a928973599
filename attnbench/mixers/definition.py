"""Comparison of a mixer, or of any operator, with its definition in float64: outputs, gradients, tolerances.

The doctor, the gate of the benches and the tests all compare through this file. `by_definition` and `by_backend`
compute both sides, `compare` the errors, and `TOLERANCES` limits them.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.machine.precision import computing, dtype_of
from attnbench.mixers.base import Mixer
from attnbench.settings.schema import MixerSettings, ModelSettings

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.03, "tf32": 0.01, "float16": 0.01}
"""Largest relative error |a - b| / |b| of an output or of an input's gradient, by precision."""

PART_FACTOR = 2.5
"""Largest error of a single position or of a parameter's gradient, in tolerances: in a part errors do not average out,
and the terms that a parameter sums over positions cancel."""

SMALLEST_MATRIX, SMALLEST_VECTOR = 0.1, 0.01
"""Smallest norms that a parameter's gradient is measured by, as shares of `possible_norm`. A smaller gradient is mostly
rounding, as a query's that sees one key alone. Terms of a vector cancel more, so smaller ones are still compared."""

LENGTHS = (1, 63, 65, 133, 257)
"""Lengths around the borders of chunks of 64 and with ragged ends, where kernels fail that are right elsewhere."""

MODEL = ModelSettings(name="one layer", dim=128, num_layers=1, head_width=64, feed_forward_width=0)
"""Model whose mixer is compared: two heads of the usual width."""

BATCH_SIZE = 2

NUM_STEPS = 16
"""Number of single steps in `by_state`."""

INPUT_SCALE = 5.0
"""Factor on the input, so that initial weights, which are small, leave the linear range of gates and scores. Near it
the gradients of query and key are so much smaller than the value's that an error in them does not show."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    """Widths, lengths and options at which a mixer is compared with its definition."""

    name: str
    """Title of its lines; empty for the usual case."""
    head_width: int = MODEL.head_width
    lengths: Sequence[int] = LENGTHS
    precisions: Sequence[str] = ("float32", "bfloat16")
    input_scale: float = INPUT_SCALE
    options: dict[str, Any] = field(default_factory=dict)
    """Options instead of the yaml's; a mixer without such a setting has no such case."""

    @property
    def slack(self) -> float:
        """Factor on all tolerances: a narrow head has fewer channels to average errors over."""
        return max(1.0, (MODEL.head_width / self.head_width) ** 0.5)

    def of(self, settings: MixerSettings) -> MixerSettings:
        """Return the mixer's settings with the options of this case."""
        return replace(settings, options={**settings.options, **self.options})

    @property
    def model(self) -> ModelSettings:
        """Model of two heads."""
        return replace(MODEL, dim=2 * self.head_width, head_width=self.head_width)


USUAL = Case(name="")


class Computed(NamedTuple):
    """Output of a mixer, and the gradients of a weighted sum of it."""

    output_BTD: Tensor
    input_gradient_BTD: Tensor
    parameter_gradients: dict[str, Tensor]
    parameter_terms: dict[str, float]
    """Size of the terms that each of these sums up: the root of the sum of their squared norms over the sequences."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Deviation:
    """Relative errors |a - b| / |b| of a backend, b by the definition: 0 where nothing differs from nothing, and never
    finite where a number of a is not."""

    output: float
    input_gradient: float
    position: float
    """Error of output or input gradient at the worst position: a ragged end of which little depends does not show in
    the whole."""
    parameter_gradient: float
    """Error of the worst parameter."""
    parameter: str
    """Name of that parameter."""

    def is_within(self, tolerance: float) -> bool:
        """Return whether all errors are within the tolerance, and those of parts within PART_FACTOR of it."""
        # Written so that a NaN, which compares false with everything, fails.
        return all(getattr(self, name) <= limit for name, limit in limits(tolerance).items())


def limits(tolerance: float) -> dict[str, float]:
    """Return the largest allowed value of each error of a Deviation, by its field's name."""
    part = PART_FACTOR * tolerance
    return {"output": tolerance, "input_gradient": tolerance, "position": part, "parameter_gradient": part}


def by_definition(mixer: Mixer, length: int, case: Case = USUAL) -> Computed:
    """Compute the mixer's `reference` and its gradients in float64."""
    wide = copy.deepcopy(mixer).double()
    device = next(wide.parameters()).device
    x_BTD, weight_BTD = (x.double() for x in example(length, case.model.dim, device, case.input_scale))
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
    """Compute the mixer's training forward and its gradients as a model does in `precision`, from the same input.

    Weights in float64 or bfloat16 stay in these.
    """
    weight = next(mixer.parameters())
    inputs = example(length, case.model.dim, weight.device, case.input_scale)
    x_BTD, weight_BTD = (x.to(weight.dtype) for x in inputs)
    x_BTD.requires_grad_()
    with computing(precision, weight.device):
        output_BTD, _ = mixer(x_BTD.to(torch.bfloat16) if precision == "bfloat16" else x_BTD)
        # Inside, because the products of the backward pass obey the same setting of float32's precision.
        return _computed(mixer, x_BTD, output_BTD, weight_BTD.to(output_BTD.dtype))


def by_state(mixer: Mixer, length: int, precision: str) -> list[Tensor]:
    """Compute the same outputs without gradients through a state, each (B, T, D): of two pieces read one after the
    other, and of the last NUM_STEPS positions, step by step."""
    x_BTD, _ = example(length, MODEL.dim, next(mixer.parameters()).device)
    x_BTD = x_BTD.to(dtype_of(precision))
    pieces = [length // 2, length - length // 2 - NUM_STEPS]
    with torch.no_grad(), computing(precision, x_BTD.device):
        y_BTD = in_pieces(mixer, x_BTD, [*pieces, *[1] * NUM_STEPS])
    return list(y_BTD.split([*pieces, NUM_STEPS], dim=1))


def in_pieces(mixer: Mixer, x_BTD: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the outputs of consecutive calls with a state; a piece of 1 is a step."""
    state = mixer.init_state(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype)
    outputs = []
    for piece_BTD in x_BTD.split(list(sizes), dim=1):
        if piece_BTD.shape[1] == 1:
            y_BD, state = mixer.step(piece_BTD[:, 0], state)
            outputs.append(y_BD[:, None])
        else:
            y_BTD, state = mixer(piece_BTD, state)
            outputs.append(y_BTD)
    return torch.cat(outputs, dim=1)


def example(length: int, dim: int, device: torch.device, scale: float = INPUT_SCALE) -> tuple[Tensor, Tensor]:
    """Return an input and the weights of the sum of outputs that gradients are taken of, (B, T, D) float32 each."""
    # On the CPU: generators of two devices give different numbers.
    generator = torch.Generator().manual_seed(length)
    shape = (2, BATCH_SIZE, length, dim)
    x_BTD, weight_BTD = exact(torch.randn(shape, generator=generator)).to(device).unbind()
    return scale * x_BTD, weight_BTD


def exact(x: Tensor) -> Tensor:
    """Round x to numbers that bfloat16 has too, so that rounding it is no part of the error."""
    return x.bfloat16().to(x.dtype)


def _computed(mixer: Mixer, x_BTD: Tensor, output_BTD: Tensor, weight_BTD: Tensor) -> Computed:
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    of_input, *of_parameters = torch.autograd.grad(output_BTD, (x_BTD, *parameters), weight_BTD, materialize_grads=True)
    gradients = dict(zip(names, of_parameters, strict=True))
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    return Computed(output_BTD.detach(), of_input, gradients, norms)


def compare(actual: Computed, expected: Computed, case: Case = USUAL) -> Deviation:
    """Return the relative errors of what a backend computed."""
    by_name = {
        name: parameter_error(
            gradient,
            expected.parameter_gradients[name],
            expected.parameter_terms[name],
            possible_norm(gradient.numel(), expected.parameter_gradients.values()),
            case.head_width,
        )
        for name, gradient in actual.parameter_gradients.items()
    }
    largest = worst(by_name.values())
    name = next(name for name, error in by_name.items() if error == largest or math.isnan(error))
    pairs = [(actual.output_BTD, expected.output_BTD), (actual.input_gradient_BTD, expected.input_gradient_BTD)]
    output, input_gradient = (relative_error(a, b) for a, b in pairs)
    return Deviation(
        output=output,
        input_gradient=input_gradient,
        position=worst(position_error(a, b) for a, b in pairs),
        parameter_gradient=largest,
        parameter=name,
    )


def position_error(actual_BTD: Tensor, expected_BTD: Tensor) -> float:
    """Return the worst relative error of a single position."""
    difference_BT = (actual_BTD.double() - expected_BTD.double()).norm(dim=-1)
    error_BT = difference_BT / expected_BTD.double().norm(dim=-1)
    return float(error_BT.where(difference_BT != 0, 0.0).max())


def possible_norm(size: int, gradients: Iterable[Tensor]) -> float:
    """Return the norm of a gradient of `size` numbers as large as those of the largest of these gradients."""
    norm, largest = max((float(gradient.double().norm()), gradient.numel()) for gradient in gradients)
    return norm * math.sqrt(size / largest)


def parameter_error(actual: Tensor, expected: Tensor, terms: float, possible: float, head_width: int) -> float:
    """Return the worst relative error of a gradient, a matrix taken apart into the rows of each head.

    Query, key and value often share one matrix, and an error in a small part of it would not show in the whole.

    Args:
        terms: see Computed.parameter_terms; the scale of a vector's error. The gradients of two sequences may cancel
            and leave no more than the rounding of either.
        possible: see `possible_norm`; the scale where the gradient is 0 by definition, as a decay's at a single
            position, and a share of it where it is nearly 0: a sum that comes to 0 leaves some rounding.
    """
    if not expected.any():
        return relative_error(actual, expected, possible)
    if expected.dim() < 2:
        return relative_error(actual, expected, max(terms, SMALLEST_VECTOR * possible))
    smallest = SMALLEST_MATRIX * max(float(expected.double().norm()), possible)
    parts = zip(actual.split(head_width), expected.split(head_width), strict=True)
    return worst([relative_error(part, other, smallest) for part, other in parts])


def relative_error(actual: Tensor, expected: Tensor, smallest: float = 0.0) -> float:
    """Return |a - b| / |b| in float64; nothing from nothing, as a decay's gradient at a single position, is 0.

    Args:
        smallest: least value of |b|.
    """
    difference = float((actual.double() - expected.double()).norm())
    scale = max(float(expected.double().norm()), smallest)
    if scale == 0 and difference > 0:
        return math.inf
    return difference / (scale or 1.0)


def worst(errors: Iterable[float]) -> float:
    """Return the largest; a NaN, which compares as no larger than anything, is the worst of all."""
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values)
