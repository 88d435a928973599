"""Decay a key channel: the chunked form against the definition, and the definition against forms that others wrote."""

import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_checks import DECAYS, EACH_LENGTH, assert_stacked
from library_forms import naive_form
from torch import Tensor

from attnbench.mixers.definition import PART_FACTOR, TOLERANCES
from attnbench.mixers.relative_errors import position_error, relative_error
from attnbench.ops.diagonal.diagonal_decay import (
    DIAGONAL_DECAY,
    DiagonalInputs,
    chunked_diagonal_decay,
    diagonal_decay,
)

BATCH, HEADS, KEYS, VALUES = 2, 2, 16, 12
KINDS = ("nothing", "key", "free")
"""Kinds of erasing: e = 0, e = k, or e and r free."""


def example(kind: str, decay: str, length: int, seed: int = 0) -> tuple[DiagonalInputs, Tensor, Tensor]:
    """Inputs, a memory, and the weights of the sum of outputs that gradients are taken of, all in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        # Numbers that bfloat16 has too, so that rounding them is no part of the error.
        return torch.randn(*shape, generator=generator).bfloat16().double()

    def unit(width: int) -> Tensor:
        return torch.nn.functional.normalize(normal(BATCH, length, HEADS, width), dim=-1).bfloat16().double()

    key, value = unit(KEYS), normal(BATCH, length, HEADS, VALUES)
    if decay == "mixed":
        # Within one channel and from channel to channel: kept, then all but gone, then kept.
        among = torch.tensor([0.0, -0.01, -0.5, -5.0, -30.0], dtype=torch.float64)
        log_decay = among[torch.randint(5, key.shape, generator=generator)]
    else:
        log_decay = torch.full_like(key, float(decay))
    inputs = DiagonalInputs(normal(BATCH, length, HEADS, KEYS), key, value, log_decay)
    if kind == "key":
        inputs = inputs._replace(
            erase_strength=normal(BATCH, length, HEADS, KEYS).sigmoid(),
            write_strength=normal(BATCH, length, HEADS, VALUES).sigmoid(),
        )
    if kind == "free":
        erase = unit(KEYS)
        read = erase * normal(BATCH, length, HEADS, KEYS).sigmoid()
        inputs = inputs._replace(erase_BTHK=erase, read_BTHK=read)
    return inputs, normal(BATCH, HEADS, KEYS, VALUES), normal(BATCH, length, HEADS, VALUES)


def computed(form, inputs: DiagonalInputs, memory: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
    """Output, last memory and the gradients of a sum of both in every input."""
    named = {name: x for name, x in inputs._asdict().items() if x is not None}
    if memory is not None:
        named["memory"] = memory
    named = {name: x.detach().requires_grad_() for name, x in named.items()}
    mixed, last = form(DiagonalInputs(**{k: x for k, x in named.items() if k != "memory"}), named.get("memory"))
    loss = (mixed * weight.to(mixed.dtype)).sum() + (last.square().sum() if memory is not None else 0)
    gradients = torch.autograd.grad(loss, list(named.values()))
    return {"output": mixed, "last": last} | dict(zip(named, gradients, strict=True))


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each as a whole, and what has positions at the worst of them."""
    assert actual.keys() == expected.keys()
    largest = max(float(x.norm()) for name, x in expected.items() if name not in ("output", "last"))
    for name, x in expected.items():
        assert actual[name].isfinite().all(), name
        # A gradient that the others dwarf, as a decay's where all is forgotten, is mostly their rounding.
        smallest = 0.0 if name in ("output", "last") else 1e-3 * largest
        error = relative_error(actual[name].detach(), x.detach(), smallest)
        assert error <= tolerance, f"{name} differs by {error:.1e}"
    error = position_error(*(x["output"].detach().flatten(2) for x in (actual, expected)))
    assert error <= PART_FACTOR * tolerance, f"a position of the output differs by {error:.1e}"


