"""Which kernels of the gated delta rule run, and how: the two forms over the same tiles, forward and backward."""

# Launching a kernel gives plain numbers for its constexpr arguments.
# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbench.kernels.delta_rule_parallel import (
    key_parts_kernel,
    prepare_backward_kernel,
    prepare_forward_kernel,
    read_kernel,
    scan_backward_kernel,
    scan_forward_kernel,
)
from attnbench.kernels.delta_rule_tiles import gradient_kernel, resolvent_kernel
from attnbench.kernels.delta_rule_walk import walk_backward_kernel, walk_forward_kernel
from attnbench.kernels.launching import launch, num_multiprocessors
from attnbench.kernels.products import float32_product

LAUNCH: dict[str, dict[str, int]] = {
    "resolvent": {"num_warps": 4},
    "walk_forward": {"num_warps": 4, "num_stages": 1},
    "walk_backward": {"num_warps": 4, "num_stages": 1},
    "prepare_forward": {"num_warps": 4, "num_stages": 1},
    "scan_forward": {"num_warps": 4, "num_stages": 3, "VALUES": 16},
    "read": {"num_warps": 4},
    "key_parts": {"num_warps": 4},
    "prepare_backward": {"num_warps": 4},
    "scan_backward": {"num_warps": 4, "num_stages": 3, "VALUES": 16},
    "gradient": {"num_warps": 4, "num_stages": 1},
}
"""By kernel: warps of a program, stages of the loads in its loop and, for a scan, its block of value channels."""

NARROW = 64
"""A head with fewer key channels, or fewer value channels to a program, has shorter chunks (`positions_of_chunk`), and
all its products are the small ones of a single warp. The others, Hopper's instructions for a group of four warps, which
multiply 64 rows at once, Triton 3.6 compiles wrongly for narrow tiles: at 16 and 32 key channels rows of W from 16 on
come out wrong, and at 16 and 32 value channels gradients are read from beyond the shared memory."""

WIDE = 128
"""A head with more key channels has shorter chunks too, and in bfloat16 alone: 64 value channels of its state are a
quarter of a multiprocessor's registers."""

WIDE_LAUNCH: dict[str, dict[str, int]] = {
    "walk_forward": {"num_warps": 8, "num_stages": 2},
    "walk_backward": {"num_warps": 8, "num_stages": 2},
    "gradient": {"num_warps": 8, "num_stages": 2, "VALUES": 32},
}
"""What such a head has in place of LAUNCH's; VALUES is the most."""

NARROW_VALUES = {torch.bfloat16: 64, torch.float32: 32}
"""The most value channels of a block in shorter chunks. In float32 the gradient of 64 spills three times as much as
that of 32."""


