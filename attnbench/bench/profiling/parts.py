"""Parts of a training step: the part that each piece of work belongs to, and each part's share of the step.

There are two ways to know the part. In a step that is not compiled, modules are labelled (regions.py): forward work
lies inside a label, and backward work carries the sequence number of the forward operator that it is the gradient of.
In a compiled step no label is left, and the part follows from who launched the work: an operator of ours by its name,
a matrix product by the shape of its weight, a kernel that the compiler made by the operators that its name lists.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnbench.bench.profiling.traces import OPERATORS, Reading, Span, Work

PARTS = ("mixing", "projections", "feed-forward", "norm", "loss", "optimizer", "other")
"""Mixing is all that a mixer does besides its projections and norms, short convolution and rotation included. Other are
embedding, residual additions, copies of the inputs, and work of unknown part."""

IDLE = "idle"
"""Time of a step that no work fills; a part beside PARTS in a breakdown."""

PASSES = ("forward", "backward", "optimizer")

OUR_OPERATORS = "attnbench::"

PART_OF_WORDS = (("cross_entropy", "loss"), ("swiglu", "feed-forward"), ("norm", "norm"))
"""The first word that the name of an operator of ours contains; any other operator of ours mixes."""

PART_OF_FUSED = (
    *((word, "norm") for word in ("norm", "rsqrt", "_pow")),
    *((word, "mixing") for word in ("softmax", "softplus", "sigmoid", "silu")),
)
"""The same of a kernel that the compiler made, which lists the operators that it is of; a norm may be taken apart into
powers and roots. Work that is fused with a norm, as the residual addition before it, counts as norm. Gates are a
mixer's: on a GPU, where alone steps are compiled, the feed-forward's is an operator of ours."""

COMPILED_KERNELS = ("triton_", "cpp_fused")

MIXING_OPERATORS = ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::_flash_attention",
                    "aten::_cudnn_attention", "flash_attn")  # fmt: skip
"""Products of two activations, which here mixing alone has, and the libraries' attention."""


class Origin(NamedTuple):
    """Part and pass of a step that a piece of work belongs to."""

    part: str
    step_pass: str
    """One of PASSES, or empty where it is unknown."""


OTHER = Origin("other", "")


def by_region(work: Work, makers: Mapping[int, Span]) -> Origin:
    """Find the origin in a step that is not compiled, by the labels of its modules."""
    step_pass = _pass_of(work)
    if step_pass == "optimizer":
        return Origin("optimizer", step_pass)
    node = next((span for span in work.path if span.is_backward), None)
    if node is None:
        return Origin(_label(work.path), step_pass)
    maker = makers.get(node.sequence_number) if node.sequence_number is not None else None
    return Origin(_label(maker.path()) if maker is not None else "other", step_pass)


def by_operator(work: Work, weights: Mapping[tuple[int, ...], str], num_tokens: int) -> Origin:
    """Find the origin in a compiled step, by the operator that launched the work.

    Args:
        weights: the part of each weight's two sizes, in order, see `regions.weight_parts`.
        num_tokens: of a forward pass: the third size of a product with a weight, forward and backward.
    """
    step_pass = _pass_of(work)
    if step_pass == "optimizer":
        return Origin("optimizer", step_pass)
    return Origin(_part_of_operators(work, weights, num_tokens), step_pass)


def _pass_of(work: Work) -> str:
    # Backward first: on a CUDA device another thread runs it, where no label of ours is open.
    if any(span.is_backward for span in work.path):
        return "backward"
    return next((span.name for span in reversed(work.path) if span.name in PASSES), "")


def _label(path) -> str:
    return next((span.name for span in path if span.name in PARTS), "other")


def _part_of_operators(work: Work, weights: Mapping[tuple[int, ...], str], num_tokens: int) -> str:
    if work.name.startswith(COMPILED_KERNELS):
        return next((part for word, part in PART_OF_FUSED if word in work.name), "other")
    operators = [span for span in work.path if span.kind == OPERATORS]
    for span in operators:
        if span.name.startswith(OUR_OPERATORS):
            return next((part for word, part in PART_OF_WORDS if word in span.name), "mixing")
        if span.name.startswith(MIXING_OPERATORS):
            return "mixing"
        if span.name in ("aten::mm", "aten::addmm") and "Input Dims" in span.arguments:
            # The model's matrices are all known: the rest are products that a mixer writes out.
            return weights.get(_weight_of(span, num_tokens), "mixing")
    return "other"


