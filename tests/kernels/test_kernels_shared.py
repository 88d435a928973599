"""The kernels that all models share, through Triton's interpreter on a CPU and, marked gpu, on a card."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, assert_near, normal

from attnbench.kernels import embedding as embedding_kernel
from attnbench.kernels import flash_launch, linear_attention
from attnbench.kernels import linear_cross_entropy as loss_kernel
from attnbench.kernels.delta_rule_launch import DeltaRule
from attnbench.kernels.embedding import embed
from attnbench.kernels.linear_cross_entropy import linear_cross_entropy
from attnbench.kernels.rotary import split_rotated
from attnbench.kernels.swiglu import swiglu
from attnbench.machine.precision import multiplying
from attnbench.mixers.layers import rotate, rotation
from attnbench.model.loss import cross_entropy

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


@pytest.mark.parametrize(("precision", "expected"), [("float32", "tf32x3"), ("tf32", "tf32")])
def test_float32_is_multiplied_as_torch_multiplies_it(precision, expected):
    mixed, rate = normal(1, 16, 3 * 2 * 16), normal(1, 16, 2)
    query = normal(1, 16, 2, 16)
    with multiplying(precision):
        constants = [
            flash_launch._constants("forward", query, query, True, None),
            linear_attention._arguments(mixed, 2, "elu", linear_attention.forward_blocks(mixed, 2)),
            DeltaRule(mixed, rate, rate, 2, 16, False).options("read"),
        ]
        assert [own["PRECISION"] for own in constants] == [expected] * 3
        assert DeltaRule(mixed.bfloat16(), rate, rate, 2, 16, False).options("read")["PRECISION"] == "tf32"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (33, 24), (40, 150)])
def test_swiglu_is_silu_times_up_and_so_is_its_gradient(rows, width, dtype):
    packed = normal(rows, 2 * width, dtype=dtype).mul(3).requires_grad_()
    wide = packed.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    expected, actual = F.silu(gate) * up, swiglu(packed)
    gradient = normal(rows, width, dtype=dtype, seed=1)
    expected.backward(gradient.double())
    actual.backward(gradient)
    assert_near(actual, expected, TOLERANCES[dtype])
    assert_near(packed.grad, wide.grad, TOLERANCES[dtype])


def test_swiglu_of_stacked_models_is_that_of_each():
    packed = normal(3, 5, 16).requires_grad_()
    torch.vmap(swiglu)(packed).square().sum().backward()
    one = packed.detach()[1].clone().requires_grad_()
    swiglu(one).square().sum().backward()
    assert_near(packed.grad[1], one.grad, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("part_bytes", [2**25, 1000])
@pytest.mark.parametrize(("num_symbols", "block"), [(10, 4096), (61, 16), (64, 16)])
def test_the_loss_and_its_gradients_are_those_of_the_logits(
    num_symbols, block, part_bytes, is_weighted, dtype, monkeypatch
):
    # In several parts of the rows, and a row in several blocks, as with many rows and symbols.
    monkeypatch.setattr(loss_kernel, "PART_BYTES", part_bytes)
    monkeypatch.setattr(loss_kernel, "MAX_BLOCK", block)
    x, weight = normal(27, 16, dtype=dtype).requires_grad_(), normal(num_symbols, 16, seed=1)
    weight.requires_grad_()
    targets = torch.arange(27, device=DEVICE) * 7 % num_symbols
    labels = (torch.arange(27, device=DEVICE) % 3).float() if is_weighted else None
    actual, *_ = linear_cross_entropy(x, weight, targets, labels, True)
    (0.3 * actual).backward()
    wide_x = x.detach().double().requires_grad_()
    wide_weight = weight.detach().to(dtype).double().requires_grad_()
    nats_N = F.cross_entropy(wide_x @ wide_weight.T, targets, reduction="none")
    expected = nats_N.sum() if labels is None else (nats_N * labels).sum()
    (0.3 * expected).backward()
    assert_near(actual, expected, TOLERANCES[dtype])
    assert_near(x.grad, wide_x.grad, TOLERANCES[dtype])
    assert_near(weight.grad, wide_weight.grad, TOLERANCES[dtype])


def test_the_loss_without_gradient_is_that_of_the_house():
    x, weight = normal(9, 16), normal(20, 16, seed=1)
    targets = torch.arange(9, device=DEVICE)
    total, of_x, of_weight = linear_cross_entropy(x, weight, targets, None, False)
    assert_near(total, cross_entropy(x @ weight.T, targets), 1e-5)
    assert of_x.numel() == of_weight.numel() == 0


def test_the_loss_of_stacked_models_is_that_of_each():
    x, weight = normal(3, 9, 16).requires_grad_(), normal(3, 20, 16, seed=1)
    weight.requires_grad_()
    targets = torch.arange(9, device=DEVICE)

    def nats(x_ND, weight_VD):
        return linear_cross_entropy(x_ND, weight_VD, targets, None, True)[0]

    torch.vmap(nats)(x, weight).sum().backward()
    one, own = x.detach()[1].clone().requires_grad_(), weight.detach()[1].clone().requires_grad_()
    nats(one, own).backward()
    assert_near(x.grad[1], one.grad, 1e-6)
    assert_near(weight.grad[1], own.grad, 1e-6)


@pytest.mark.parametrize("operator", ["swiglu", "linear_cross_entropy", "embed"])
def test_the_compiler_sees_through_the_operators(operator):
    x = normal(8, 16).requires_grad_()

    def function(x):
        if operator == "swiglu":
            return swiglu(x).sum()
        if operator == "embed":
            return embed(torch.arange(8, device=DEVICE) // 3, x, torch.bfloat16).float().square().sum()
        return linear_cross_entropy(x, x, torch.arange(8, device=DEVICE), None, True)[0]

    expected = torch.autograd.grad(function(x), x)[0]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_near(torch.autograd.grad(compiled(x), x)[0], expected, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 2, 16), (4, 2, 24)])
def test_split_and_rotated_is_what_the_layers_make_of_the_projection(heads, groups, width, dtype):
    packed = normal(2, 37, (heads + 2 * groups) * width, dtype=dtype).requires_grad_()
    wide = packed.detach().double().requires_grad_()
    angles = rotation(37, width, 0, 10000.0, packed.device)
    actual = split_rotated(packed, angles, heads, groups)
    parts = [
        part.unflatten(-1, (-1, width)) for part in wide.split([heads * width, groups * width, groups * width], dim=-1)
    ]
    expected = rotate(parts[0], angles), rotate(parts[1], angles), parts[2]
    gradients = [normal(*x.shape, dtype=dtype, seed=seed) for seed, x in enumerate(expected)]
    # As views too, which is how attention hands them over.
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients]
    torch.autograd.backward(actual, views)
    torch.autograd.backward(expected, [x.double() for x in gradients])
    for own, other in zip((*actual, packed.grad), (*expected, wide.grad), strict=True):
        assert_near(own, other, TOLERANCES[dtype])


def test_stacked_models_are_split_and_rotated_as_each():
    packed = normal(3, 2, 5, 48).requires_grad_()
    angles = rotation(5, 16, 0, 10000.0, packed.device)

    def function(packed_BTC):
        query, key, value = split_rotated(packed_BTC, angles, 1, 1)
        return (query * key * value).sum()

    torch.vmap(function)(packed).sum().backward()
    one = packed.detach()[1].clone().requires_grad_()
    function(one).backward()
    assert_near(packed.grad[1], one.grad, 1e-6)


def tokens_of(num_rows, num_symbols, seed=0):
    """Some symbols more often than others, and some not at all."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_rows, generator=generator).square() * num_symbols * 0.9).long().to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("most", [2048, 1], ids=["products", "sorted"])