def positions_of_chunk(key_width: int, value_width: int) -> int:
    """C: of narrow heads 32, on four warps, and of wide ones 32 on eight.

    Chunks of 64 on two warps avoid the wrong instructions too, but run out of registers. Bytes that a thread spills
    with 64 → with 32, at so many key × value channels, compiled for Hopper by Triton 3.6.0:

        kernel          32 × 32, bfloat16   64 × 32, bfloat16   32 × 32, float32
        resolvent                 164 → 0             204 → 0          2,532 → 0
        walk_forward               36 → 0             116 → 0         2,500 → 28
        walk_backward              36 → 0             524 → 0         2,448 → 16
        gradient                  336 → 0           2,016 → 0       38,224 → 556

    In float32 these four take less than a third of the time to compile. Triton 3.7.1 spills about as much.

    At 256 × 512 in bfloat16, on eight warps: walk_forward 648 → 0, walk_backward 1,616 → 0; on an H200 both together
    take 3.1 ms, with 64 6.3 (128 × 256 positions, four heads).
    """
    return 32 if min(key_width, value_width & -value_width) < NARROW or key_width > WIDE else 64


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """One call's inputs, contiguous, and what follows from their shapes.

    Args:
        parallel: all chunks at once around a scan, instead of one program a head that walks its chunks; None for the
            rule in `choose_parallel`.
    """

    mixed: Tensor
    log_decay: Tensor
    beta: Tensor
    num_heads: int
    key_width: int
    unit_length: bool
    parallel: bool | None = None

    @property
    def length(self) -> int:
        return self.mixed.shape[1]

    @property
    def sequences(self) -> int:
        """Independent ones: of every head."""
        return self.mixed.shape[0] * self.num_heads

    @property
    def value_width(self) -> int:
        return self.mixed.shape[2] // self.num_heads - 2 * self.key_width

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        return positions_of_chunk(self.key_width, self.value_width)

    @property
    def num_chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def all_chunks(self) -> int:
        """How many chunks all sequences have together."""
        return self.sequences * self.num_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks of value channels."""
        return self.value_width // self.values

    @property
    def values(self) -> int:
        """Value channels of a block: the largest power of 2 that divides them, up to a limit."""
        limit = NARROW_VALUES[self.mixed.dtype] if self.chunk < 64 else 64
        return min(limit, self.value_width & -self.value_width)

    def empty(self, *shape: int) -> Tensor:
        """Of every chunk, in the dtype of the inputs."""
        return self.mixed.new_empty(self.sequences, self.num_chunks, *shape)

    def options(self, kernel: str, **more: Any) -> dict[str, Any]:
        """A kernel's constants; what is float32 where the inputs have fewer digits is multiplied to TF32's."""
        precision = float32_product() if self.mixed.dtype == torch.float32 else "tf32"
        options = {"C": self.chunk, "K": self.key_width, "V": self.value_width, "PRECISION": precision}
        launch = options | more | LAUNCH[kernel]
        if self.key_width > WIDE:
            launch |= WIDE_LAUNCH.get(kernel, {})
            # A block divides the values.
            return launch | {"VALUES": min(launch["VALUES"], self.values)} if "VALUES" in launch else launch
        is_short_float32 = self.mixed.dtype == torch.float32 and self.chunk < 64
        if self.key_width > 64 and (kernel == "gradient" or is_short_float32):
            # Four run out of registers, in float32 so far that the assembler takes half a minute and more.
            return launch | {"num_warps": 8}
        return launch

    def goes_parallel(self) -> bool:
        return choose_parallel(self) if self.parallel is None else self.parallel


def choose_parallel(rule: DeltaRule) -> bool:
    """Whether walking would leave most of the device idle for long: fewer walks than multiprocessors, 8 chunks each."""
    return rule.num_chunks >= 8 and rule.sequences * rule.num_blocks < num_multiprocessors(rule.mixed.device)


def forward(
    rule: DeltaRule,
    initial: Tensor | None,
    output: Tensor,
    last: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Fills `output`, `last` and what the gradient needs: S and F of every chunk, and R."""
    sizes = (rule.length, rule.num_heads)
    inputs, scale = (rule.mixed, rule.log_decay, rule.beta), rule.key_width**-0.5
    unit, values = {"UNIT": rule.unit_length}, {"VALUES": rule.values}
    resolvents = rule.empty(rule.chunk, rule.chunk) if kept is None else kept[2]
    if not rule.goes_parallel():
        states, corrections = (None, None) if kept is None else kept[:2]
        launch(resolvent_kernel, (rule.all_chunks,), *inputs, resolvents, *sizes, **rule.options("resolvent", **unit))
        launch(
            walk_forward_kernel, (rule.sequences, rule.num_blocks),
            *inputs, resolvents, initial, output, last, states, corrections, *sizes, scale,
            **rule.options("walk_forward", **unit, **values),
        )  # fmt: skip
        return
    states, corrections = _empty_states(rule) if kept is None else kept[:2]
    readers, writers, totals = _empty_key_parts(rule)
    launch(
        prepare_forward_kernel, (rule.all_chunks,),
        *inputs, resolvents, readers, writers, corrections, totals, *sizes,
        **rule.options("prepare_forward", **unit, **values),
    )  # fmt: skip
    scan_values = min(rule.values, LAUNCH["scan_forward"]["VALUES"])
    launch(
        scan_forward_kernel, (rule.sequences, rule.value_width // scan_values),
        rule.beta, readers, writers, totals, initial, last, states, corrections, *sizes,
        **rule.options("scan_forward") | {"VALUES": scan_values},
    )  # fmt: skip
    launch(
        read_kernel, (rule.all_chunks, rule.num_blocks),
        *inputs, states, corrections, output, *sizes, scale, **rule.options("read", **unit, **values),
    )  # fmt: skip


def backward(
    rule: DeltaRule,
    kept: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    last_gradient: Tensor | None,
    of_initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the three inputs; fills `of_initial`."""
    states, corrections, resolvents = kept
    sizes, scale = (rule.length, rule.num_heads), rule.key_width**-0.5
    inputs, ends = (rule.mixed, rule.log_decay, rule.beta), (last_gradient, of_initial)
    constants = {"UNIT": rule.unit_length, "VALUES": rule.values}
    of_states, of_corrections = torch.empty_like(states), torch.empty_like(corrections)
    if rule.goes_parallel():
        readers, writers, totals = _empty_key_parts(rule)
        launch(
            key_parts_kernel, (rule.all_chunks,),
            *inputs, resolvents, readers, writers, totals, *sizes,
            **rule.options("key_parts", UNIT=rule.unit_length),
        )  # fmt: skip
        launch(
            prepare_backward_kernel, (rule.all_chunks, rule.num_blocks),
            *inputs, gradient, of_corrections, of_states, *sizes, scale,
            **rule.options("prepare_backward", **constants),
        )  # fmt: skip
        scan_values = min(rule.values, LAUNCH["scan_backward"]["VALUES"])
        launch(
            scan_backward_kernel, (rule.sequences, rule.value_width // scan_values),
            rule.beta, readers, writers, totals, *ends, of_states, of_corrections, *sizes,
            **rule.options("scan_backward") | {"VALUES": scan_values},
        )  # fmt: skip
    else:
        launch(
            walk_backward_kernel, (rule.sequences, rule.num_blocks),
            *inputs, resolvents, gradient, *ends, of_states, of_corrections, *sizes, scale,
            **rule.options("walk_backward", **constants),
        )  # fmt: skip
        resolvents = None
    return _input_gradients(rule, states, corrections, gradient, of_states, of_corrections, resolvents)


def _input_gradients(
    rule: DeltaRule,
    states: Tensor,
    corrections: Tensor,
    gradient: Tensor,
    of_states: Tensor,
    of_corrections: Tensor,
    resolvents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_mixed, of_log_decay, of_beta = (torch.empty_like(x) for x in (rule.mixed, rule.log_decay, rule.beta))
    launch(
        gradient_kernel, (rule.all_chunks,),
        rule.mixed, rule.log_decay, rule.beta, states, corrections, gradient, of_states, of_corrections, resolvents,
        of_mixed, of_log_decay, of_beta, rule.length, rule.num_heads, rule.key_width**-0.5,
        **rule.options("gradient", UNIT=rule.unit_length, VALUES=rule.values),
    )  # fmt: skip
    return of_mixed, of_log_decay, of_beta


def _empty_states(rule: DeltaRule) -> tuple[Tensor, Tensor]:
    return rule.empty(rule.key_width, rule.value_width), rule.empty(rule.chunk, rule.value_width)


def _empty_key_parts(rule: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    readers, writers = (rule.empty(rule.chunk, rule.key_width) for _ in range(2))
    return readers, writers, rule.empty().float()
