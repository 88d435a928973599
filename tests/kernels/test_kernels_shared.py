"""The kernels that all models share, through Triton's interpreter on a CPU and, marked gpu, on a card."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from compiled_products import multiply_kernel
from kernel_checks import DEVICE, assert_definition, assert_near, assert_stacked, normal

from attnbench.machine.precision import multiplying
from attnbench.model.loss import cross_entropy
from attnbench.ops.attention.triton import flash_launch
from attnbench.ops.delta.triton.delta_choice import DeltaRule
from attnbench.ops.diagonal.triton.diagonal_launch import DiagonalRule
from attnbench.ops.layers.rotary import rotate, rotation
from attnbench.ops.layers.triton import embedding as embedding_kernel
from attnbench.ops.layers.triton import linear_cross_entropy as loss_kernel
from attnbench.ops.layers.triton import rms_norm as norm_kernel
from attnbench.ops.layers.triton.embedding import embed
from attnbench.ops.layers.triton.linear_cross_entropy import linear_cross_entropy
from attnbench.ops.layers.triton.rms_norm import rms_norm
from attnbench.ops.layers.triton.rotary_kernels import split_rotated, turn_packed
from attnbench.ops.layers.triton.swiglu import swiglu
from attnbench.ops.linear.triton import linear_op as linear_attention
from attnbench.ops.scalar.triton.scalar_launch import ScalarDecay

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


@pytest.mark.parametrize(
    ("precision", "attention", "others"), [("float32", "tf32x3", "tf32x3"), ("tf32", "tf32", "rounded tf32")]
)
def test_float32_is_multiplied_as_torch_multiplies_it(precision, attention, others):
    mixed, rate = normal(1, 16, 3 * 2 * 16), normal(1, 16, 2)
    query = normal(1, 16, 2, 16)
    with multiplying(precision):
        constants = [
            flash_launch._constants("forward", (query,) * 3, False, False, True, None),
            linear_attention._arguments(mixed, None, 2, "elu", linear_attention.forward_blocks(mixed, 2, False)),
            DeltaRule(mixed, rate, rate, 2, 2, 16, False).options("read"),
            ScalarDecay(mixed, rate, None, None, 2, 16, 1.0).options("gradient"),
        ]
        assert [own["PRECISION"] for own in constants] == [attention, *[others] * 3]
        assert DeltaRule(mixed.bfloat16(), rate, rate, 2, 2, 16, False).options("read")["PRECISION"] == "tf32"


@pytest.mark.parametrize(
    ("dtype", "width", "of_delta", "of_diagonal"),
    [
        (torch.bfloat16, 64, (64, 4), (64, 8)),
        (torch.float32, 32, (32, 2), (32, 4)),
        (torch.float32, 64, (32, 8), (32, 8)),
        (torch.float32, 128, (64, 8), (32, 8)),
    ],
)
def test_float32_has_shorter_chunks_and_more_warps(dtype, width, of_delta, of_diagonal):
    heads, rate = torch.empty(1, 64, 1, width, dtype=dtype), torch.empty(1, 64, 1)
    rules = (
        DeltaRule(heads.flatten(2).repeat(1, 1, 3), rate, rate, 1, 1, width, False),
        DiagonalRule(*[heads] * 4, None, rate),
    )
    chosen = [(rule.chunk, rule.launch_of("gradient")["num_warps"]) for rule in rules]
    assert chosen == [of_delta, of_diagonal]


@pytest.mark.parametrize(
    ("dtype", "width", "plain", "rotated"),
    [
        (torch.bfloat16, 64, (64, 4), (64, 4)),
        (torch.float32, 32, (32, 4), (32, 4)),
        (torch.float32, 64, (32, 8), (16, 8)),
    ],
)
def test_linear_attention_has_short_chunks_of_turned_features_in_float32(dtype, width, plain, rotated):
    mixed = torch.empty(1, 64, 3 * width, dtype=dtype)
    for blocks_of in (linear_attention.forward_blocks, linear_attention.backward_blocks):
        assert [blocks_of(mixed, 1, is_rotated)[:2] for is_rotated in (False, True)] == [plain, rotated]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no TF32")
def test_products_in_tf32_are_those_of_the_nearest_numbers_that_it_has():
    left, right = (normal(64, 64, seed=seed) for seed in (1, 2))
    output = torch.empty_like(left)
    multiply_kernel[1,](left, right, output, SIZE=64, PRECISION="rounded tf32")
    # Numbers between two of TF32, as good as none half way: 13 bits are cut off, of which 0x1000 is the highest.
    nearest = [(x.view(torch.int32) + 0x1000).bitwise_and(-0x2000).view(torch.float32).double() for x in (left, right)]
    assert_near(output, nearest[0] @ nearest[1], 1e-6)


def test_a_card_is_told_to_round_to_tf32(root):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/support/compiled_products.py"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, env=environment).stdout
    of_float32, of_bfloat16 = output.split(".version")[1:]
    assert "cvt.rna.tf32.f32" in of_float32
    # What becomes bfloat16 anyway is not held up by it.
    assert "cvt.rna" not in of_bfloat16


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (33, 24), (40, 150)])
def test_swiglu_is_silu_times_up_and_so_is_its_gradient(rows, width, dtype):
    def definition(packed):
        gate, up = packed.chunk(2, dim=-1)
        return F.silu(gate) * up

    packed = normal(rows, 2 * width, dtype=dtype).mul(3).requires_grad_()
    assert_definition(swiglu, definition, [packed], TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("most", [1024, 2], ids=["many parts", "two parts"])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (130, 24), (700, 64), (3, 3000)])
def test_rows_are_normed_as_the_definition_says(rows, width, most, dtype, monkeypatch):
    monkeypatch.setattr(norm_kernel, "MAX_PARTS", most)

    def definition(x, weight_1D):
        return weight_1D * x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt()

    x, weight = normal(rows, width, dtype=dtype).requires_grad_(), normal(1, width, dtype=dtype, seed=1)
    x.data[0] = 0.0
    tensors = [x, weight.requires_grad_()]
    assert_definition(lambda *given: rms_norm(*given, 0.1), definition, tensors, TOLERANCES[dtype])
    wide = [x, weight.detach().float().requires_grad_()]
    assert_definition(lambda *given: rms_norm(*given, 0.1), definition, wide, TOLERANCES[dtype])
    # Where a projection has left it, and with channels apart.
    for part in (normal(rows, 3 * width, dtype=dtype)[:, width : 2 * width], normal(width, rows, dtype=dtype).T):
        tensors = [part.requires_grad_(), weight]
        assert_definition(lambda *given: rms_norm(*given, 0.1), definition, tensors, TOLERANCES[dtype])


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

    def definition(x_ND, weight_VD):
        nats_N = F.cross_entropy(x_ND @ weight_VD.T, targets, reduction="none")
        return nats_N.sum() if labels is None else (nats_N * labels).sum()

    tensors = [x, weight.to(dtype).float().detach().requires_grad_()]
    loss = lambda *given: linear_cross_entropy(*given, targets, labels, True)[0]  # noqa: E731
    assert_definition(loss, definition, tensors, TOLERANCES[dtype])


def test_the_loss_without_gradient_is_that_of_the_house():
    x, weight = normal(9, 16), normal(20, 16, seed=1)
    targets = torch.arange(9, device=DEVICE)
    total, of_x, of_weight = linear_cross_entropy(x, weight, targets, None, False)
    assert_near(total, cross_entropy(x @ weight.T, targets), 1e-5)
    assert of_x.numel() == of_weight.numel() == 0


@pytest.mark.parametrize("operator", ["swiglu", "rms_norm", "linear_cross_entropy", "embed"])
def test_the_compiler_sees_through_the_operators(operator):
    x = normal(8, 16).requires_grad_()

    def function(x):
        if operator == "swiglu":
            return swiglu(x).sum()
        if operator == "rms_norm":
            return rms_norm(x, x[:1], 0.1).square().sum()
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
    angles = rotation(37, width, 0, 10000.0, packed.device)

    def definition(packed):
        parts = packed.split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)) for part in parts)
        return rotate(query, angles), rotate(key, angles), value

    assert_definition(lambda x: split_rotated(x, angles, heads, groups), definition, [packed], TOLERANCES[dtype])
    # As views too, which is how attention hands gradients over.
    parts = split_rotated(packed, angles, heads, groups)
    gradients = [normal(*x.shape, dtype=dtype, seed=seed) for seed, x in enumerate(parts)]
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients]
    whole, own = (torch.autograd.grad(parts, packed, given, retain_graph=True)[0] for given in (gradients, views))
    assert torch.equal(own, whole)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "width", "rest"), [(2, 16, 0), (2, 16, 64), (4, 24, 33)])
def test_turned_as_it_stands_is_what_the_layers_make_of_the_projection(heads, width, rest, dtype):
    packed = normal(2, 37, heads * width + rest, dtype=dtype).requires_grad_()
    angles = rotation(37, width, 3, 10000.0, packed.device)

    def definition(packed):
        parts = packed.split([heads * width, rest], dim=-1)
        return torch.cat([rotate(parts[0].unflatten(-1, (heads, width)), angles).flatten(2), parts[1]], dim=-1)

    assert_definition(lambda x: turn_packed(x, angles, heads, False), definition, [packed], TOLERANCES[dtype])
    back = turn_packed(turn_packed(packed.detach(), angles, heads, False), angles, heads, True)
    assert_near(back, packed.detach(), TOLERANCES[dtype])


def tokens_of(num_rows, num_symbols, seed=0):
    """Some symbols more often than others, and some not at all."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_rows, generator=generator).square() * num_symbols * 0.9).long().to(DEVICE)


