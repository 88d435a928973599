"""Launch choices and launches of the kernels with one decay per head, forward and backward."""

# pyright: reportArgumentType=false, reportReturnType=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnbench.ops.common.triton.chunked import Chunked
from attnbench.ops.common.triton.launching import launch
from attnbench.ops.common.triton.products import product_precision
from attnbench.ops.linear.triton.linear_op import segment_positions
from attnbench.ops.scalar.triton.scalar_kernels import (
    carry_kernel,
    gradient_kernel,
    walk_backward_kernel,
    walk_forward_kernel,
)

LAUNCH: dict[str, dict[str, int]] = {
    "walk_forward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "walk_backward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "gradient": {"num_warps": 4, "num_stages": 1, "VALUES": 64},
}
"""Launch of each kernel: warps, stages of the loads in its loop, and the largest block of value channels."""

WIDE_WARPS = 8
"""Warps in float32 for more than 64 key channels, which run out of the registers of four."""

BLOCK = 256
"""Numbers of a state that a program carries from segment to segment: few, so that there are many programs."""


@dataclass(frozen=True, slots=True)
class ScalarDecay(Chunked):
    """Contiguous inputs of one call, and the sizes that follow from their shapes."""

    mixed: Tensor
    log_decay: Tensor
    write: Tensor | None
    own: Tensor | None
    num_groups: int
    key_width: int
    scale: float

    @property
    def gates(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.log_decay, self.write, self.own

    @property
    def num_heads(self) -> int:
        return self.log_decay.shape[2]

    @property
    def value_width(self) -> int:
        return (self.mixed.shape[2] - 2 * self.num_groups * self.key_width) // self.num_heads

    @property
    def chunk(self) -> int:
        """Positions per chunk. All products of a short one are a single warp's, which narrow heads need (see NARROW in
        delta_choice.py) and wide ones in float32, for the shared memory."""
        return 64 if self.mixed.dtype == torch.bfloat16 and self.key_width > 32 and self.value_width > 32 else 32

    def values(self, kernel: str) -> int:
        return min(LAUNCH[kernel]["VALUES"], self.chunk, triton.next_power_of_2(self.value_width))

    @property
    def segment(self) -> int:
        """Positions per program, whole chunks."""
        return segment_positions(self.mixed.shape[0], self.length, self.num_heads)

    @property
    def num_segments(self) -> int:
        return -(-self.length // self.segment)

    def walks(self, kernel: str) -> tuple[int]:
        return (self.sequences * self.num_segments * -(-self.value_width // self.values(kernel)),)

    def states(self, *counts: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return empty states, transposed: (sequences, ..., V, K)."""
        return self.mixed.new_empty(self.sequences, *counts, self.value_width, self.key_width, dtype=dtype)

    def options(self, kernel: str) -> dict[str, Any]:
        is_float32, keys = self.mixed.dtype == torch.float32, triton.next_power_of_2(self.key_width)
        sizes = {"G": self.num_groups, "H": self.num_heads, "K": self.key_width, "V": self.value_width, "C": self.chunk}
        sizes |= {"KEYS": keys, "VALUES": self.values(kernel), "PRECISION": product_precision(self.mixed.dtype)}
        return LAUNCH[kernel] | sizes | ({"num_warps": WIDE_WARPS} if is_float32 and keys > 64 else {})


def forward(
    rule: ScalarDecay, initial: Tensor | None, output: Tensor, last: Tensor | None, states: Tensor | None
) -> None:
    """Fill `output`, `last` and the states before every chunk; states are transposed, and may be None."""

    def walk(initial: Tensor | None, output: Tensor | None, last: Tensor | None, totals: Tensor | None) -> None:
        kept = None if output is None else states
        launch(
            walk_forward_kernel, rule.walks("walk_forward"),
            rule.mixed, *rule.gates, initial, output, last, totals, kept, rule.length, rule.segment, rule.scale,
            **rule.options("walk_forward"),
        )  # fmt: skip

    if rule.num_segments > 1:
        starts, totals = _empty_sums(rule)
        walk(None, None, starts, totals)
        _carry(rule, starts, totals, initial, last, reverse=False)
        initial, last = starts, None
    walk(initial, output, last, None)


def backward(
    rule: ScalarDecay,
    states: Tensor,
    gradient: Tensor,
    last_gradient: Tensor | None,
    of_initial: Tensor | None,
    outputs: tuple[Tensor | None, ...],
) -> None:
    """Fill `of_initial` and `outputs`, the gradients of `mixed` and of the three gates; each may be None."""
    of_states = torch.empty_like(states)

    def walk(after: Tensor | None, before: Tensor | None, totals: Tensor | None, kept: Tensor | None) -> None:
        launch(
            walk_backward_kernel, rule.walks("walk_backward"),
            rule.mixed, rule.log_decay, gradient, after, before, totals, kept, rule.length, rule.segment, rule.scale,
            **rule.options("walk_backward"),
        )  # fmt: skip

    if rule.num_segments > 1:
        ends, totals = _empty_sums(rule)
        walk(None, ends, totals, None)
        _carry(rule, ends, totals, last_gradient, of_initial, reverse=True)
        last_gradient, of_initial = ends, None
    walk(last_gradient, of_initial, None, of_states)
    # In two passes for wide keys.
    is_wide = rule.key_width > (32 if rule.mixed.dtype == torch.float32 else 64)
    for of_query, of_key in ((True, False), (False, True)) if is_wide else ((True, True),):
        launch(
            gradient_kernel, (rule.mixed.shape[0] * rule.num_groups * rule.num_chunks,),
            rule.mixed, *rule.gates, states, gradient, of_states, *outputs, rule.length, rule.scale,
            OF_QUERY=of_query, OF_KEY=of_key, **rule.options("gradient"),
        )  # fmt: skip


def _empty_sums(rule: ScalarDecay) -> tuple[Tensor, Tensor]:
    return rule.states(rule.num_segments), rule.log_decay.new_empty(rule.sequences, rule.num_segments)


def _carry(
    rule: ScalarDecay, sums: Tensor, totals: Tensor, start: Tensor | None, end: Tensor | None, *, reverse: bool
) -> None:
    size = rule.value_width * rule.key_width
    launch(
        carry_kernel, (rule.sequences, -(-size // BLOCK)),
        sums, totals, start, end, rule.num_segments, SIZE=size, BLOCK=BLOCK, REVERSE=reverse,
    )  # fmt: skip