def cast(inputs: DiagonalInputs, dtype: torch.dtype) -> DiagonalInputs:
    """Decays and strengths in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow = ("query_BTHK", "key_BTHK", "value_BTHV", "erase_BTHK", "read_BTHK")
    pairs = {name: x.to(dtype if name in narrow else wide) for name, x in inputs._asdict().items() if x is not None}
    return DiagonalInputs(**pairs)


def definition(inputs: DiagonalInputs, memory: Tensor) -> tuple[Tensor, Tensor]:
    return DIAGONAL_DECAY.define(*inputs, memory)


def without_memory(inputs: DiagonalInputs, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    return DIAGONAL_DECAY.define(*inputs, inputs.log_decay_BTHK.new_zeros(BATCH, HEADS, KEYS, VALUES))


def between(inputs: DiagonalInputs, start: int, end: int) -> DiagonalInputs:
    return inputs.each(lambda x: x[:, start:end])


def followed(inputs: DiagonalInputs, length: int, other: DiagonalInputs) -> DiagonalInputs:
    """The first positions of one, then five times the rest of the other."""
    named = {name: x for name, x in other._asdict().items() if x is not None}
    pairs = {name: torch.cat([getattr(inputs, name)[:, :length], 5 * x[:, length:]], 1) for name, x in named.items()}
    return DiagonalInputs(**pairs)


def check_chunked(kind: str, decay: str, length: int, dtype: torch.dtype, size: int, has_memory: bool) -> None:
    inputs, memory, weight = example(kind, decay, length)
    memory = memory if has_memory else None
    expected = computed(definition if has_memory else without_memory, inputs, memory, weight)
    chunked = partial(chunked_diagonal_decay, num_positions=size)
    wide = torch.promote_types(dtype, torch.float32)
    actual = computed(chunked, cast(inputs, dtype), None if memory is None else memory.to(wide), weight.to(dtype))
    check(actual, expected, TOLERANCES[str(dtype).removeprefix("torch.")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", EACH_LENGTH)
def test_chunked_form_is_the_definition(kind, decay, length):
    check_chunked(kind, decay, length, torch.float64, 32, has_memory=True)
    check_chunked(kind, decay, length, torch.float32, 64, has_memory=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [17, 64, 133])
def test_chunked_form_is_the_definition_in_bfloat16(kind, decay, length):
    check_chunked(kind, decay, length, torch.bfloat16, 32, has_memory=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_output_knows_of_later_inputs(kind):
    """To the bit, with decays so strong that a wrong pair would be infinite."""
    inputs, memory, _ = example(kind, "mixed", 133)
    other, *_ = example(kind, "mixed", 133, seed=1)
    whole, _ = chunked_diagonal_decay(inputs, memory, 64)
    for position in (0, 15, 63, 64, 100):
        changed, _ = chunked_diagonal_decay(followed(inputs, position + 1, other), memory, 64)
        assert torch.equal(changed[:, : position + 1], whole[:, : position + 1])
        assert not torch.equal(changed[:, position + 1 :], whole[:, position + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_steps_go_on_from_a_memory(kind):
    inputs, memory, _ = example(kind, "mixed", 40)
    expected, last = DIAGONAL_DECAY.define(*inputs, memory)
    outputs = []
    for start, end in pairwise((0, 17, 18, 19, 40)):
        mixed, memory = diagonal_decay(between(inputs, start, end), memory, "torch")
        assert memory is not None
        outputs.append(mixed)
    assert relative_error(torch.cat(outputs, 1), expected) < 1e-12
    assert relative_error(memory, last) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_under_vmap(kind):
    several = [example(kind, decay, 70)[:2] for decay in ("-0.01", "mixed", "-5")]
    names = [name for name, x in several[0][0]._asdict().items() if x is not None]
    stacked = [torch.stack([getattr(inputs, name) for inputs, _ in several]).requires_grad_() for name in names]

    def form(memory: Tensor, *parts: Tensor) -> Tensor:
        return chunked_diagonal_decay(DiagonalInputs(**dict(zip(names, parts, strict=True))), memory, 32)[0]

    memories = torch.stack([memory for _, memory in several])
    assert_stacked(form, [memories, *stacked], [0] * (1 + len(stacked)), 1e-10)


@pytest.mark.slow
def test_compiles_without_a_break():
    inputs, memory, weight = example("free", "mixed", 70)
    torch.compiler.reset()
    chunked = partial(chunked_diagonal_decay, num_positions=32)
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    check(computed(compiled, inputs, memory, weight), computed(chunked, inputs, memory, weight), 1e-12)


def test_a_position_that_forgets_all_costs_the_others_no_digits():
    """A difference of sums over the chunk would have no digit left of the slow decays."""
    inputs, *_ = example("nothing", "-0.01", 64)
    log_decay = inputs.log_decay_BTHK.clone()
    log_decay[:, 20] = -1e6
    inputs = inputs._replace(log_decay_BTHK=log_decay)
    expected, _ = without_memory(inputs, None)
    actual, _ = chunked_diagonal_decay(cast(inputs, torch.float32), None, 64)
    assert position_error(actual.flatten(2), expected.flatten(2)) < 2e-6


@pytest.mark.parametrize("length", [1, 40])
def test_definition_is_that_of_gla(length):
    naive = naive_form("gla")
    inputs, memory, _ = example("nothing", "mixed", length)
    expected = naive.naive_recurrent_gla(*inputs[:4], initial_state=memory, output_final_state=True)
    check_against_theirs(inputs, memory, expected)


def test_definition_is_that_of_kda():
    naive = naive_form("kda")
    inputs, memory, _ = example("key", "mixed", 40)
    assert inputs.erase_strength is not None
    strength = inputs.erase_strength[..., :1]
    inputs = inputs._replace(erase_strength=strength, write_strength=strength)
    expected = naive.naive_recurrent_kda(
        *inputs[:4], strength.squeeze(-1), initial_state=memory, output_final_state=True
    )
    check_against_theirs(inputs, memory, expected)


def test_definition_is_that_of_gated_deltanet_2():
    naive = naive_form("gdn2")
    inputs, memory, _ = example("key", "mixed", 40)
    expected = naive.naive_recurrent_gdn2(*inputs[:6], initial_state=memory, output_final_state=True)
    check_against_theirs(inputs, memory, expected)


def test_definition_with_free_erasure_is_that_of_a_diagonal_plus_a_matrix_of_rank_one():
    naive = naive_form("generalized_delta_rule/dplr")
    inputs, memory, _ = example("free", "mixed", 40)
    query, key, value, log_decay, *_, erase, read = inputs
    # Its r meets the state before it has decayed.
    assert read is not None
    assert erase is not None
    parts = (query, key, value, -read * log_decay.exp(), erase, log_decay)
    mixed, last = naive.dplr_recurrence(*(x.transpose(1, 2).float() for x in parts), initial_state=memory.float())
    check_against_theirs(inputs, memory, (mixed.transpose(1, 2), last))


def check_against_theirs(inputs: DiagonalInputs, memory: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """Theirs scales the query and computes in float32."""
    mixed, last = DIAGONAL_DECAY.define(*inputs, memory)
    assert relative_error(KEYS**-0.5 * mixed, expected[0]) < 1e-5
    assert relative_error(last, expected[1]) < 1e-5


def test_the_librarys_kernels_get_the_same_recurrence(monkeypatch):
    """Their slow forms stand in for the kernels, which need a GPU; strengths a head reach the kernel for one a head."""
    gla, kda, gdn2, dplr = map(naive_form, ("gla", "kda", "gdn2", "generalized_delta_rule/dplr"))
    called = []

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, **options: Any) -> Any:
        called.append("gla")
        return gla.naive_recurrent_gla(scale * KEYS**0.5 * q, k, v, g, **options)

    def chunk_kda(*inputs: Tensor, **options: Any) -> Any:
        called.append("kda")
        return kda.naive_recurrent_kda(*inputs, **options)

    def chunk_gdn2(*inputs: Tensor, **options: Any) -> Any:
        called.append("gdn2")
        return gdn2.naive_recurrent_gdn2(*inputs, **options)

    def chunk_dplr_delta_rule(*inputs: Tensor, gk: Tensor, scale: float, initial_state: Tensor, **options: Any) -> Any:
        called.append("dplr")
        query, *rest = (x.transpose(1, 2).float() for x in (*inputs, gk))
        mixed, last = dplr.dplr_recurrence(scale * KEYS**0.5 * query, *rest, initial_state.float(), **options)
        return mixed.transpose(1, 2), last

    for module, kernel in (
        ("gla", chunk_gla),
        ("kda", chunk_kda),
        ("gdn2", chunk_gdn2),
        ("generalized_delta_rule", chunk_dplr_delta_rule),
    ):
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", SimpleNamespace(**{kernel.__name__: kernel}))
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
    of_key, memory, _ = example("key", "mixed", 40)
    assert of_key.erase_strength is not None
    strength = of_key.erase_strength[..., :1]
    for inputs in (
        example("nothing", "mixed", 40)[0],
        of_key._replace(erase_strength=strength, write_strength=strength),
        of_key,
        of_key._replace(write_strength=None),
        example("free", "mixed", 40)[0],
    ):
        expected, last = DIAGONAL_DECAY.define(*inputs, memory)
        mixed, last_of_library = diagonal_decay(inputs, memory, "fla")
        assert last_of_library is not None
        assert relative_error(mixed, expected) < 1e-5
        assert relative_error(last_of_library, last) < 1e-5
    assert called == ["gla", "kda", "gdn2", "gdn2", "dplr"]
