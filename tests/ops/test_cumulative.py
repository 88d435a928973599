"""Sums over positions in pieces, and that no mixer leaves a long one to torch's compiler."""

import pytest
import torch
from mixer_building import build, example_input
from small import MIXERS
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.ops.common.cumulative_sum import PIECE, cumulative_sum


@pytest.mark.parametrize("length", [1, 5, PIECE, PIECE + 1, 100, PIECE**2, PIECE**2 + 1])
def test_sums_are_torchs_with_their_gradients(length):
    x_BTHK = torch.randn(2, length, 3, 4, dtype=torch.float64, requires_grad=True)
    sums_BTHK, expected = cumulative_sum(x_BTHK), x_BTHK.cumsum(1)
    torch.testing.assert_close(sums_BTHK, expected)
    weight = torch.randn_like(expected)
    (actual,), (exact,) = (torch.autograd.grad(y, x_BTHK, weight) for y in (sums_BTHK, expected))
    torch.testing.assert_close(actual, exact)


def test_a_sum_knows_nothing_of_later_positions():
    x_BTH = torch.randn(2, 100, 3)
    other_BTH = torch.cat([x_BTH[:, :70], torch.full((2, 30, 3), 1e9)], dim=1)
    assert torch.equal(cumulative_sum(x_BTH)[:, :70], cumulative_sum(other_BTH)[:, :70])


class Scans(TorchDispatchMode):
    """Lengths of all cumulative sums that are not along the last axis, which the compiler sums as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.cumsum.default:
            x, dim = args[:2]
            if dim % x.dim() != x.dim() - 1:
                self.lengths.append(x.shape[dim])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MIXERS)
def test_no_mixer_leaves_a_long_sum_to_the_compiler(name):
    """On a GPU torch 2.11 fails to compile one where there are few sums side by side."""
    with Scans() as scans:
        build(name)(example_input(2, 200))[0].sum().backward()
    assert max(scans.lengths, default=0) <= PIECE