@pytest.mark.parametrize(("rows", "num_symbols", "width"), [(1, 10, 8), (700, 400, 72), (2100, 129, 16)])
def test_an_embeddings_rows_and_their_gradient(rows, num_symbols, width, most, dtype, monkeypatch):
    monkeypatch.setattr(embedding_kernel, "MAX_SYMBOLS", most)
    tokens, weight = tokens_of(rows, num_symbols), normal(num_symbols, width).requires_grad_()
    gradient = normal(rows, width, dtype=dtype, seed=1)
    actual = embed(tokens, weight, dtype)
    actual.backward(gradient)
    assert torch.equal(actual, weight.detach()[tokens].to(dtype))
    expected = torch.zeros(num_symbols, width, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, tokens, gradient.double())
    assert_near(weight.grad, expected, 1e-5)


def test_a_token_without_a_row_is_not_a_number():
    rows = embed(torch.tensor([0, 3, -1, 2], device=DEVICE), normal(3, 8), torch.float32)
    assert rows.isnan().all(1).tolist() == [False, True, True, False]


def test_rows_of_stacked_models_are_those_of_each():
    tokens, weight = tokens_of(3 * 9, 12).view(3, 9), normal(3, 12, 16).requires_grad_()
    scale = normal(9, 16, seed=1)

    def function(tokens_N, weight_VD):
        return (embed(tokens_N, weight_VD, torch.float32) * scale).sum()

    torch.vmap(function)(tokens, weight).sum().backward()
    one = weight.detach()[1].clone().requires_grad_()
    function(tokens[1], one).backward()
    assert_near(weight.grad[1], one.grad, 1e-6)
