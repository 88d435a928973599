"""Implementations of one new position: attention over a cache, read whole or split along the keys, and the steps of
recurrent states in place of a cache. Each is called by its name, and by no other."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.bench.operators.gate import reference
from attnbench.bench.operators.roofline import Work
from attnbench.machine.device import require_triton
from attnbench.mixers.gated_deltanet import GatedDeltaNet
from attnbench.mixers.linear import LinearAttention
from attnbench.ops.attention_kernels import IMPLEMENTATIONS, load_flash_attn
from attnbench.ops.delta_rule import has_kernels, recurrent_gated_delta_rule
from attnbench.ops.linear_attention import EPS, chunked_linear_attention, feature
from attnbench.ops.softmax_attention import attend
from attnbench.settings.errors import UserError

MAX_COMPARED = 8
"""Heads of all sequences that are held against float64, the first and the last among them."""

MAX_KERNEL_WIDTH = 256


@dataclass(slots=True, kw_only=True, frozen=True)
class CacheShape:
    """Shape of a cache and of the queries that read it."""

    head_width: int
    cache_length: int
    batch_size: int
    num_heads: int
    num_key_value_heads: int

    @property
    def cache(self) -> tuple[int, int, int, int]:
        """(B, S, G, K)."""
        return self.batch_size, self.cache_length, self.num_key_value_heads, self.head_width


@dataclass(slots=True, kw_only=True)
class StepExample:
    """Random inputs, never zeros. The cache's last key and value are the new ones of what has a state."""

    shape: CacheShape
    query_BHK: Tensor
    key_BSGK: Tensor
    value_BSGK: Tensor
    memory_BHKV: Tensor
    """Float32, as all states are."""
    normaliser_BHK: Tensor
    log_decay_B1H: Tensor
    beta_B1H: Tensor

    @property
    def kind(self) -> tuple[str, str]:
        """Device type and precision."""
        return self.query_BHK.device.type, str(self.query_BHK.dtype).removeprefix("torch.")

    def newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one position, (B, 1, H, K)."""
        shared_by = self.shape.num_heads // self.shape.num_key_value_heads
        key, value = (x[:, -1:].repeat_interleave(shared_by, dim=2) for x in (self.key_BSGK, self.value_BSGK))
        return self.query_BHK[:, None], key, value


Call = Callable[[], Tensor]
"""The call that is timed; returns y as any view of (B, H, K)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Step:
    """One new position by one implementation."""

    name: str
    prepare: Callable[[StepExample], Call]
    """Lay the inputs out as this implementation wants them, or raise a UserError where something is not installed."""
    refuse: Callable[[str, str, int], str | None]
    """Return why it cannot run on a device type, in a precision, at a head width; None where it can."""
    expected: Callable[[StepExample], Tensor]
    """y in float64, (heads compared, 1, K)."""
    work: Callable[[CacheShape, int], Work]
    """Operations and bytes, at so many bytes a number."""
    backend: Callable[[str, str, int], str] | None = None
    """Name of the kernel that a mixer's step has, as for `refuse`; None where the implementation's name says it."""

    def label(self, device_type: str, precision: str, width: int) -> str:
        """The name of its numbers in rows and tables."""
        return self.name if self.backend is None else f"{self.name} ({self.backend(device_type, precision, width)})"


def compared_heads(shape: CacheShape) -> list[int]:
    """Indices of the heads that are compared, counted over all sequences."""
    count = shape.batch_size * shape.num_heads
    return sorted({round(index * (count - 1) / (MAX_COMPARED - 1)) for index in range(MAX_COMPARED)})


