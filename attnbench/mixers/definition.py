"""How far a mixer's backend is from the mixer's own definition in float64, in outputs and gradients."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.machine.device import computing, dtype_of
from attnbench.mixers.base import Mixer
from attnbench.settings.schema import MixerSettings, ModelSettings

LENGTHS = (1, 63, 65, 133, 257)
"""Around the borders of chunks of 64, and with ragged ends: where kernels are wrong that are right elsewhere."""

MODEL = ModelSettings(name="one layer", dim=128, num_layers=1, head_width=64, feed_forward_width=0)
"""Whose mixer is compared: two heads of the width that models here have."""

BATCH_SIZE = 2

NUM_STEPS = 16
"""Of decoding, in `in_pieces`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Shape:
    """A mixer and the lengths at which it is compared."""

    name: str
    """What stands above its lines; empty for the shape that every backend is compared at."""
    head_width: int = MODEL.head_width
    lengths: Sequence[int] = LENGTHS
    precisions: Sequence[str] = ("float32", "bfloat16")
    options: dict[str, Any] = field(default_factory=dict)
    """In place of the yaml's; a mixer without such a setting is not compared at this shape."""

    @property
    def slack(self) -> float:
        """How much more than usual may be off: in a narrow head there are fewer channels to average errors over."""
        return max(1.0, (MODEL.head_width / self.head_width) ** 0.5)

    def of(self, settings: MixerSettings) -> MixerSettings:
        """The mixer with the options of this shape."""
        return replace(settings, options={**settings.options, **self.options})

    @property
    def model(self) -> ModelSettings:
        """Two heads."""
        return replace(MODEL, dim=2 * self.head_width, head_width=self.head_width)


USUAL = Shape(name="")

OTHER_SHAPES = (
    Shape(name="heads of 16 channels", head_width=16, lengths=(65, 133)),
    Shape(name="heads of 32 channels", head_width=32, lengths=(65, 133)),
    Shape(name="heads of 128 channels", head_width=128, lengths=(65, 133)),
    Shape(
        name="keys of 256 channels",
        head_width=256,
        lengths=(133,),
        precisions=("bfloat16",),
        options={"value_expansion": 0.5},
    ),
    Shape(name="so long that few heads go over their chunks side by side", lengths=(577,)),
    Shape(name="values of 48 channels", lengths=(133,), options={"value_expansion": 0.75}),
    Shape(name="a convolution of four taps", lengths=(133,), options={"conv_size": 4}),
    Shape(name="query and key normed", lengths=(133,), options={"qk_norm": True}),
    Shape(name="one head of keys for two", lengths=(133,), options={"num_key_value_heads": 1}),
    Shape(name="a window of 50 positions", lengths=(65, 133), options={"window": 50}),
    Shape(
        name="a window of 50 positions, one head of keys, normed",
        lengths=(133,),
        options={"window": 50, "num_key_value_heads": 1, "qk_norm": True},
    ),
    Shape(name="a window of 530 positions", lengths=(577,), options={"window": 530}),
    Shape(name="products in TF32", lengths=(133,), precisions=("tf32",)),
)
"""Where other kernels run, or the same compiled otherwise: one that is right at the usual shape may be wrong here."""

