"""mLSTM's operator against its definition and against the paper's parallel form, both in float64."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import assert_definition, assert_near, assert_stacked, normal
from torch import Tensor

from attnbench.ops.scalar.mlstm import MLSTM_RECURRENCE, Memory, mlstm
from attnbench.ops.scalar.scalar_decay import chunked_scalar_decay

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
FORGETTING = ("0", "-0.01", "-5", "mixed")
WRITING = (-60.0, 0.0, 60.0)
"""Log of the write gate, around which it is drawn: far below 1 the normaliser is its floor."""


def inputs(length: int, forgetting: str, writing: float = 0.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, length, 3, 16), (2, length, 3, 16), (2, length, 3, 24))
    query, key, value = (normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    wide = torch.promote_types(dtype, torch.float32)
    log_write = writing + 5 * normal(2, length, 3, dtype=wide, seed=4)
    drawn = -5 * torch.rand(2, length, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_forget = drawn if forgetting == "mixed" else torch.full_like(drawn, float(forgetting))
    return [x.detach().requires_grad_() for x in (query / 4, key, value, log_forget.to(wide), log_write)]


def recurrent(query: Tensor, key: Tensor, value: Tensor, *gates: Tensor) -> Tensor:
    memory = key.new_zeros(2, 3, 16, 24), key.new_zeros(2, 3, 16), key.new_zeros(2, 3)
    return MLSTM_RECURRENCE.define(query, key, value, *gates, memory)[0]


def form(*tensors: Tensor) -> Tensor:
    return mlstm(*tensors, None, "torch")[0]


def parallel(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, log_write: Tensor) -> Tensor:
    weight, total = weights(query, key, log_forget, log_write)
    return (weight @ value.transpose(1, 2) / total).transpose(1, 2)


def weights(query: Tensor, key: Tensor, log_forget: Tensor, log_write: Tensor) -> tuple[Tensor, Tensor]:
    """All weights written out, (B, H, T, T), a row's largest term taken out of each, and what a row is divided by."""
    total = log_forget.transpose(1, 2).cumsum(-1)
    log_weight = total[..., :, None] - total[..., None, :] + log_write.transpose(1, 2)[..., None, :]
    later = torch.ones_like(log_weight, dtype=torch.bool).triu(1)
    log_weight = log_weight.masked_fill(later, -torch.inf)
    largest = log_weight.amax(-1, keepdim=True)
    weight = (query.transpose(1, 2) @ key.transpose(1, 2).mT) * (log_weight - largest).exp()
    return weight, torch.maximum(weight.sum(-1, keepdim=True).abs(), (-largest).exp())


@pytest.mark.parametrize("definition", [recurrent, parallel])
@pytest.mark.parametrize("forgetting", FORGETTING)
@pytest.mark.parametrize("length", LENGTHS)
def test_is_the_definition_and_the_papers_parallel_form(length, forgetting, definition):
    assert_definition(form, definition, inputs(length, forgetting), 1e-10)


@pytest.mark.parametrize("writing", WRITING)
@pytest.mark.parametrize("forgetting", FORGETTING)
def test_write_gates_that_overflow_leave_outputs_and_gradients_right(forgetting, writing):
    assert_definition(form, recurrent, inputs(65, forgetting, writing), 1e-10)
    assert_definition(form, recurrent, inputs(65, forgetting, writing, torch.float32), 5e-4)


def test_thousands_of_positions_of_strong_forgetting():
    """Its sum over all positions, some -10,000, has few digits of a single position's."""
    tensors = inputs(2000, "-5", 0.0, torch.float32)
    assert_near(form(*tensors), recurrent(*(x.double() for x in tensors)), 1e-4)


@pytest.mark.parametrize("forgetting", ["-0.01", "mixed"])
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_bfloat16_where_no_sum_cancels(length, forgetting):
    """Queries and keys above 0; otherwise a normaliser may nearly vanish, and its row is divided by rounding. A single
    position is v where the normaliser is above its floor, and its gradients of all else are but rounding."""
    query, key, *rest = inputs(length, forgetting, 0.0, torch.bfloat16)
    tensors = [x.detach().abs().requires_grad_() for x in (query, key)] + rest
    assert_definition(form, recurrent, tensors, 0.03)


