"""Launch choices and launches of the kernels with one decay per key channel, forward and backward."""

# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.ops.common.triton.chunked import Chunked
from attnbench.ops.common.triton.launching import launch
from attnbench.ops.common.triton.products import product_precision
from attnbench.ops.delta.triton.delta_choice import NARROW_VALUES, positions_of_chunk, values_of_walk
from attnbench.ops.diagonal.triton.diagonal_chunk import chunk_kernel, resolve_kernel
from attnbench.ops.diagonal.triton.diagonal_gradient import gradient_kernel, pair_gradient_kernel
from attnbench.ops.diagonal.triton.diagonal_walk import walk_backward_kernel, walk_forward_kernel

LAUNCH: dict[str, dict[str, int]] = {
    # One stage: the program loads its own stores, which must not be prefetched.
    "chunk": {"num_warps": 4, "num_stages": 1, "KEYS": 64},
    "resolve": {"num_warps": 4, "num_stages": 1, "KEYS": 64},
    "walk_forward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "walk_backward": {"num_warps": 4, "num_stages": 2, "VALUES": 64},
    "pair_gradient": {"num_warps": 4, "num_stages": 1, "VALUES": 64},
    "gradient": {"num_warps": 8, "num_stages": 1, "VALUES": 64, "KEYS": 64},
}
"""Launch of each kernel: warps, stages of the loads in its loop and the largest blocks of value and key channels.
Chunks of 64 take at least 64 keys at once, because Triton 3.6 miscompiles narrower products (see `NARROW` in
delta_choice.py)."""

FLOAT32_KEYS = {"chunk": 64, "walk_forward": 64, "walk_backward": 64, "gradient": 32}
"""Largest number of key channels with enough registers for four warps in float32; with more a kernel has eight."""

NARROWEST = 16
"""Fewest channels of a walk's block of values: on an H100, 2 x 16,384 positions of 12 heads of 64 channels take 458 and
381 µs forward and backward with it, 758 and 559 with 64."""


def in_rows(x_BTHC: Tensor) -> Tensor:
    """Return x if the heads of a position are adjacent and positions evenly spaced, otherwise a copy."""
    batch_stride, row_stride, *of_heads = x_BTHC.stride()
    _, length, _, width = x_BTHC.shape
    lies_so = of_heads == [width, 1] and (x_BTHC.shape[0] == 1 or batch_stride == length * row_stride)
    return x_BTHC if lies_so else x_BTHC.contiguous()


class Prepared(NamedTuple):
    """Tensors per chunk that do not depend on the state, see diagonal_chunk.py; D is empty if nothing is erased."""

    sums: Tensor
    totals: Tensor
    asking: Tensor
    """A."""
    reading: Tensor
    """D."""
    leaving: Tensor
    """Y."""
    pairs: Tensor
    """W, and N if something is erased."""


class Kept(NamedTuple):
    """Further tensors per chunk for the gradient."""

    states: Tensor
    """S, transposed."""
    corrections: Tensor
    """F; empty if nothing is erased."""


