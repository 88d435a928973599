"""Kernels of the decay a key channel against their definition in float64: through Triton's interpreter on a CPU, and on
a GPU, where a compiler can be wrong."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, assert_near, assert_same_bits, assert_stacked
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.ops.delta.triton import delta_choice as delta_rule_choice
from attnbench.ops.diagonal.diagonal_decay import DIAGONAL_DECAY, DiagonalInputs
from attnbench.ops.diagonal.diagonal_decay import diagonal_decay as by_backend
from attnbench.ops.diagonal.triton.diagonal_launch import DiagonalRule, in_rows
from attnbench.ops.diagonal.triton.diagonal_op import _rule, diagonal_decay, diagonal_decay_forward
from attnbench.ops.diagonal.triton.diagonal_step import diagonal_decay_step
from attnbench.settings.errors import UserError

# Triton's interpreter cuts bfloat16 off where a GPU rounds, which is twice as far.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2 if torch.cuda.is_available() else 6e-2}
KINDS = ("nothing", "beta", "reader")
"""Kinds of erasing: nothing, along the key by one strength a head, or along a reader of its own."""

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
NAMES = ("query", "key", "value", "log_decay", "reader", "beta", "memory")
DECAYS = (0.0, -0.01, -5.0, None)
"""Log decay of a head each; None: each position and channel with one of MIXED."""

MIXED = (0.0, -0.01, -0.5, -5.0, -30.0)


def rule_inputs(
    kind: str, length: int, keys: int = 16, values: int = 16, *, batch: int = 1, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """The operator's inputs by NAMES, with a head for each of DECAYS; keys have length 1."""
    generator, shape = torch.Generator().manual_seed(0), (batch, length, len(DECAYS))

    def normal(*of: int) -> Tensor:
        return torch.randn(*of, generator=generator, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    query, key, reader = normal(*shape, keys), unit(normal(*shape, keys), dim=-1), unit(normal(*shape, keys), dim=-1)
    log_decay = torch.tensor(MIXED)[torch.randint(len(MIXED), (*shape, keys), generator=generator)]
    for head, decay in enumerate(DECAYS):
        if decay is not None:
            log_decay[:, :, head] = decay
    beta = torch.rand(*shape, generator=generator)
    inputs = [
        *(query.to(dtype), key.to(dtype), normal(*shape, values).to(dtype), log_decay),
        0.7 * reader.to(dtype) if kind == "reader" else None,
        beta if kind == "beta" else None,
        normal(batch, len(DECAYS), keys, values).float(),
    ]
    return each(lambda x: x.to(DEVICE).requires_grad_(), inputs)


def definition(query: Any, key: Any, value: Any, log_decay: Any, reader: Any, beta: Any, memory: Any) -> Any:
    inputs = DiagonalInputs(query, key, value, log_decay)
    if reader is not None:
        inputs = inputs._replace(erase_BTHK=key, read_BTHK=reader)
    if beta is not None:
        inputs = inputs._replace(erase_strength=beta[..., None], write_strength=beta[..., None])
    return DIAGONAL_DECAY.define(*inputs, memory)


def each(function: Callable[..., Tensor], tensors: Iterable[Any]) -> list[Any]:
    return [None if x is None else function(x) for x in tensors]


def kernels(*inputs: Any, keep_memory: bool) -> tuple[Any, Any]:
    return diagonal_decay(*inputs, keep_memory=keep_memory)


def assert_heads_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Each head by itself: one that keeps all is far larger than one that forgets at once."""
    axis = 1 if what == "memory" else 2
    for head in range(actual.shape[axis]):
        own, other = actual.select(axis, head), expected.select(axis, head)
        assert_near(own, other, tolerance, f"{what}, head {head}", smallest=1e-3 * float(expected.detach().norm()))


def check(inputs: list[Any], *, given: bool = True) -> None:
    """Outputs and all gradients; without a memory that of the definition is zero."""
    wide = each(lambda x: x.detach().double().requires_grad_(), inputs)
    if not given:
        inputs, wide[-1] = [*inputs[:-1], None], torch.zeros_like(wide[-1])
    last = slice(None) if given else slice(1)
    output, last_memory = kernels(*inputs, keep_memory=given)
    actual, expected = (output, last_memory)[last], definition(*wide)[last]
    tolerance = TOLERANCE[inputs[0].dtype]
    for own, other, name in zip(actual, expected, ("output", "memory"), strict=False):
        assert_heads_near(own, other, tolerance, name)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(DEVICE, x.dtype) for x in actual]
    learning = [index for index, x in enumerate(inputs) if x is not None]
    gradients = torch.autograd.grad(actual, [inputs[index] for index in learning], weights)
    exact = torch.autograd.grad(expected, [wide[index] for index in learning], [x.double() for x in weights])
    for index, gradient, other in zip(learning, gradients, exact, strict=True):
        assert gradient.dtype == inputs[index].dtype
        assert_heads_near(gradient, other, tolerance, NAMES[index])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_kernels_are_the_definition(kind, length):
    check(rule_inputs(kind, length))


# Around the borders of the chunks of 64 that wide heads have; keys and values in several blocks.
@pytest.mark.parametrize(
    ("kind", "length", "keys", "values"),
    [
        *(("beta", length, 64, 64) for length in (1, 63, 65)),
        *(("reader", 65, 64, 64), ("nothing", 65, 64, 64), ("nothing", 40, 32, 48), ("beta", 40, 128, 16)),
        *(("reader", 70, 128, 128), ("nothing", 40, 64, 128)),
    ],
)
def test_kernels_at_other_widths(kind, length, keys, values):
    check(rule_inputs(kind, length, keys, values), given=kind != "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_in_bfloat16(kind):
    check(rule_inputs(kind, 65, 64, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_no_output_knows_of_later_inputs(kind):
    """But for the last bits: how much a whole chunk forgets decides by what factors its pairs are computed."""
    inputs = each(lambda x: x.detach(), rule_inputs(kind, 40))
    whole, _ = diagonal_decay(*inputs)
    for position in (0, 15, 31):
        changed = each(lambda x: x.clone(), inputs)
        for x in changed[:-1]:
            if x is not None:
                x[:, position + 1 :] *= 0.5
        other, _ = diagonal_decay(*changed)
        assert_near(other[:, : position + 1], whole[:, : position + 1], 1e-6)
        assert not torch.equal(other[:, position + 1], whole[:, position + 1])


def test_chunks_that_forget_too_much_for_one_product_and_those_just_short_of_it():
    """Sums of log decays around -80, which is the most that one product of a chunk, or of a block of 16, holds."""
    for rate in (2.4, 2.6, 4.9, 5.1):
        inputs = rule_inputs("beta", 40)
        inputs[3] = torch.full_like(inputs[3], -rate).requires_grad_()
        check(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_where_a_projection_has_left_them(kind):
    """Query, key and value side by side, as views: the same bits as of copies, and nothing is copied."""
    inputs = rule_inputs(kind, 33, 16, 32, batch=2)
    packed = torch.cat([x.detach().flatten(2) for x in inputs[:3]], dim=-1)
    views = [x.unflatten(2, (len(DECAYS), -1)) for x in packed.split([64, 64, 128], dim=-1)]
    rule = _rule(*views, *inputs[3:6])
    assert [x.data_ptr() for x in (rule.query, rule.key, rule.value)] == [x.data_ptr() for x in views]
    apart = [*(x.requires_grad_() for x in views), *inputs[3:]]
    learning = [index for index, x in enumerate(inputs) if x is not None]
    results = []
    for given in (inputs, apart):
        output, memory = kernels(*given, keep_memory=True)
        of = torch.autograd.grad(output.square().sum() + memory.sum(), [given[index] for index in learning])
        results.append([output, memory, *of])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)
        assert own.is_contiguous()
        assert other.is_contiguous()
    # Heads that do not lie side by side, or sequences that do not follow each other evenly, are copied.
    for x in (inputs[0].transpose(1, 2).contiguous().transpose(1, 2), packed[:, ::2].unflatten(2, (16, 16))):
        assert in_rows(x[:, :16]).is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_few_sequences_are_walked_by_more_programs(kind, monkeypatch):
    """Blocks of 16 channels of values, as a device takes them whose multiprocessors are more than the walks."""
    monkeypatch.setattr(delta_rule_choice, "num_multiprocessors", lambda device: 132)
    inputs = rule_inputs(kind, 133, 16, 64)
    assert DiagonalRule(*inputs[:6]).values("walk_forward") == 16
    check(inputs)


def test_a_call_without_gradients_keeps_no_states():
    inputs = rule_inputs("beta", 40)
    with torch.no_grad():
        _, _, *kept = diagonal_decay_forward(*inputs, False, False)
        alone, last = diagonal_decay(*inputs, keep_memory=True)
    assert [x.numel() for x in kept] == [0] * 8
    expected, expected_last = diagonal_decay(*inputs, keep_memory=True)
    torch.testing.assert_close(alone, expected, rtol=0, atol=0)
    torch.testing.assert_close(last, expected_last, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "given"), [("nothing", False), ("reader", True)])
def test_the_operator_is_a_proper_one(kind, given):
    *inputs, memory = rule_inputs(kind, 5)
    torch.library.opcheck(diagonal_decay_forward, (*inputs, memory if given else None, given, True))


@pytest.mark.parametrize(("kind", "unmapped"), [("nothing", None), ("beta", 1), ("reader", 6)])
def test_stacked_calls_are_each_alone(kind, unmapped):
    inputs = each(lambda x: x.detach(), rule_inputs(kind, 5))
    there = [index for index, x in enumerate(inputs) if x is not None]
    stacked = [
        inputs[index] if index == unmapped else torch.stack([inputs[index], 0.7 * inputs[index]], dim=1)
        for index in there
    ]

    def loss(*tensors: Tensor) -> Tensor:
        named = dict(zip(there, tensors, strict=True))
        output, last = kernels(*(named.get(index) for index in range(7)), keep_memory=True)
        return output.square().sum() + last.square().sum()

    in_dims = [None if index == unmapped else 1 for index in there]
    assert_stacked(loss, [x.requires_grad_() for x in stacked], in_dims)


@pytest.mark.parametrize(("kind", "num_products"), [("nothing", 2), ("beta", 3), ("reader", 3)])
def test_the_operator_reports_the_flops_of_the_recurrence(kind, num_products):
    inputs, forward = rule_inputs(kind, 35, 16, 32), 35 * 4 * 2 * num_products * 16 * 32
    with FlopCounterMode(display=False) as counter:
        output, _ = diagonal_decay(*inputs)
        assert counter.get_total_flops() == forward
        output.sum().backward()
    assert counter.get_total_flops() == 3 * forward


def test_a_dtype_that_there_is_not_is_refused():
    inputs = each(lambda x: x.detach().double(), rule_inputs("nothing", 5))
    with pytest.raises(UserError, match=r"bfloat16 and float32, not torch\.float64.*=torch"):
        diagonal_decay(*inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [*KINDS, "free"])
def test_a_step_is_the_definition_s_and_leaves_the_memory_after_it(kind, dtype):
    inputs = rule_inputs("reader" if kind == "free" else kind, 3, 32, 48, batch=2, dtype=dtype)
    *sequences, memory = each(lambda x: x.detach(), inputs)
    eraser = 0.5 * sequences[2][..., :32].contiguous() if kind == "free" else None
    wide = each(lambda x: x.double(), (*sequences, eraser, memory))
    if eraser is None:
        expected, expected_memory = definition(*wide[:6], wide[-1])
    else:
        free = DiagonalInputs(*wide[:4], read_BTHK=wide[4], erase_BTHK=wide[6])
        expected, expected_memory = DIAGONAL_DECAY.define(*free, wide[-1])
    own = memory.clone()
    tensors = (*sequences, eraser)
    rows = [diagonal_decay_step(*each(lambda x, t=t: x[:, t], tensors), own) for t in range(3)]
    assert rows[0].dtype == dtype
    assert_near(torch.stack(rows, dim=1), expected, TOLERANCE[dtype])
    assert_near(own, expected_memory, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["strengths", "free"])
def test_backend_triton_takes_all_that_the_operator_does(kind):
    query, key, value, log_decay, reader, _, memory = rule_inputs("reader", 35)
    if kind == "free":
        names, extra = ("read_BTHK", "erase_BTHK"), (reader, 0.5 * value.detach())
    else:
        names, extra = ("erase_strength", "write_strength"), (value.detach().sigmoid(), reader.detach().sigmoid())
    tensors = [query, key, value, log_decay, *(x.detach().requires_grad_() for x in extra), memory]
    wide = [x.detach().double().requires_grad_() for x in tensors]

    def given(tensors: Any) -> DiagonalInputs:
        return DiagonalInputs(*tensors[:4], **dict(zip(names, tensors[4:6], strict=True)))

    actual, expected = (
        by_backend(given(tensors), memory, "triton"),
        DIAGONAL_DECAY.define(*given(wide), wide[-1]),
    )
    gradients = (
        torch.autograd.grad((y.square().sum(), m.sum()), x) for (y, m), x in ((actual, tensors), (expected, wide))
    )
    for own, other in zip((*actual, *next(gradients)), (*expected, *next(gradients)), strict=True):
        assert_near(own, other.detach(), 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [*LENGTHS, 300])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("keys", "values"), [(16, 16), (32, 32), (32, 64), (64, 16), (64, 64), (64, 128), (128, 32), (128, 128), (16, 48)]
)
def test_compiled_kernels_are_the_definition(keys, values, dtype, length, kind):
    for given in (False, True):
        check(rule_inputs(kind, length, keys, values, batch=2, dtype=dtype), given=given)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_give_the_same_bits_again_and_write_everything(kind):
    inputs = rule_inputs(kind, 1000, 64, 64, batch=8, dtype=torch.bfloat16)
    assert_same_bits(lambda: kernels(*inputs, keep_memory=True), [x for x in inputs if x is not None])