def _weight_of(product: Span, num_tokens: int) -> tuple[int, ...]:
    """The sizes of the weight in a product of matrices: of x W, of dy W^T and of x^T dy alike."""
    # addmm's first is what is added; with `out=` the result stands last.
    first = 1 if product.name == "aten::addmm" else 0
    left, right = product.arguments["Input Dims"][first : first + 2]
    sizes = [left[0], left[1], right[1]]
    if num_tokens in sizes:
        sizes.remove(num_tokens)
    return tuple(sorted(sizes))


def replayed(
    recorded: Sequence[tuple[Work, Origin]], num_recorded: int, work: Sequence[Work], num_steps: int
) -> list[tuple[Work, Origin]]:
    """Find origins for the kernels of a replayed CUDA graph, of which the trace says only that the graph launched them.

    The graph replays the very kernels that the step launched before it was recorded, in the same order, so that the
    first kernel of a name is the first of that name there, and so on. A name that a replay has another number of times
    gets none.

    Args:
        recorded: the work of `num_recorded` steps before the recording.
        work: that of `num_steps` replays.
    """
    placed: list[tuple[Work, Origin]] = []
    before, now = _by_name([piece for piece, _ in recorded]), _by_name(work)
    origin_of = {id(piece): origin for piece, origin in recorded}
    for name, pieces in now.items():
        known = before.get(name, [])
        per_step = len(known) // num_recorded
        agrees = per_step > 0 and len(known) == per_step * num_recorded and len(pieces) == per_step * num_steps
        for index, piece in enumerate(pieces):
            placed.append((piece, origin_of[id(known[index % per_step])] if agrees else OTHER))
    return sorted(placed, key=lambda pair: pair[0].start)


def _by_name(work: Sequence[Work]) -> dict[str, list[Work]]:
    groups: dict[str, list[Work]] = {}
    for piece in sorted(work, key=lambda piece: piece.start):
        groups.setdefault(piece.name, []).append(piece)
    return groups


@dataclass(slots=True, kw_only=True, frozen=True)
class Breakdown:
    """The time of one step by parts and passes, in milliseconds."""

    step: float
    """The whole step, measured without the profiler."""
    parts: dict[str, float]
    """Time by PARTS."""
    passes: dict[str, float]
    """Time by PASSES; work of unknown pass is in none."""
    unplaced: float
    """Time of work of unknown part; counted in `other` too."""

    @property
    def busy(self) -> float:
        """All work together."""
        return math.fsum(self.parts.values())

    def shares(self) -> dict[str, float]:
        """Shares of the step, by PARTS and IDLE; they add up to 1.

        Kernels take a little longer under the profiler. Where their sum so passes the step's time, nothing is idle
        and the shares are of the sum.
        """
        whole = max(self.step, self.busy) or 1.0
        return {**{part: time / whole for part, time in self.parts.items()}, IDLE: max(0.0, 1 - self.busy / whole)}


def break_down(placed: Sequence[tuple[Work, Origin]], num_steps: int, step_milliseconds: float) -> Breakdown:
    """The sums of `num_steps` steps, divided by their number."""

    def total(wanted) -> float:
        return math.fsum(work.microseconds for work, origin in placed if wanted(origin)) / num_steps / 1e3

    return Breakdown(
        step=step_milliseconds,
        parts={part: total(lambda origin, part=part: origin.part == part) for part in PARTS},
        passes={name: total(lambda origin, name=name: origin.step_pass == name) for name in PASSES},
        unplaced=total(lambda origin: origin == OTHER),
    )


def origins_by_region(reading: Reading) -> list[tuple[Work, Origin]]:
    """List all work of a trace with its origin, see `by_region`."""
    return [(work, by_region(work, reading.makers)) for work in reading.work]
