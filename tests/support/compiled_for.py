"""Compiles kernels for a card that need not be here: compiled_for.py CAPABILITY [WORD], as in 89.

Those of the problems below or, with a word, of the problems whose names have it. Prints for each its name, its problem
and what shared memory a program needs in KiB; inf if it cannot be compiled.
"""

import math
import os
import sys
import tempfile
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from attnbench.ops.attention.triton import flash_launch
from attnbench.ops.attention.triton import flash_op as flash_attention
from attnbench.ops.attention.triton.cumulative_gates import cumulative_log_forget
from attnbench.ops.common.triton import launching
from attnbench.ops.delta.triton import delta_choice as delta_rule_choice
from attnbench.ops.delta.triton.delta_op import gated_delta_rule
from attnbench.ops.diagonal.triton.diagonal_op import diagonal_decay
from attnbench.ops.layers.triton.embedding import embed
from attnbench.ops.layers.triton.turned_heads import turned_heads
from attnbench.ops.linear.triton.linear_op import linear_attention
from attnbench.ops.scalar.triton.scalar_op import scalar_decay

LENGTH, HEADS = 512, 2


class Driver:
    """Properties of a card that Triton asks for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def empty(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, LENGTH, channels, dtype=dtype, requires_grad=True)


def attended(width: int, dtype: torch.dtype) -> Tensor:
    heads = empty(3 * HEADS * width, dtype).unflatten(2, (-1, width)).split(HEADS, dim=2)
    return flash_attention.flash_attention(*heads, causal=True)


def attended_by_latents(width: int, value_width: int, dtype: torch.dtype) -> Tensor:
    query, key = (empty(HEADS * width, dtype).unflatten(2, (HEADS, width)) for _ in range(2))
    value = empty(HEADS * value_width, dtype).unflatten(2, (HEADS, value_width))
    return flash_attention.flash_attention(query, key, value, causal=True)


def turned_and_attended(width: int, dtype: torch.dtype) -> Tensor:
    heads, angles = {"num_heads": HEADS, "num_key_value_heads": HEADS}, torch.empty(2, LENGTH, width // 2)
    return flash_attention.packed_flash_attention(empty(3 * HEADS * width, dtype), angles, causal=True, **heads)


def forgotten(width: int, dtype: torch.dtype) -> Tensor:
    heads = empty(3 * HEADS * width, dtype).unflatten(2, (-1, width)).split(HEADS, dim=2)
    log_forget = torch.empty(1, LENGTH, HEADS, requires_grad=True)
    return flash_attention.flash_attention(*heads, cumulative_log_forget(log_forget), causal=True)


def summed(width: int, dtype: torch.dtype, *, is_turned: bool = False) -> Tensor:
    angles = torch.empty(2, LENGTH, width // 2) if is_turned else None
    return linear_attention(empty(3 * HEADS * width, dtype), None, None, HEADS, "elu", 1e-6, angles)[0]


def decayed(keys: int, values: int, dtype: torch.dtype) -> Tensor:
    mixed, rates = empty(2 * keys + HEADS * values, dtype), torch.empty(1, LENGTH, HEADS)
    return scalar_decay(mixed, rates, rates, rates, None, num_groups=1, key_width=keys, scale=1.0)[0]


def corrected(keys: int, values: int, dtype: torch.dtype, parallel: bool) -> Tensor:
    mixed, rates = empty(HEADS * (2 * keys + values), dtype), torch.empty(1, LENGTH, HEADS)
    return gated_delta_rule(
        mixed, rates, rates, num_heads=HEADS, key_width=keys, unit_length=True, parallel=parallel
    )[0]  # fmt: skip


def decayed_by_channel(kind: str, keys: int, values: int, dtype: torch.dtype) -> Tensor:
    query, key, reader = (empty(HEADS * keys, dtype).unflatten(2, (HEADS, keys)) for _ in range(3))
    log_decay, beta = empty(HEADS * keys, WHOLE).unflatten(2, (HEADS, keys)), empty(HEADS, WHOLE)
    chosen = {"nothing": (None, None), "beta": (None, beta), "reader": (reader, None)}[kind]
    return diagonal_decay(query, key, empty(HEADS * values, dtype).unflatten(2, (HEADS, values)), log_decay, *chosen)[0]


def turned(keys: int, dtype: torch.dtype) -> Tensor:
    gain, bias = torch.empty(1, 2, keys, requires_grad=True), torch.empty(1, 2, HEADS, keys, requires_grad=True)
    return turned_heads(empty(2 * keys + 128, dtype), gain, bias, torch.empty(1, LENGTH, HEADS, keys // 4), 1e-6)


def embedded(dtype: torch.dtype) -> Tensor:
    return embed(torch.empty(LENGTH, dtype=torch.int64), torch.empty(1000, 256, requires_grad=True), dtype)


HALF, WHOLE = torch.bfloat16, torch.float32
PROBLEMS = {
    "flash, 128 channels, bfloat16": partial(attended, 128, HALF),
    "flash, 80 x 64 channels, bfloat16": partial(attended_by_latents, 80, 64, HALF),
    "flash, 128 x 64 channels, float32": partial(attended_by_latents, 128, 64, WHOLE),
    "flash, 64 channels, rotated, bfloat16": partial(turned_and_attended, 64, HALF),
    "flash, 128 channels, rotated, bfloat16": partial(turned_and_attended, 128, HALF),
    "flash, 64 channels, rotated, float32": partial(turned_and_attended, 64, WHOLE),
    "flash, 128 channels, rotated, float32": partial(turned_and_attended, 128, WHOLE),
    "flash, 64 channels, rotated, tf32": partial(turned_and_attended, 64, WHOLE),
    "flash that forgets, 64 channels, bfloat16": partial(forgotten, 64, HALF),
    "flash that forgets, 128 channels, bfloat16": partial(forgotten, 128, HALF),
    "flash that forgets, 64 channels, float32": partial(forgotten, 64, WHOLE),
    "flash that forgets, 128 channels, float32": partial(forgotten, 128, WHOLE),
    "flash that forgets, 64 channels, tf32": partial(forgotten, 64, WHOLE),
    "linear, 128 channels, bfloat16": partial(summed, 128, HALF),
    "linear, 64 channels, rotated, bfloat16": partial(summed, 64, HALF, is_turned=True),
    "linear, 128 channels, rotated, bfloat16": partial(summed, 128, HALF, is_turned=True),
    "linear, 64 channels, rotated, float32": partial(summed, 64, WHOLE, is_turned=True),
    "scalar decay, 64 x 64, bfloat16": partial(decayed, 64, 64, HALF),
    "scalar decay, 128 x 128, bfloat16": partial(decayed, 128, 128, HALF),
    "scalar decay, 128 x 128, float32": partial(decayed, 128, 128, WHOLE),
    "scalar decay, 128 x 128, tf32": partial(decayed, 128, 128, WHOLE),
    "turned heads, 128 channels, bfloat16": partial(turned, 128, HALF),
    "turned heads, 128 channels, float32": partial(turned, 128, WHOLE),
    "embedding, bfloat16": partial(embedded, HALF),
    "embedding, float32": partial(embedded, WHOLE),
} | {
    f"gated_deltanet, {keys} x {values}, {dtype}, {parallel=}": partial(corrected, keys, values, dtype, parallel)
    for keys, values, dtype in ((128, 128, HALF), (256, 512, HALF), (256, 32, HALF), (128, 128, WHOLE))
    for parallel in (False, True)
}

PROBLEMS |= {
    f"decay a channel, {kind}, {keys} x {values}, {dtype}": partial(decayed_by_channel, kind, keys, values, dtype)
    for kind, keys, values, dtype in (
        ("nothing", 64, 64, HALF),
        ("beta", 64, 64, HALF),
        ("reader", 128, 128, HALF),
        ("reader", 128, 128, WHOLE),
    )
} | {"decay a channel, reader, 128 x 128, tf32": partial(decayed_by_channel, "reader", 128, 128, WHOLE)}


def report(
    problem: str, kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> None:
    """In the place of `launching.begin`."""
    named = {name: triton.MockTensor.wrap_dtype(x) for name, x in options}
    try:
        needed = kernel.warmup(*arguments, grid=(1,), **named).metadata.shared / 1024
    except Exception:
        needed = math.inf
    print(f"{kernel.fn.__name__}, {problem}: {needed:.1f}", flush=True)


def main(capability: int, word: str = "") -> None:
    triton.runtime.driver.set_active(Driver(capability))
    # What comes after the memory is laid out takes longest and is not needed.
    CUDABackend.make_ptx = lambda self, source, metadata, *rest: metadata.update(name="none") or ""
    CUDABackend.make_cubin = lambda *inputs: b""
    launching.can_compile = lambda inputs: True
    # It holds a CPU's tensors for the interpreter's, which has no products in bfloat16.
    flash_attention._check = lambda *inputs: None
    for module in (delta_rule_choice, flash_launch):
        module.is_roomy = lambda device: capability // 10 in (9, 10)
        module.num_multiprocessors = lambda device: 128
    with tempfile.TemporaryDirectory() as cache, FakeTensorMode():
        triton.knobs.cache.dir = cache
        for problem, run in PROBLEMS.items():
            if word in problem:
                torch.set_float32_matmul_precision("high" if "tf32" in problem else "highest")
                launching.begin = partial(report, problem)
                run().sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