def _attention_expected(example: StepExample) -> Tensor:
    shape = example.shape
    indices = [divmod(index, shape.num_heads) for index in compared_heads(shape)]
    shared_by = shape.num_heads // shape.num_key_value_heads
    query_BTK = torch.stack([example.query_BHK[batch, head] for batch, head in indices])[:, None]
    key_BTK, value_BTK = (
        torch.stack([x[batch, :, head // shared_by] for batch, head in indices])
        for x in (example.key_BSGK, example.value_BSGK)
    )
    return reference(query_BTK, key_BTK, value_BTK, None, causal=False)[0]


def _attention_work(shape: CacheShape, itemsize: int) -> Work:
    """Keys and values read once; a product with each."""
    B, S, G, K = shape.cache
    return Work(4 * B * S * shape.num_heads * K, 2 * B * S * G * K * itemsize)


def _textbook(example: StepExample) -> Call:
    """The product that all backends of softmax and flash but triton decode with."""
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
    from attnbench.kernels.flash_decoding import flash_decoding

    position = torch.tensor(example.shape.cache_length - 1, device=example.query_BHK.device)
    return lambda: flash_decoding(example.query_BHK, example.key_BSGK, example.value_BSGK, position, splits=splits)


def _refuse_triton(device_type: str, precision: str, width: int) -> str | None:
    try:
        require_triton("implementation triton", device_type)
    except UserError as refusal:
        return str(refusal)
    return (
        None if width <= MAX_KERNEL_WIDTH else f"our kernel takes up to {MAX_KERNEL_WIDTH} channels a head, not {width}"
    )


def _state_work(shape: CacheShape, flops: int) -> Work:
    """The state read and written once, and so many operations for each of its numbers."""
    numbers = shape.batch_size * shape.num_heads * shape.head_width**2
    return Work(flops * numbers, 8 * numbers)


def _linear_expected(example: StepExample) -> Tensor:
    query, key, value = (x[:, 0].double() for x in example.newest())
    query, key = feature(query, "elu"), feature(key, "elu")
    memory_BHKV = example.memory_BHKV.double() + key[..., None] * value[..., None, :]
    total_BH1 = (query * (example.normaliser_BHK.double() + key)).sum(-1, keepdim=True)
    mixed_BHV = (query[..., None, :] @ memory_BHKV)[..., 0, :] / (total_BH1 + EPS)
    return mixed_BHV.flatten(0, 1)[compared_heads(example.shape), None]


def _linear_backend(device_type: str, precision: str, width: int) -> str:
    return LinearAttention.choose_backend({"head_width": width}, device_type=device_type, precision=precision)


def _linear(example: StepExample) -> Call:
    """As the mixer's step has it, between its projections."""
    newest, memory, normaliser = example.newest(), example.memory_BHKV, example.normaliser_BHK
    if _linear_backend(*example.kind, example.shape.head_width) == "triton":
        from attnbench.kernels.linear_attention import linear_attention

        mixed_B1C, num_heads = torch.cat([x.flatten(2) for x in newest], dim=-1), example.shape.num_heads
        return lambda: linear_attention(mixed_B1C, memory, normaliser, num_heads, "elu", EPS)[0]

    def call() -> Tensor:
        query, key = feature(newest[0], "elu"), feature(newest[1], "elu")
        mixed_B1HV, _ = chunked_linear_attention(query, key, newest[2], memory, 1)
        total_B1H = (query * (normaliser[:, None] + key)).sum(-1)
        return mixed_B1HV / (total_B1H[..., None] + EPS)

    return call


def _refuse_linear(device_type: str, precision: str, width: int) -> str | None:
    refused = device_type == "cuda" and precision == "float16"
    return "linear attention's kernel takes float32 and bfloat16" if refused else None


def _gated_deltanet_backend(device_type: str, precision: str, width: int) -> str:
    return GatedDeltaNet.choose_backend({"head_width": width}, device_type=device_type, precision=precision)


def _gated_deltanet(example: StepExample) -> Call:
    """As the mixer's step has it, between its projections."""
    query, key, value = example.newest()
    # Of length 1, as the mixer makes them: a longer key would have the state grow.
    key = F.normalize(key.float(), dim=-1).to(key.dtype)
    gates, width = (example.log_decay_B1H, example.beta_B1H), example.shape.head_width
    if _gated_deltanet_backend(*example.kind, width) == "triton":
        from attnbench.kernels.delta_rule_step import gated_delta_rule_step

        # The kernel scales the query; and its state, which it changes, is its own.
        mixed_BC = torch.cat([x[:, 0].flatten(1) for x in (query * width**0.5, key, value)], dim=-1)
        memory = example.memory_BHKV.clone()
        return lambda: gated_delta_rule_step(mixed_BC, *(x[:, 0] for x in gates), memory, False)
    return lambda: recurrent_gated_delta_rule(query, key, value, *gates, example.memory_BHKV)[0]


def _gated_deltanet_expected(example: StepExample) -> Tensor:
    query, key, value = example.newest()
    key = F.normalize(key.float(), dim=-1).to(key.dtype)
    wide = (x.double() for x in (query, key, value, example.log_decay_B1H, example.beta_B1H, example.memory_BHKV))
    return recurrent_gated_delta_rule(*wide)[0].flatten(0, 2)[compared_heads(example.shape), None]


def _refuse_gated_deltanet(device_type: str, precision: str, width: int) -> str | None:
    refused = device_type == "cuda" and precision == "float16" and has_kernels(width, width, precision)
    return "Gated DeltaNet's kernel takes float32 and bfloat16" if refused else None


def _attention(
    name: str, prepare: Callable[[StepExample], Call], refuse: Callable[[str, str, int], str | None] | None = None
) -> Step:
    return Step(
        name=name,
        prepare=prepare,
        refuse=refuse or IMPLEMENTATIONS[name].refusal,
        expected=_attention_expected,
        work=_attention_work,
    )


WHOLE, SPLIT = "_whole", "_split"
STEPS = {
    step.name: step
    for step in (
        _attention("textbook", _textbook),
        *(
            _attention(name, functools.partial(_sdpa, name=name))
            for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
        ),
        *(
            _attention(
                f"flash_attn{how}",
                functools.partial(_flash_attn, num_splits=num_splits),
                IMPLEMENTATIONS["flash_attn"].refusal,
            )
            # 0 leaves the number of splits to the library.
            for how, num_splits in ((WHOLE, 1), (SPLIT, 0))
        ),
        *(
            _attention(f"triton{how}", functools.partial(_triton, splits=splits), _refuse_triton)
            for how, splits in ((WHOLE, 1), (SPLIT, None))
        ),
        Step(
            name="linear",
            prepare=_linear,
            refuse=_refuse_linear,
            expected=_linear_expected,
            work=lambda shape, _: _state_work(shape, 4),
            backend=_linear_backend,
        ),
        Step(
            name="gated_deltanet",
            prepare=_gated_deltanet,
            refuse=_refuse_gated_deltanet,
            expected=_gated_deltanet_expected,
            work=lambda shape, _: _state_work(shape, 6),
            backend=_gated_deltanet_backend,
        ),
    )
}
