"""Linear maps of a stack, whose weights' gradients are summed in parts."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from attnbench.training import stack_linear
from attnbench.training.stack_linear import SplitSums, num_parts


def gradients(mode, x, weight, autocast):
    with mode, autocast:
        y = torch.vmap(lambda x, weight: F.linear(x, weight))(x, weight)
    return y, *torch.autograd.grad(y.double().square().sum(), (x, weight))


@pytest.mark.parametrize("shape", [(3, 4, 6, 7), (3, 7), (3, 5, 7)])
def test_a_sum_in_parts_is_the_sum(shape, monkeypatch):
    monkeypatch.setattr(stack_linear, "LEAST_ROWS", 2)
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, 7, dtype=torch.float64, requires_grad=True)
    ours, theirs = (gradients(mode, x, weight, nullcontext()) for mode in (SplitSums(), nullcontext()))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_autocast_rounds_the_factors_as_it_does_outside(monkeypatch):
    monkeypatch.setattr(stack_linear, "LEAST_ROWS", 2)
    x, weight = torch.randn(3, 4, 8, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    autocast = torch.autocast("cpu", torch.bfloat16)
    ours, theirs = (gradients(mode, x, weight, autocast) for mode in (SplitSums(), nullcontext()))
    assert ours[0].dtype == torch.bfloat16
    assert torch.equal(ours[0], theirs[0])
    for own, other in zip(ours[1:], theirs[1:], strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def test_parts_are_equal_and_not_too_short():
    assert [num_parts(number) for number in (1, 511, 1024, 64 * 103, 65536)] == [1, 1, 2, 8, 128]


def test_one_weight_for_all_and_a_bias_are_torchs_own():
    x, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 2, 4), torch.randn(2)
    with SplitSums():
        ours = torch.vmap(lambda weight: F.linear(x[0], weight))(weight)
        biased = torch.vmap(lambda weight: F.linear(x[0], weight, bias))(weight)
    torch.testing.assert_close(ours, x[0] @ weight.mT)
    torch.testing.assert_close(biased, x[0] @ weight.mT + bias)