@pytest.mark.parametrize("forgetting", FORGETTING)
@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_where_sums_cancel(length, forgetting):
    """Each number of y to within the rounding of its terms, of those above the line and of those below it: products of
    a query's channels with a key's, as a state sums them up."""
    tensors = inputs(length, forgetting, 0.0, torch.bfloat16)
    wide = [x.detach().double() for x in tensors]
    query, key, value, *gates = wide
    expected = recurrent(*wide)
    (weight, _), (_, total) = weights(query.abs(), key.abs(), *gates), weights(query, key, *gates)
    above, below = weight @ value.transpose(1, 2).abs(), weight.sum(-1, keepdim=True)
    allowed = 2**-7 * (above + expected.transpose(1, 2).abs() * below) / total
    difference = (form(*tensors).detach().double() - expected).abs()
    assert (difference <= allowed.transpose(1, 2)).all()
    # Of most rows that is a few percent.
    assert (allowed.transpose(1, 2).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.1


@pytest.mark.parametrize("sizes", [(70,), (1, 69), (33, 32, 5), (1,) * 70])
def test_pieces_are_the_whole(sizes):
    tensors = inputs(70, "mixed")
    memory = Memory(*(torch.zeros(shape, dtype=torch.float64) for shape in ((2, 3, 16, 24), (2, 3, 16), (2, 3))))
    outputs = []
    for piece in zip(*(x.split(list(sizes), dim=1) for x in tensors), strict=True):
        y, memory = mlstm(*piece, memory, "torch")
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), recurrent(*tensors), 1e-10)
    assert memory.maximum_BH.min() >= 0


def test_the_librarys_kernel_is_given_an_even_number_of_columns(monkeypatch):
    def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor, **_: Any) -> Any:
        assert v.shape[-1] % 2 == 0
        return chunked_scalar_decay(q, k, v, g, initial_state, 16)

    for name, module in (("fla", {}), ("fla.ops", {}), ("fla.ops.simple_gla", {"chunk_simple_gla": chunk_simple_gla})):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    tensors = inputs(70, "mixed")
    memory = Memory(*(torch.zeros(shape, dtype=torch.float64) for shape in ((2, 3, 16, 24), (2, 3, 16), (2, 3))))
    (y, last), (expected, last_of_torch) = (mlstm(*tensors, memory, backend) for backend in ("fla", "torch"))
    assert_near(y, expected, 1e-10)
    for actual, right in zip(last, last_of_torch, strict=True):
        assert_near(actual, right, 1e-10)


def test_nothing_of_the_future_not_even_within_rounding():
    tensors = inputs(100, "mixed", dtype=torch.float32)
    y = form(*tensors)
    for gradient in torch.autograd.grad(y[:, :40].sum(), tensors):
        assert not gradient[:, 40:].any()
    changed = [torch.cat([x[:, :40], 3 * x[:, 40:]], dim=1) for x in tensors]
    assert torch.equal(form(*changed)[:, :40], y[:, :40])


def test_under_vmap():
    tensors = [torch.stack([x, 0.9 * x]).detach().requires_grad_() for x in inputs(70, "mixed")]
    assert_stacked(form, tensors, [0] * 5)


def test_compiled():
    torch.compiler.reset()
    assert_definition(torch.compile(form, backend="aot_eager", fullgraph=True), parallel, inputs(70, "mixed"), 1e-10)


def test_a_small_normaliser_is_1_and_a_large_one_divides():
    query = key = F.normalize(torch.ones(1, 1, 1, 4), dim=-1)
    value = torch.tensor([[[[3.0, -2.0]]]])
    for log_write, factor in ((-2.0, torch.tensor(-2.0).exp()), (4.0, 1.0)):
        y = form(query, key, value, torch.zeros(1, 1, 1), torch.full((1, 1, 1), log_write))
        torch.testing.assert_close(y, factor * value)
