"""Kernels of linear attention with one decay a head against its definition in float64: through Triton's interpreter on
a CPU, whole sequences and segments side by side, and on a GPU at full widths, where a compiler can be wrong."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import DEVICE, assert_definition, assert_near, assert_same_bits, assert_stacked, normal
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.ops.scalar.lagged_scalar_decay import LAGGED_SCALAR_DECAY, lagged_scalar_decay
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY
from attnbench.ops.scalar.triton import scalar_launch as scalar_decay_launch
from attnbench.ops.scalar.triton import scalar_op as scalar_decay_kernel
from attnbench.ops.scalar.triton.scalar_op import scalar_decay, scalar_decay_backward, scalar_decay_forward
from attnbench.ops.scalar.triton.scalar_step import scalar_decay_step
from attnbench.settings.errors import UserError

# Triton's interpreter cuts bfloat16 off where a GPU rounds, which is twice as far.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if torch.cuda.is_available() else 4e-2}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
DECAYS = ("0", "-0.01", "-5", "mixed")
"""Log decays a position; mixed: of 0 to -5, drawn."""


class Shape(NamedTuple):
    length: int
    key_width: int = 16
    value_width: int = 16
    num_groups: int = 1
    num_heads: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.float32


def decays_of(shape: Shape, decay: str) -> Tensor:
    drawn = -5 * torch.rand(shape.batch, shape.length, shape.num_heads, generator=torch.Generator().manual_seed(3))
    return (drawn if decay == "mixed" else torch.full_like(drawn, float(decay))).to(DEVICE)


def inputs_of(shape: Shape, decay: str) -> list[Tensor]:
    """Packed query, key and value, log decay, weights of writing and of reading oneself, and a memory."""
    _, K, V, G, H, B, dtype = shape
    rates = (B, shape.length, H)
    mixed = normal(B, shape.length, 2 * G * K + H * V, dtype=dtype)
    weights = (normal(*rates, seed=seed) for seed in (5, 6))
    tensors = [mixed, decays_of(shape, decay), *weights, normal(B, H, K, V, seed=7)]
    return [x.requires_grad_() for x in tensors]


def check(shape: Shape, decay: str, given: str = "write memory") -> None:
    _, K, V, G, H, _, dtype = shape
    names, scale = ("mixed", "log_decay", "write", "own", "memory"), K**-0.5
    tensors = [
        x if name in ("mixed", "log_decay", *given.split()) else None
        for name, x in zip(names, inputs_of(shape, decay), strict=True)
    ]

    def kernel(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        keep = {"keep_memory": "memory" in given}
        y, last = scalar_decay(*tensors, num_groups=G, key_width=K, scale=scale, **keep)
        assert y.dtype == dtype
        assert (last is None) != keep["keep_memory"]
        return (y,) if last is None else (y, last)

    def exact(
        mixed: Tensor, log_decay: Tensor, write: Tensor | None, own: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, ...]:
        query, key, value = mixed.split([G * K, G * K, H * V], dim=-1)
        query, key = (x.unflatten(-1, (G, K)).repeat_interleave(H // G, 2) for x in (scale * query, key))
        value = value.unflatten(-1, (H, V))
        before = value.new_zeros(len(value), H, K, V) if memory is None else memory
        written = value if write is None else value * write[..., None]
        y, last = SCALAR_DECAY.define(query, key, written, log_decay, before)
        if own is not None:
            ones = torch.ones_like(log_decay)
            y, _ = LAGGED_SCALAR_DECAY.define(
                query, key, value, log_decay, ones if write is None else write, own, before
            )
        return (y,) if memory is None else (y, last)

    assert_definition(kernel, exact, tensors, TOLERANCE[dtype])


@pytest.fixture
def segments(monkeypatch):
    """Cut sequences as a few long ones are."""
    monkeypatch.setattr(scalar_decay_launch, "segment_positions", lambda batch, length, num_heads: 64)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_kernels_are_the_definition(length, decay):
    check(Shape(length), decay)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("given", ["", "own memory"])
def test_segments_side_by_side_are_one_walk(segments, decay, given):
    check(Shape(200, num_heads=2), decay, given)


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        (Shape(40, 16, 16, num_groups=2, num_heads=4, batch=2), ""),
        (Shape(70, 32, 48, num_heads=2), "write own memory"),
        (Shape(40, 48, 80, num_groups=2, num_heads=2), "own"),
        (Shape(40, 128, 32, num_heads=2), "write memory"),
        (Shape(70, 64, 64, dtype=torch.bfloat16), "write memory"),
        (Shape(70, 80, 48, num_heads=2, dtype=torch.bfloat16), "own memory"),
        (Shape(133, 16, 32, num_heads=2, dtype=torch.bfloat16), "write"),
    ],
)
def test_other_widths_shared_keys_and_what_may_be_missing(shape, given):
    check(shape, "mixed", given)


@pytest.mark.parametrize("given", ["", "own", "write own memory"])
@pytest.mark.parametrize("key_width", [16, 128])
def test_of_decays_that_learn_nothing_no_gradient_is_taken(key_width, given, monkeypatch):
    """And the others are those that they are beside it. Of keys of 128 channels there are two kernels."""
    shape = Shape(70, key_width, num_heads=2)
    tensors = inputs_of(shape, "mixed")
    names = ("mixed", "log_decay", "write", "own", "memory")
    held = {
        name: x if name in ("mixed", "log_decay", *given.split()) else None
        for name, x in zip(names, tensors, strict=True)
    }
    asked, gradients = [], []
    backward = scalar_decay_kernel.scalar_decay_backward
    counted = lambda *x: (asked.append(x[-2]), backward(*x))[1]  # noqa: E731
    monkeypatch.setattr(scalar_decay_kernel, "scalar_decay_backward", counted)
    for learns in (True, False):
        held["log_decay"] = tensors[1].detach().requires_grad_(learns)
        y, _ = scalar_decay(*held.values(), num_groups=1, key_width=key_width, scale=1.0)
        leaves = [x for name, x in held.items() if x is not None and name != "log_decay"]
        gradients.append(torch.autograd.grad(y.square().sum(), leaves))
    assert asked == [True, False]
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


@pytest.mark.parametrize("decay", [1.0, 4.0, 12.0])
def test_a_head_that_forgets_at_once_has_digits_in_its_decay_s_gradient(segments, decay):
    shape = Shape(133, num_heads=2)
    mixed = inputs_of(shape, "0")[0].detach()
    log_decay = decay * (decays_of(shape, "mixed") / 5 - 1).requires_grad_()
    weight = normal(1, 133, 2, 16, seed=8)
    y, _ = scalar_decay(mixed, log_decay, None, None, None, num_groups=1, key_width=16, scale=1.0)
    [actual] = torch.autograd.grad((y * weight).sum(), log_decay)
    query, key, value = mixed.double().split([16, 16, 32], dim=-1)
    heads = (query.unflatten(-1, (1, 16)), key.unflatten(-1, (1, 16)), value.unflatten(-1, (2, 16)))
    wide = log_decay.detach().double().requires_grad_()
    y, _ = SCALAR_DECAY.define(*heads, wide, wide.new_zeros(1, 2, 16, 16))
    [expected] = torch.autograd.grad((y * weight.double()).sum(), wide)
    # What a position reads of itself is up to exp(12) times as large as these.
    assert_near(actual, expected, 2e-4)
    assert_near(actual.sum(1), expected.sum(1), 2e-4)


def test_decay_to_nothing_stays_finite_and_right():
    shape = Shape(70, num_heads=2)
    mixed, log_decay, *_ = inputs_of(shape, "mixed")
    forget = torch.rand(log_decay.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE) < 0.1
    log_decay = torch.where(forget, -80.0, log_decay.detach()).requires_grad_()
    y, _ = scalar_decay(mixed, log_decay, None, None, None, num_groups=1, key_width=16, scale=1.0)
    for gradient in torch.autograd.grad(y.sum(), (mixed, log_decay)):
        assert gradient.isfinite().all()


def test_a_call_without_gradients_keeps_no_states():
    mixed, log_decay, write, *_ = inputs_of(Shape(70), "mixed")
    with torch.no_grad():
        y, last, states = scalar_decay_forward(mixed, log_decay, write, None, None, 1, 16, 1.0, False, False)
    assert last.numel() == states.numel() == 0
    expected, _ = scalar_decay(mixed, log_decay, write, None, None, num_groups=1, key_width=16, scale=1.0)
    assert torch.equal(y, expected)


def test_nothing_is_left_unwritten_and_again_it_is_the_same_bits(monkeypatch, segments):
    """Memory that a kernel does not write shows as NaN."""
    new, empty = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **how: new(x, *shape, **how).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x).fill_(torch.nan))
    mixed, log_decay, write, own, memory = (x.detach() for x in inputs_of(Shape(133, num_heads=2), "mixed"))
    results = []
    for _ in range(2):
        y, last, states = scalar_decay_forward(mixed, log_decay, write, own, memory.mT, 1, 16, 1.0, True, True)
        gradients = scalar_decay_backward(
            mixed, log_decay, write, own, states, y, last, 1, 16, 1.0, True, True
        )  # fmt: skip
        results.append((y, last, states, *gradients))
    for first, second in zip(*results, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


@pytest.mark.parametrize("given", [True, False])
def test_the_operator_is_a_proper_one(given):
    mixed, log_decay, *others = inputs_of(Shape(20), "mixed")
    write, own, memory = others if given else (None, None, None)
    last = None if memory is None else memory.detach().mT.requires_grad_()
    torch.library.opcheck(scalar_decay_forward, (mixed, log_decay, write, own, last, 1, 16, 1.0, given, True))


@pytest.mark.parametrize("unmapped", [None, 1, 4])
def test_stacked_calls_are_each_alone(unmapped):
    inputs = [x.detach() for x in inputs_of(Shape(20, batch=2), "mixed")]
    stacked = [x if axis == unmapped else torch.stack([x, 1.5 * x], dim=1) for axis, x in enumerate(inputs)]

    def loss(*tensors: Tensor) -> Tensor:
        y, last = scalar_decay(*tensors, num_groups=1, key_width=16, scale=1.0, keep_memory=True)
        assert last is not None
        return y.square().sum() + last.square().sum()

    in_dims = [None if axis == unmapped else 1 for axis in range(5)]
    assert_stacked(loss, [x.requires_grad_() for x in stacked], in_dims)


def test_the_operator_reports_the_flops_of_the_recurrence():
    mixed, log_decay, *_ = inputs_of(Shape(65, 16, 32, num_heads=2), "mixed")
    with FlopCounterMode(display=False) as counter:
        y, _ = scalar_decay(mixed, log_decay, None, None, None, num_groups=1, key_width=16, scale=1.0)
        assert counter.get_total_flops() == 65 * 2 * 4 * 16 * 32
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 65 * 2 * 4 * 16 * 32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("widths", "num_groups"), [((16, 16), 2), ((48, 40), 1), ((128, 64), 2)])
def test_a_step_is_the_definition_s_and_leaves_the_memory_after_it(widths, num_groups, dtype):
    K, V = widths
    shape = Shape(3, K, V, num_groups=num_groups, num_heads=4, batch=3, dtype=dtype)
    mixed, log_decay, write, _, memory = (x.detach() for x in inputs_of(shape, "mixed"))
    query, key, value = mixed.double().split([num_groups * K] * 2 + [4 * V], dim=-1)
    query, key = (x.unflatten(-1, (num_groups, K)) for x in (0.5 * query, key))
    value = value.unflatten(-1, (4, V)) * write.double()[..., None]
    expected, expected_memory = SCALAR_DECAY.define(query, key, value, log_decay.double(), memory.double())
    own = memory.clone()
    rows = [scalar_decay_step(mixed[:, t], log_decay[:, t], write[:, t], own, num_groups, 0.5) for t in range(3)]
    assert rows[0].dtype == dtype
    assert_near(torch.stack(rows, dim=1), expected, TOLERANCE[dtype])
    assert_near(own, expected_memory, TOLERANCE[torch.float32])


def test_a_step_first_adds_what_came_late():
    mixed, log_decay, write, late, memory = (x.detach() for x in inputs_of(Shape(1, 16, 40, num_heads=2), "mixed"))
    key, value = normal(1, 2, 16, seed=8), normal(1, 2, 40, seed=9)
    added = memory + late[:, 0, :, None, None] * key[..., None] * value[:, :, None]
    own, expected_memory = memory.clone(), added.clone()
    y = scalar_decay_step(mixed[:, 0], log_decay[:, 0], write[:, 0], own, 1, 1.0, key, value, late[:, 0])
    expected = scalar_decay_step(mixed[:, 0], log_decay[:, 0], write[:, 0], expected_memory, 1, 1.0)
    assert_near(y, expected, 1e-6)
    assert_near(own, expected_memory, 1e-6)


@pytest.mark.parametrize("length", [1, 40])
def test_the_last_memory_has_the_last_position_with_its_own_weight(length):
    K, V, H = 16, 16, 2
    query, key, value = (normal(2, length, H, width, seed=seed) for seed, width in enumerate((K, K, V)))
    log_decay = decays_of(Shape(length, num_heads=H, batch=2), "mixed")
    write, own = (normal(2, length, H, seed=seed) for seed in (5, 6))
    memory = normal(2, H, K, V, seed=7)
    inputs = (query, key, value, log_decay, write, own)
    expected = lagged_scalar_decay(*(x.double() for x in inputs), memory.double(), "torch")
    for actual, other in zip(lagged_scalar_decay(*inputs, memory.clone(), "triton"), expected, strict=True):
        assert_near(actual, other, 1e-5)


def test_a_dtype_that_there_is_not_is_refused():
    mixed, log_decay, *_ = inputs_of(Shape(5, dtype=torch.float64), "0")
    with pytest.raises(UserError, match=r"take bfloat16 and float32, not torch.float64.*backend=torch"):
        scalar_decay(mixed, log_decay, None, None, None, num_groups=1, key_width=16, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("length", [1, 31, 33, 64, 65, 300])
@pytest.mark.parametrize(
    ("widths", "num_groups", "dtype"),
    [
        ((16, 16), 4, torch.float32),
        ((32, 32), 4, torch.bfloat16),
        ((32, 64), 4, torch.bfloat16),
        ((64, 16), 4, torch.bfloat16),
        ((64, 48), 4, torch.bfloat16),
        ((64, 64), 4, torch.bfloat16),
        ((64, 64), 1, torch.bfloat16),
        ((64, 64), 4, torch.float32),
        ((64, 144), 4, torch.bfloat16),
        ((80, 80), 2, torch.bfloat16),
        ((128, 64), 1, torch.bfloat16),
        ((128, 64), 4, torch.bfloat16),
        ((128, 64), 1, torch.float32),
        ((128, 128), 4, torch.bfloat16),
        ((128, 128), 4, torch.float32),
        ((128, 32), 4, torch.bfloat16),
    ],
)
def test_compiled_kernels_are_the_definition(widths, num_groups, dtype, length, cut, monkeypatch):
    if cut:
        monkeypatch.setattr(scalar_decay_launch, "segment_positions", lambda batch, length, num_heads: 64)
    shape = Shape(length, *widths, num_groups=num_groups, num_heads=4, batch=2, dtype=dtype)
    for decay, given in (("mixed", ""), ("-5", "write memory"), ("-0.01", "write own memory"), ("0", "own")):
        check(shape, decay, given)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 1000])
def test_compiled_kernels_give_the_same_bits_again_and_write_everything(length):
    shape = Shape(length, 64, 64, num_groups=4, num_heads=4, batch=8, dtype=torch.bfloat16)
    inputs, how = inputs_of(shape, "mixed"), {"num_groups": 4, "key_width": 64, "scale": 0.1, "keep_memory": True}
    assert_same_bits(lambda: scalar_decay(*inputs, **how), inputs)