@pytest.mark.parametrize("part_bytes", [2**25, 2 * 10 * 20 * 4, 1], ids=["at once", "two at a time", "one by one"])
def test_stacked_models_have_the_loss_of_each_alone(part_bytes, monkeypatch):
    monkeypatch.setattr(loss_kernel, "PART_BYTES", part_bytes)
    # Ten rows: the weight's gradient is summed in two parts of them, where models are at once.
    x, weight = normal(3, 10, 16).requires_grad_(), normal(3, 20, 16, seed=1).requires_grad_()
    targets, labels = tokens_of(3 * 10, 20).view(3, 10), normal(3, 10).abs()
    given = [x, weight, targets, labels]
    assert_stacked(lambda *given: linear_cross_entropy(*given, True)[0], given, [0, 0, 0, 0])
    # One weight for all, and labels that all have in common.
    shared = [x, weight.detach()[0].requires_grad_()]
    assert_stacked(lambda *given: linear_cross_entropy(*given, targets[0], None, True)[0], shared, [0, None])
    values = torch.vmap(lambda *given: linear_cross_entropy(*given, labels[0], False)[0])(x, weight, targets)
    assert_near(values, torch.stack([cross_entropy(x[i] @ weight[i].T, targets[i], labels[0]) for i in range(3)]), 1e-5)


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


