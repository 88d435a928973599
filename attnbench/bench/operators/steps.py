"""Implementations of one new position: attention over a cache, whole or split along the keys, and steps of
ops/state_steps.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.bench.operators.gate import compared_heads, reference
from attnbench.bench.operators.roofline import Work
from attnbench.machine.device import require_triton
from attnbench.ops.attention.attention_kernels import IMPLEMENTATIONS, load_flash_attn
from attnbench.ops.attention.softmax_attention import attend
from attnbench.ops.state_steps import STATE_STEPS, StateStep, StepInputs
from attnbench.settings.errors import UserError

MAX_COMPARED = 8
"""Heads of all sequences that are compared with float64."""

MAX_KERNEL_WIDTH = 256


@dataclass(slots=True, kw_only=True, frozen=True)
class CacheShape:
    head_width: int
    cache_length: int
    batch_size: int
    num_heads: int
    num_key_value_heads: int

    @property
    def cache(self) -> tuple[int, int, int, int]:
        """(B, S, G, K)."""
        return self.batch_size, self.cache_length, self.num_key_value_heads, self.head_width

    @property
    def compared_heads(self) -> list[int]:
        return compared_heads(self.batch_size * self.num_heads, MAX_COMPARED)


class StepExample(NamedTuple):
    """Random inputs, never zeros."""

    shape: CacheShape
    query_BHK: Tensor
    key_BSGK: Tensor
    value_BSGK: Tensor
    newest: StepInputs
    """The same query, the cache's last key and value for every query head, and states in place of a cache."""


Call = Callable[[], Tensor]
"""Timed call; returns y as any view of (B, H, K)."""

Refuse = Callable[[str, str, int], str | None]
"""Returns the reason why an implementation cannot run on a device type, in a precision, at a head width; or None."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Step:
    name: str
    prepare: Callable[[StepExample], Call]
    """Lay the inputs out for this implementation, or raise UserError for a missing library."""
    refuse: Refuse
    expected: Callable[[StepExample], Tensor]
    """y in float64, (heads compared, 1, K)."""
    work: Callable[[CacheShape, int], Work]
    """Operations and bytes, at the given bytes a number."""
    backend: Callable[[str, str, int], str] | None = None
    """Name of the kernel of a mixer's step, as for `refuse`; None: the implementation's name says it."""

    def label(self, device_type: str, precision: str, width: int) -> str:
        return self.name if self.backend is None else f"{self.name} ({self.backend(device_type, precision, width)})"


def _attention_expected(example: StepExample) -> Tensor:
    shape = example.shape
    indices = [divmod(index, shape.num_heads) for index in shape.compared_heads]
    shared_by = shape.num_heads // shape.num_key_value_heads
    query_BTK = torch.stack([example.query_BHK[batch, head] for batch, head in indices])[:, None]
    key_BTK, value_BTK = (
        torch.stack([x[batch, :, head // shared_by] for batch, head in indices])
        for x in (example.key_BSGK, example.value_BSGK)
    )
    return reference(query_BTK, key_BTK, value_BTK, None, causal=False)[0]


def _attention_work(shape: CacheShape, itemsize: int) -> Work:
    """Count keys and values once, and a product with each."""
    B, S, G, K = shape.cache
    return Work(4 * B * S * shape.num_heads * K, 2 * B * S * G * K * itemsize)


def _textbook(example: StepExample) -> Call:
    """The product that all backends of softmax and flash but triton use."""
    visible_TS = torch.ones(1, example.shape.cache_length, dtype=torch.bool, device=example.query_BHK.device)
    return lambda: attend(example.query_BHK[:, None], example.key_BSGK, example.value_BSGK, visible_TS)


def _sdpa(example: StepExample, name: str) -> Call:
    attend_BHTK = IMPLEMENTATIONS[name].make()
    key_BGSK, value_BGSK = (x.transpose(1, 2).contiguous() for x in (example.key_BSGK, example.value_BSGK))
    return lambda: attend_BHTK(example.query_BHK[:, :, None], key_BGSK, value_BGSK, False)


def _flash_attn(example: StepExample, num_splits: int) -> Call:
    load_flash_attn()
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    query_B1HK = example.query_BHK[:, None]
    return lambda: flash_attn_with_kvcache(query_B1HK, example.key_BSGK, example.value_BSGK, num_splits=num_splits)


def _triton(example: StepExample, splits: int | None) -> Call:
    from attnbench.ops.attention.triton.flash_decoding import flash_decoding

    position = torch.tensor(example.shape.cache_length - 1, device=example.query_BHK.device)
    return lambda: flash_decoding(example.query_BHK, example.key_BSGK, example.value_BSGK, position, splits=splits)


def _refuse_triton(device_type: str, precision: str, width: int) -> str | None:
    try:
        require_triton("implementation triton", device_type)
    except UserError as refusal:
        return str(refusal)
    if width > MAX_KERNEL_WIDTH:
        return f"our kernel takes up to {MAX_KERNEL_WIDTH} channels a head, not {width}"
    return None


def _of_state(name: str, step: StateStep) -> Step:
    def expected(example: StepExample) -> Tensor:
        return step.define(example.newest).flatten(0, 2)[example.shape.compared_heads, None]

    def work(shape: CacheShape, itemsize: int) -> Work:
        numbers = shape.batch_size * shape.num_heads * shape.head_width**2
        return Work(step.flops * numbers, 8 * numbers)

    return Step(
        name=name,
        prepare=lambda example: step.prepare(example.newest),
        refuse=step.refuse,
        expected=expected,
        work=work,
        backend=step.choose,
    )


def _attention(name: str, prepare: Callable[[StepExample], Call], refuse: Refuse | None = None) -> Step:
    refuse = refuse or IMPLEMENTATIONS[name].refusal
    return Step(name=name, prepare=prepare, refuse=refuse, expected=_attention_expected, work=_attention_work)


WHOLE, SPLIT = "_whole", "_split"
_FLASH_ATTN = IMPLEMENTATIONS["flash_attn"].refusal
STEPS = {
    step.name: step
    for step in (
        _attention("textbook", _textbook),
        *(_attention(name, partial(_sdpa, name=name)) for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")),
        _attention(f"flash_attn{WHOLE}", partial(_flash_attn, num_splits=1), _FLASH_ATTN),
        # 0 leaves the number of splits to the library.
        _attention(f"flash_attn{SPLIT}", partial(_flash_attn, num_splits=0), _FLASH_ATTN),
        _attention(f"triton{WHOLE}", partial(_triton, splits=1), _refuse_triton),
        _attention(f"triton{SPLIT}", partial(_triton, splits=None), _refuse_triton),
        *(_of_state(name, step) for name, step in STATE_STEPS.items()),
    )
}
