"""The operator of one decay a head: its chunked form against its definition in float64 and against a library's."""

from collections.abc import Callable

import pytest
import torch
from kernel_checks import assert_definition, assert_near, assert_stacked, normal
from library_forms import naive_form
from torch import Tensor

from attnbench.ops.scalar.lagged_scalar_decay import LAGGED_SCALAR_DECAY, lagged_scalar_decay
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY, chunked_scalar_decay, scalar_decay

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
DECAYS = ("0", "-0.01", "-5", "mixed")
"""Log decays a position; mixed: of 0 to -5, drawn."""

chunks = pytest.mark.parametrize("num_positions", [32, 64])


def inputs(
    length: int, decay: str, *, groups: int = 3, dtype: torch.dtype = torch.float64, batch: int = 2
) -> list[Tensor]:
    """Query, key, value, log decay and memory, each to take a gradient of."""
    shapes = ((batch, length, groups, 16), (batch, length, groups, 16), (batch, length, 3, 24))
    query, key, value = (normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    drawn = -5 * torch.rand(batch, length, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_decay = drawn if decay == "mixed" else torch.full_like(drawn, float(decay))
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [query / 4, key, value, log_decay.to(wide), normal(batch, 3, 16, 24, dtype=wide, seed=4)]
    return [x.detach().requires_grad_() for x in tensors]


def chunked(num_positions: int) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *tensors: chunked_scalar_decay(*tensors, num_positions)


@chunks
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_definition_in_outputs_and_gradients(length, decay, num_positions):
    assert_definition(chunked(num_positions), SCALAR_DECAY.define, inputs(length, decay), 1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 17, 64, 133])
def test_chunks_in_other_precisions(length, decay, dtype, tolerance):
    assert_definition(chunked(32), SCALAR_DECAY.define, inputs(length, decay, dtype=dtype), tolerance)


@pytest.mark.parametrize("length", [1, 65])
def test_one_query_and_key_serve_all_heads(length):
    tensors = inputs(length, "mixed", groups=1)
    assert_definition(chunked(32), SCALAR_DECAY.define, tensors, 1e-11)
    each = [x.expand(-1, -1, 3, -1) for x in tensors[:2]]
    assert_near(chunked(32)(*tensors)[0], chunked(32)(*each, *tensors[2:])[0], 1e-12)


def test_two_groups_serve_two_heads_each_in_order():
    query, key = (normal(2, 20, 2, 16, dtype=torch.float64, seed=seed) for seed in (0, 1))
    value, memory = normal(2, 20, 4, 24, dtype=torch.float64), normal(2, 4, 16, 24, dtype=torch.float64)
    log_decay = -normal(2, 20, 4, dtype=torch.float64).abs()
    y, last = chunked_scalar_decay(query, key, value, log_decay, memory, 16)
    for head in range(4):
        one = slice(head, head + 1)
        group = slice(head // 2, head // 2 + 1)
        inputs_of_head = (query[:, :, group], key[:, :, group], value[:, :, one], log_decay[:, :, one], memory[:, one])
        expected, expected_last = SCALAR_DECAY.define(*inputs_of_head)
        assert_near(y[:, :, one], expected, 1e-12)
        assert_near(last[:, one], expected_last, 1e-12)


def test_decays_of_a_batch_of_one_are_those_of_all():
    tensors = inputs(70, "mixed")
    tensors[3] = tensors[3][:1].detach().requires_grad_()
    assert_definition(chunked(32), SCALAR_DECAY.define, tensors, 1e-11)


def test_no_memory_is_one_of_zeros():
    *tensors, memory = inputs(40, "mixed")
    actual = scalar_decay(*tensors, None, "torch")
    for own, other in zip(actual, SCALAR_DECAY.define(*tensors, torch.zeros_like(memory)), strict=True):
        assert_near(own, other, 1e-12)


@pytest.mark.parametrize("position", [0, 30, 31, 32, 99])
def test_nothing_of_the_future_not_even_within_rounding(position):
    tensors = inputs(100, "mixed", dtype=torch.float32)
    y, _ = chunked(32)(*tensors)
    gradients = torch.autograd.grad(y[:, : position + 1].sum(), tensors[:4], retain_graph=True)
    for gradient in gradients:
        assert not gradient[:, position + 1 :].any()
    changed = [torch.cat([x[:, : position + 1], 3 * x[:, position + 1 :]], dim=1) for x in tensors[:4]]
    assert torch.equal(chunked(32)(*changed, tensors[4])[0][:, : position + 1], y[:, : position + 1])


def test_a_single_position_is_the_definition():
    tensors = inputs(1, "mixed")
    for own, other in zip(scalar_decay(*tensors, "torch"), SCALAR_DECAY.define(*tensors), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("unmapped", [None, 0, 3, 4])
def test_chunks_under_vmap(unmapped):
    tensors = [torch.stack([x, 0.9 * x, 0.5 * x]).detach().requires_grad_() for x in inputs(70, "mixed")]
    in_dims: list[int | None] = [0] * 5
    if unmapped is not None:
        tensors[unmapped], in_dims[unmapped] = inputs(70, "mixed")[unmapped], None
    assert_stacked(lambda *mapped: chunked(32)(*mapped)[0], tensors, in_dims)


def test_chunks_compiled():
    torch.compiler.reset()
    compiled = torch.compile(chunked(32), backend="aot_eager", fullgraph=True)
    assert_definition(compiled, SCALAR_DECAY.define, inputs(70, "mixed"), 1e-11)


def lagged_inputs(length: int, decay: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Those of `inputs`, and between decay and memory the weights of writing and of reading oneself."""
    *tensors, memory = inputs(length, decay, dtype=dtype)
    weights = (normal(2, length, 3, dtype=memory.dtype, seed=seed).requires_grad_() for seed in (5, 6))
    return [*tensors, *weights, memory]


def lagged(*tensors: Tensor) -> Tensor:
    return lagged_scalar_decay(*tensors, "torch")[0]


def lagged_definition(*tensors: Tensor) -> Tensor:
    return LAGGED_SCALAR_DECAY.define(*tensors)[0]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_positions_that_read_themselves_with_a_weight_of_their_own(length, decay):
    tensors = lagged_inputs(length, decay)
    # Of a single position nothing reads what it writes.
    tensors[4].requires_grad_(length > 1)
    assert_definition(lagged, lagged_definition, tensors, 1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_weights_of_their_own_in_other_precisions(decay, dtype, tolerance):
    assert_definition(lagged, lagged_definition, lagged_inputs(65, decay, dtype), tolerance)


def test_the_last_memory_has_the_last_position_with_its_own_weight():
    query, key, value, log_decay, write, own, memory = lagged_inputs(40, "mixed")
    _, last = lagged_scalar_decay(query, key, value, log_decay, write, own, memory, "torch")
    weight = torch.cat([write[:, :-1], own[:, -1:]], dim=1)
    assert_near(last, SCALAR_DECAY.define(query, key, value * weight[..., None], log_decay, memory)[1], 1e-12)


@pytest.mark.parametrize("position", [0, 31, 32, 98])
def test_a_weight_of_writing_is_not_seen_where_it_is_written(position):
    tensors = lagged_inputs(100, "mixed", torch.float32)
    y = lagged(*tensors)
    gradients = torch.autograd.grad(y[:, : position + 1].sum(), tensors[:6])
    assert not gradients[4][:, position:].any()
    assert gradients[5][:, position].any()
    for gradient in gradients:
        assert not gradient[:, position + 1 :].any()
    changed = tensors[4].detach().clone()
    changed[:, position:] *= -1e6
    assert torch.equal(lagged(*tensors[:4], changed, *tensors[5:])[:, : position + 1], y[:, : position + 1])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 65, 133])
def test_flash_linear_attentions_own_definition_agrees(length, decay):
    theirs = naive_form("simple_gla")
    query, key, value, log_decay, memory = (x.detach().float() for x in inputs(length, decay))
    # Theirs adds to the memory that it is given in place.
    options = {"scale": 1.0, "initial_state": memory.clone(), "output_final_state": True}
    expected = theirs.naive_recurrent_simple_gla(query, key, value, log_decay, **options)
    for form in (SCALAR_DECAY.define, chunked(32)):
        for own, other in zip(form(query, key, value, log_decay, memory), expected, strict=True):
            assert_near(own, other, 1e-5)