def test_a_gradient_that_is_not_finite_stays_in_its_own_model():
    tokens, weight = tokens_of(2 * 9, 3).view(2, 9), normal(2, 3, 16).requires_grad_()
    gradient = normal(2, 9, 16, seed=1)
    gradient[0, 4] = float("nan")
    torch.vmap(lambda *given: embed(*given, torch.float32))(tokens, weight).backward(gradient)
    expected = torch.zeros(3, 16, device=DEVICE).index_add_(0, tokens[1], gradient[1])
    assert_near(weight.grad[1], expected, 1e-5)


def test_stacked_models_are_each_alone():
    angles = rotation(5, 16, 0, 10000.0, torch.device(DEVICE))
    tokens, x, weight = tokens_of(3 * 9, 20).view(3, 9), normal(3, 9, 16).requires_grad_(), normal(3, 20, 16, seed=1)
    weight.requires_grad_()

    def turned(packed):
        query, key, value = split_rotated(packed, angles, 1, 1)
        return query * key * value

    assert_stacked(swiglu, [x], [0])
    gains = normal(3, 1, 16, seed=2).requires_grad_()
    normed = lambda *given: rms_norm(*given, 0.1)  # noqa: E731
    assert_stacked(normed, [x, gains], [0, 0])
    assert_stacked(normed, [x, gains.detach()[0].requires_grad_()], [0, None])
    assert_stacked(turned, [normal(3, 2, 5, 48).requires_grad_()], [0])
    assert_stacked(lambda x: turn_packed(x, angles, 2, False), [normal(3, 2, 5, 48).requires_grad_()], [0])
    assert_stacked(lambda *given: embed(*given, torch.float32), [tokens, weight], [0, 0])
