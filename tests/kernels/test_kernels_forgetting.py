"""Forget gates in our FlashAttention against their definition in float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from kernel_checks import DEVICE, assert_definition, assert_near, assert_stacked, in_parts, interpreted, normal
from torch import Tensor

from attnbench.ops.attention.forgetting_attention import forgetting_bias
from attnbench.ops.attention.softmax_attention import materialised
from attnbench.ops.attention.triton.cumulative_gates import cumulative_log_forget
from attnbench.ops.attention.triton.flash_decoding import forgetting_decoding
from attnbench.ops.attention.triton.flash_op import flash_attention

# The interpreter has no products in bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# In float32 the gates of half a block, 32 times 5 and more, are rounded, of which the gradient of a gate, a difference
# of two sums, has 1.3e-4 at 700 positions, interpreted. In half precision the output is rounded, and the gradient
# computed from it: where a position sees hardly anything but itself, that of the query is all rounding.
TOLERANCE = {torch.float32: 1e-4 if DEVICE == "cpu" else 2e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 133)
LOG_FORGET = {"never": 0.0, "slowly": -0.01, "at once": -5.0, "mixed": None}

gpu = pytest.mark.gpu


def gates(length: int, heads: int, forgetting: str) -> Tensor:
    """log f, (2, T, H)."""
    value = LOG_FORGET[forgetting]
    if value is None:
        generator = torch.Generator().manual_seed(length)
        log_forget = -5 * torch.rand(2, length, heads, generator=generator) ** 4
    else:
        log_forget = torch.full((2, length, heads), value)
    return log_forget.to(DEVICE).requires_grad_()


def inputs(length: int, heads: int, groups: int, width: int, dtype: torch.dtype, forgetting: str) -> list[Tensor]:
    shapes = [(2, length, count, width) for count in (heads, groups, groups)]
    tensors = [normal(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    return [*tensors, gates(length, heads, forgetting)]


def attend(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return flash_attention(query, key, value, cumulative_log_forget(log_forget), causal=True)


def definition(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    return materialised(query, key, value, None, forgetting_bias(log_forget))


def check(length: int, forgetting: str, dtype: torch.dtype, heads: int = 2, groups: int = 1, width: int = 16) -> None:
    assert_definition(attend, definition, inputs(length, heads, groups, width, dtype, forgetting), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("length", "forgetting"),
    # At 300 the gradient of the gates sums up the rounding of many blocks, whose gates' sums are to be small in each.
    # At 63 a query past the last stands behind the middle of its block.
    [*((length, "mixed") for length in LENGTHS), *((length, "at once") for length in (16, 63, 133, 300))],
)
def test_attention_that_forgets_is_that_of_float64(length, forgetting) -> None:
    check(length, forgetting, torch.float32)


@pytest.mark.parametrize("forgetting", ["slowly", "at once"])
def test_in_half_precision_heads_of_their_own_keys(forgetting) -> None:
    check(70, forgetting, HALF, heads=2, groups=2, width=20)


@pytest.mark.parametrize(("length", "splits"), [(1, 3), (80, 2)])
def test_in_parts_it_is_that_of_float64(length, splits, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    check(length, "mixed", torch.float32, heads=3)


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 70, None), (64, 127, None), (50, 133, 40)])
@pytest.mark.parametrize("splits", [1, 2])
def test_queries_of_the_last_positions_and_windows(queries, keys, window, splits, monkeypatch) -> None:
    """Blocks of queries and keys that do not begin at the same positions: a query's own key may be in any."""
    if splits > 1:
        in_parts(monkeypatch, splits)
    query, key, value, log_forget = inputs(keys, 2, 1, 16, torch.float32, "at once")

    def attend_last(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        cumulative = cumulative_log_forget(log_forget)
        return flash_attention(query[:, -queries:], key, value, cumulative, causal=True, window=window)

    def define_last(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        return materialised(query, key, value, window, forgetting_bias(log_forget))[:, -queries:]

    assert_definition(attend_last, define_last, [query, key, value, log_forget], TOLERANCE[torch.float32])


def test_far_into_a_text_gates_decide_as_at_its_beginning() -> None:
    """Sums of 1e5, of which float32 holds no more than hundredths."""
    query, key, value, log_forget = inputs(40, 2, 2, 16, torch.float32, "slowly")
    cumulative = cumulative_log_forget(log_forget)
    mixed = flash_attention(query, key, value, cumulative - 1e5, causal=True)
    assert_near(mixed, definition(*(x.double() for x in (query, key, value, log_forget))), TOLERANCE[torch.float32])


@pytest.mark.parametrize("splits", [1, 3])
def test_equal_inputs_give_equal_bits(splits, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    tensors = inputs(70, 2, 1, 16, HALF, "mixed")
    runs = [(y, *torch.autograd.grad(y.square().sum(), tensors)) for y in (attend(*tensors), attend(*tensors))]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@interpreted
def test_gates_that_forget_nothing_change_no_bit() -> None:
    """A GPU multiplies and adds with one rounding where there are none, with gates with two."""
    query, key, value, log_forget = inputs(70, 2, 1, 16, torch.float32, "never")
    assert torch.equal(attend(query, key, value, log_forget), flash_attention(query, key, value, causal=True))


def test_vmap_folds_the_stack_into_the_batch() -> None:
    tensors = [
        torch.stack([x, 0.5 * x]).detach().requires_grad_() for x in inputs(20, 2, 1, 16, torch.float32, "mixed")
    ]
    assert_stacked(attend, tensors, (0,) * 4)
    shared = [tensors[0], *(x[0].detach() for x in tensors[1:])]
    assert_stacked(attend, shared, (0, None, None, None))


@pytest.mark.parametrize("length", [1, 300, 1024, 2500])
def test_sums_of_gates_and_their_gradient_are_those_of_float64(length) -> None:
    log_forget = gates(length, 3, "mixed")
    assert_definition(cumulative_log_forget, lambda x: x.mT.cumsum(-1), [log_forget], 1e-6)
    assert_near(cumulative_log_forget(log_forget), log_forget.double().mT.cumsum(-1), 1e-14)


def test_the_operators_keep_torchs_rules() -> None:
    query, key, value, log_forget = inputs(20, 2, 1, 16, torch.float32, "mixed")
    cumulative = cumulative_log_forget(log_forget).detach().requires_grad_()
    torch.library.opcheck(torch.ops.attnbench.cumulative_log_forget.default, (log_forget,))
    operator = torch.ops.attnbench.flash_attention.default
    torch.library.opcheck(operator, (query, key, value, cumulative, True, None))


def test_what_does_not_fit_is_refused() -> None:
    query, key, value, log_forget = inputs(9, 2, 1, 16, torch.float32, "mixed")
    cumulative = cumulative_log_forget(log_forget)
    with pytest.raises(ValueError, match=r"must be float64 \(2, 2, 9\)"):
        flash_attention(query, key, value, cumulative.float(), causal=True)
    with pytest.raises(ValueError, match=r"torch.float64 \(2, 2, 8\), must be"):
        flash_attention(query, key, value, cumulative[..., :8], causal=True)
    with pytest.raises(ValueError, match="forget gates need causal"):
        flash_attention(query, key, value, cumulative, causal=False)
    with pytest.raises(TypeError, match=r"log f is torch\.float64"):
        cumulative_log_forget(log_forget.double())


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("forgetting", LOG_FORGET)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (4, 2, 128), (3, 3, 80), (2, 1, 16)])
def test_on_a_gpu_at_awkward_lengths(heads, groups, width, forgetting, dtype) -> None:
    for length in (*LENGTHS, 300, 700):
        check(length, forgetting, dtype, heads, groups, width)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [2, 5, 32])