class Gradients(NamedTuple):
    """Gradients of the inputs and of the first memory; None if absent or unwanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    reader: Tensor | None
    beta: Tensor | None
    memory: Tensor | None


@dataclass(frozen=True, slots=True)
class DiagonalRule(Chunked):
    """Inputs of one call, and the sizes that follow from their shapes. All are contiguous, except that query, key and
    value may be parts of a packed projection (`in_rows`).

    Args:
        reader: r; None for zeros or, with `beta`, for beta times the key.
        beta: strength of erasing and writing; None for 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    reader: Tensor | None
    beta: Tensor | None

    @property
    def erases(self) -> bool:
        return self.reader is not None or self.beta is not None

    @property
    def num_heads(self) -> int:
        return self.query.shape[2]

    @property
    def key_width(self) -> int:
        return self.query.shape[3]

    @property
    def value_width(self) -> int:
        return self.value.shape[3]

    @property
    def chunk(self) -> int:
        # Short in float32 even for wide heads, whose registers are nearly full.
        is_float32 = self.query.dtype == torch.float32
        return 32 if is_float32 else positions_of_chunk(self.key_width, self.value_width, self.query.dtype)

    def keys(self, kernel: str) -> int:
        return min(LAUNCH[kernel]["KEYS"], self.key_width)

    def values(self, kernel: str) -> int:
        most = self.launch_of(kernel)["VALUES"] if self.chunk == 64 else NARROW_VALUES
        channels = min(most, self.value_width & -self.value_width)
        if kernel.startswith("walk"):
            channels = values_of_walk(channels, NARROWEST, self.sequences * self.value_width, self.query.device)
        return channels

    def launch_of(self, kernel: str) -> dict[str, int]:
        if self.chunk == 64:
            return LAUNCH[kernel]
        # Short chunks do not occupy more than four warps.
        is_float32 = self.query.dtype == torch.float32
        return LAUNCH[kernel] | {"num_warps": 8 if is_float32 and self.key_width > FLOAT32_KEYS.get(kernel, 128) else 4}

    def options(self, kernel: str) -> dict[str, Any]:
        precision = product_precision(self.query.dtype)
        sizes = {"num_heads": self.num_heads, "C": self.chunk}
        if kernel != "resolve":
            sizes["ERASES"] = self.erases
        if kernel != "pair_gradient":
            sizes["K"] = self.key_width
        if "VALUES" in LAUNCH[kernel]:
            sizes |= {"V": self.value_width, "VALUES": self.values(kernel)}
        if "KEYS" in LAUNCH[kernel]:
            sizes["KEYS"] = self.keys(kernel)
        return self.launch_of(kernel) | sizes | {"PRECISION": precision}

    def empty_prepared(self) -> Prepared:
        of_keys, erased = (self.chunk, self.key_width), (self.chunk, self.key_width) if self.erases else (0,)
        wide = {"dtype": self.log_decay.dtype}
        return Prepared(
            sums=self._empty(*of_keys, **wide),
            totals=self._empty(self.key_width, **wide),
            asking=self._empty(*of_keys),
            reading=self._empty(*erased),
            leaving=self._empty(*of_keys),
            pairs=self._empty(1 + self.erases, self.chunk, self.chunk),
        )

    def empty_kept(self) -> Kept:
        corrections = (self.chunk, self.value_width) if self.erases else (0,)
        return Kept(self._empty(self.value_width, self.key_width), self._empty(*corrections))

    def _empty(self, *shape: int, **options: Any) -> Tensor:
        return self.query.new_empty(self.sequences, self.num_chunks, *shape, **options)


def forward(
    rule: DiagonalRule,
    initial: Tensor | None,
    output: Tensor,
    last: Tensor | None,
    prepared: Prepared,
    kept: Kept | None,
) -> None:
    _, totals, asking, reading, leaving, pairs = prepared
    launch(
        chunk_kernel, (rule.all_chunks,),
        rule.query, rule.key, rule.reader, rule.log_decay, *prepared, rule.length,
        QUERY_ROW=rule.query.stride(1), KEY_ROW=rule.key.stride(1), **rule.options("chunk"),
    )  # fmt: skip
    if rule.erases:
        launch(
            resolve_kernel, (rule.all_chunks,),
            rule.beta, reading, pairs, rule.length, **rule.options("resolve"),
        )  # fmt: skip
    states, corrections = (None, None) if kept is None else kept
    launch(
        walk_forward_kernel, (rule.sequences, rule.value_width // rule.values("walk_forward")),
        asking, reading, leaving, totals, pairs, rule.value, rule.beta, initial, output, last, states, corrections,
        rule.length, VALUE_ROW=rule.value.stride(1), **rule.options("walk_forward"),
    )  # fmt: skip


def backward(
    rule: DiagonalRule, prepared: Prepared, kept: Kept, gradient: Tensor, last_gradient: Tensor | None, of: Gradients
) -> None:
    sums, totals, asking, reading, leaving, pairs = prepared
    of_states = torch.empty_like(kept.states)
    of_changes = torch.empty_like(kept.corrections) if rule.erases else of.value
    launch(
        walk_backward_kernel, (rule.sequences, rule.value_width // rule.values("walk_backward")),
        asking, reading, leaving, totals, pairs, rule.beta, gradient, last_gradient, of.memory, of_states, of_changes,
        rule.length, **rule.options("walk_backward"),
    )  # fmt: skip
    of_pairs = torch.empty_like(pairs)
    launch(
        pair_gradient_kernel, (rule.all_chunks,),
        rule.value, rule.beta, pairs, kept.corrections, gradient, of_changes, of.value, of.beta, of_pairs, rule.length,
        VALUE_ROW=rule.value.stride(1), **rule.options("pair_gradient"),
    )  # fmt: skip
    launch(
        gradient_kernel, (rule.all_chunks, rule.key_width // rule.keys("gradient")),
        rule.query, rule.key, rule.reader, rule.value, rule.beta, sums, *kept, gradient, of_states, of_pairs, of.value,
        of.query, of.key, of.reader, of.log_decay, rule.length,
        QUERY_ROW=rule.query.stride(1), KEY_ROW=rule.key.stride(1), VALUE_ROW=rule.value.stride(1),
        **rule.options("gradient"),
    )  # fmt: skip