INPUT_SCALE = 5.0
"""Wide enough that initial weights, which are small, leave the linear range of gates and scores. Near it the gradients
of query and key would be so much smaller than that of the value that an error in them would not show."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.03}
"""Of relative errors in outputs and in the gradient of the input, by precision."""

ALLOWED = {**TOLERANCES, "tf32": 0.01}
"""With that of a precision which only some kernels know, and which is looked at apart."""

PART_FACTOR = 2.5
"""How much more a single position or a parameter's gradient may be off: in a part errors do not average out, and what
a parameter sums over positions cancels."""

SMALLEST_MATRIX, SMALLEST_VECTOR = 0.1, 0.01
"""A gradient smaller than this share of what one of its size could be, see `possible_norm`, is held against the share,
as a query's that sees one key alone, which is 0 but for rounding where a norm follows. Terms of a vector's cancel more,
so that a smaller one is still looked at."""


class Outcome(NamedTuple):
    """What a mixer makes of an input, and the gradients of a weighted sum of it."""

    output_BTD: Tensor
    input_gradient_BTD: Tensor
    parameter_gradients: dict[str, Tensor]
    parameter_terms: dict[str, float]
    """What each of these is a sum of, together: the root of the sum of its squared norms over the sequences."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Deviation:
    """Relative errors |a - b| / |b|, b by the definition: 0 where nothing differs from nothing, and never finite where
    a number of a is not."""

    output: float
    input_gradient: float
    position: float
    """Of the output or the input's gradient, at the position that is furthest off: a ragged end of which little depends
    does not show in the whole."""
    parameter_gradient: float
    """Of the parameter that is furthest off."""
    parameter: str
    """Its name."""

    def is_within(self, tolerance: float) -> bool:
        """Whether every error is within the tolerance, and those of parts within PART_FACTOR of it; what is not finite
        never is."""
        # Written so that a NaN, which compares false with everything, fails.
        return (
            self.output <= tolerance
            and self.input_gradient <= tolerance
            and self.position <= PART_FACTOR * tolerance
            and self.parameter_gradient <= PART_FACTOR * tolerance
        )


def by_definition(mixer: Mixer, length: int, shape: Shape = USUAL) -> Outcome:
    """The mixer's own `reference`, in float64."""
    wide = copy.deepcopy(mixer).double()
    x_BTD, weight_BTD = (x.double() for x in example(length, shape.model.dim, next(wide.parameters()).device))
    outcomes = []
    for x_1TD, weight_1TD in zip(x_BTD.split(1), weight_BTD.split(1), strict=True):
        x_1TD.requires_grad_()
        outcomes.append(_outcome(wide, x_1TD, wide.reference(x_1TD), weight_1TD))
    gradients = [outcome.parameter_gradients for outcome in outcomes]
    return Outcome(
        output_BTD=torch.cat([outcome.output_BTD for outcome in outcomes]),
        input_gradient_BTD=torch.cat([outcome.input_gradient_BTD for outcome in outcomes]),
        parameter_gradients={name: torch.stack([own[name] for own in gradients]).sum(0) for name in gradients[0]},
        parameter_terms={name: math.hypot(*(own.parameter_terms[name] for own in outcomes)) for name in gradients[0]},
    )


def by_backend(mixer: Mixer, length: int, precision: str, shape: Shape = USUAL) -> Outcome:
    """The mixer's training forward as a model runs it, in `precision`, its input too; with weights in float64 or
    bfloat16 in these."""
    weight = next(mixer.parameters())
    x_BTD, weight_BTD = (x.to(weight.dtype) for x in example(length, shape.model.dim, weight.device))
    x_BTD.requires_grad_()
    with computing(precision, weight.device):
        output_BTD, _ = mixer(x_BTD.to(torch.bfloat16) if precision == "bfloat16" else x_BTD)
        # Inside, because the products of the backward pass obey the same setting of float32's precision.
        return _outcome(mixer, x_BTD, output_BTD, weight_BTD.to(output_BTD.dtype))


def in_pieces(mixer: Mixer, length: int, precision: str) -> list[Tensor]:
    """What the mixer makes of the same input without gradients, each (B, T, D): of two pieces read into a state one
    after the other, and of the last NUM_STEPS positions, step by step."""
    x_BTD, _ = example(length, MODEL.dim, next(mixer.parameters()).device)
    x_BTD = x_BTD.to(dtype_of(precision))
    state, cut, last = mixer.init_state(BATCH_SIZE, length, x_BTD.dtype), length // 2, length - NUM_STEPS
    pieces, steps = [], []
    with torch.no_grad(), computing(precision, x_BTD.device):
        for start, stop in ((0, cut), (cut, last)):
            y_BTD, state = mixer(x_BTD[:, start:stop], state)
            pieces.append(y_BTD)
        for position in range(last, length):
            y_BD, state = mixer.step(x_BTD[:, position], state)
            steps.append(y_BD)
    return [*pieces, torch.stack(steps, dim=1)]