def test_on_a_gpu_in_parts(splits, dtype, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    for length in (1, 65, 133, 700):
        check(length, "mixed", dtype, 4, 2, 64)


def decoded_by_definition(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    """The newest position's output, in float64; log f is of every position."""
    bias = forgetting_bias(log_forget.double())[:, :, -1:]
    return materialised(query[:, None].double(), key.double(), value.double(), None, bias)[:, 0]


@pytest.mark.parametrize(
    ("room", "position", "splits", "dtype"),
    [(1, 0, 1, torch.float32), (140, 131, 1, HALF), (140, 131, 3, torch.float32)],
)
@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 2, 16), (4, 2, 20)])
def test_decoding_with_gates_is_that_of_float64(room, position, heads, groups, width, splits, dtype) -> None:
    query = normal(2, heads, width, dtype=dtype)
    key, value = (normal(2, room, groups, width, dtype=dtype, seed=seed) for seed in (1, 2))
    log_forget = gates(position + 1, heads, "mixed").detach()
    bias = torch.full((2, room, heads), torch.nan, device=DEVICE)
    bias[:, :position] = forgetting_bias(log_forget[:, :position])[:, :, -1].mT if position else 0.0
    expected = forgetting_bias(log_forget)[:, :, -1].mT
    for x in (key, value):
        x[:, position + 1 :] = torch.nan
    at, newest = torch.tensor(position, device=DEVICE), log_forget[:, position]
    mixed = forgetting_decoding(query, key, value, newest, bias, at, splits=splits)
    key, value = (x[:, : position + 1] for x in (key, value))
    assert_near(mixed, decoded_by_definition(query, key, value, log_forget), TOLERANCE[dtype])
    # Differences of sums of some hundreds in float32, in another order.
    torch.testing.assert_close(bias[:, : position + 1], expected, rtol=1e-5, atol=5e-5)
    assert bias[:, position + 1 :].isnan().all()


def test_decoding_keeps_torchs_rules_and_refuses_what_does_not_fit() -> None:
    query, key, value = (normal(*shape) for shape in ((2, 2, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
    log_forget, bias, at = normal(2, 2), normal(2, 9, 2), torch.tensor(3, device=DEVICE)
    operator = torch.ops.attnbench.forgetting_decoding.default
    torch.library.opcheck(operator, (query, key, value, log_forget, bias, at, 2))
    with pytest.raises(ValueError, match=r"bias is torch.float32 \(2, 9, 1\), must be float32 \(2, 9, 2\)"):
        forgetting_decoding(query, key, value, log_forget, bias[..., :1], at)
    with pytest.raises(ValueError, match="heads and positions of bias"):
        forgetting_decoding(query, key, value, log_forget, bias.mT.contiguous().mT, at)