def example(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An input and the weights of the sum of outputs that gradients are taken of, (B, T, D) float32 each."""
    # On the CPU: generators of two devices give different numbers.
    generator = torch.Generator().manual_seed(length)
    shape = (2, BATCH_SIZE, length, dim)
    x_BTD, weight_BTD = exact(torch.randn(shape, generator=generator)).to(device).unbind()
    return INPUT_SCALE * x_BTD, weight_BTD


def exact(x: Tensor) -> Tensor:
    """x in numbers that bfloat16 has too, so that rounding it is no part of the error."""
    return x.bfloat16().to(x.dtype)


def _outcome(mixer: Mixer, x_BTD: Tensor, output_BTD: Tensor, weight_BTD: Tensor) -> Outcome:
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    of_input, *of_parameters = torch.autograd.grad(output_BTD, (x_BTD, *parameters), weight_BTD, materialize_grads=True)
    gradients = dict(zip(names, of_parameters, strict=True))
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    return Outcome(output_BTD.detach(), of_input, gradients, norms)


def compare(actual: Outcome, expected: Outcome, shape: Shape = USUAL) -> Deviation:
    """The relative errors of what a backend computed."""
    by_name = {
        name: parameter_error(
            gradient,
            expected.parameter_gradients[name],
            expected.parameter_terms[name],
            possible_norm(gradient.numel(), expected.parameter_gradients.values()),
            shape.head_width,
        )
        for name, gradient in actual.parameter_gradients.items()
    }
    largest = worst(by_name.values())
    name = next(name for name, error in by_name.items() if error == largest or math.isnan(error))
    of_x = [(actual.output_BTD, expected.output_BTD), (actual.input_gradient_BTD, expected.input_gradient_BTD)]
    output, input_gradient = (relative_error(own, other) for own, other in of_x)
    return Deviation(
        output=output,
        input_gradient=input_gradient,
        position=worst(position_error(own, other) for own, other in of_x),
        parameter_gradient=largest,
        parameter=name,
    )


def position_error(actual_BTD: Tensor, expected_BTD: Tensor) -> float:
    """The worst relative error of a single position."""
    difference_BT = (actual_BTD.double() - expected_BTD.double()).norm(dim=-1)
    error_BT = difference_BT / expected_BTD.double().norm(dim=-1)
    return float(error_BT.where(difference_BT != 0, 0.0).max())


def possible_norm(size: int, gradients: Iterable[Tensor]) -> float:
    """Norm of a gradient with so many numbers, if they were as large as those of the largest of these gradients."""
    norm, largest = max((float(gradient.double().norm()), gradient.numel()) for gradient in gradients)
    return norm * math.sqrt(size / largest)


def parameter_error(actual: Tensor, expected: Tensor, terms: float, possible: float, head_width: int) -> float:
    """The worst relative error of a gradient, a matrix taken apart into the rows of each head.

    Query, key and value often share one matrix, and what is wrong in a small part of it would not show in the whole.

    Args:
        terms: see Outcome.parameter_terms. A number a head is held against it: that of two sequences may cancel, and
            what is left be no larger than the rounding of either.
        possible: see `possible_norm`. What is 0 by definition, as a decay's gradient is at a single position, is held
            against it: a sum that comes to 0 leaves some rounding. What is nearly 0 against a share of it.
    """
    if not expected.any():
        return relative_error(actual, expected, possible)
    if expected.dim() < 2:
        return relative_error(actual, expected, max(terms, SMALLEST_VECTOR * possible))
    smallest = SMALLEST_MATRIX * max(float(expected.double().norm()), possible)
    parts = zip(actual.split(head_width), expected.split(head_width), strict=True)
    return worst([relative_error(part, other, smallest) for part, other in parts])


def relative_error(actual: Tensor, expected: Tensor, smallest: float = 0.0) -> float:
    """|a - b| / |b| in float64. A single position has no decay to learn: nothing from nothing is 0.

    Args:
        smallest: what b counts as at least.
    """
    difference = float((actual.double() - expected.double()).norm())
    scale = max(float(expected.double().norm()), smallest)
    if scale == 0 and difference > 0:
        return math.inf
    return difference / (scale or 1.0)


def worst(errors: Iterable[float]) -> float:
    """The largest, and a NaN is the worst of all, although it compares as no larger than anything."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)
