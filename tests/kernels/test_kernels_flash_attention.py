"""Our FlashAttention against softmax attention in float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, assert_definition, assert_near, assert_stacked, in_parts, normal
from torch import Tensor

from attnbench.ops.attention.triton import flash_launch
from attnbench.ops.attention.triton.flash_op import flash_attention, packed_flash_attention
from attnbench.ops.common.triton.launching import is_roomy
from attnbench.ops.layers.rotary import rotate, rotation

# The interpreter has no products in bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

gpu = pytest.mark.gpu
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, HALF])


def inputs(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()


def plain(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> Tensor:
    length, source = query.shape[1], key.shape[1]
    past_TS = torch.arange(length)[:, None] + source - length - torch.arange(source)
    seen_TS = (
        (past_TS >= 0) & (past_TS < (window or source)) if causal else torch.ones(length, source, dtype=torch.bool)
    )
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen_TS.to(DEVICE), enable_gqa=True)
    return mixed.transpose(1, 2)


def plain_packed(packed: Tensor, angles: Tensor | None, heads: int, groups: int, window: int | None = None) -> Tensor:
    query, key, value = packed.unflatten(-1, (heads + 2 * groups, -1)).split([heads, groups, groups], dim=2)
    if angles is not None:
        query, key = rotate(query, angles), rotate(key, angles)
    return plain(query, key, value, True, window).flatten(2)


def check_attention(
    queries: int,
    keys: int,
    heads: int,
    groups: int,
    width: int,
    dtype: torch.dtype,
    value_width: int | None = None,
    **options,
):
    shapes = ((2, queries, heads, width), (2, keys, groups, width), (2, keys, groups, value_width or width))
    assert_definition(
        lambda *tensors: flash_attention(*tensors, **options),
        lambda *tensors: plain(*tensors, options["causal"], options.get("window")),
        [inputs(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)],
        TOLERANCE[dtype],
    )


def check_packed(
    length: int,
    heads: int,
    groups: int,
    width: int,
    dtype: torch.dtype,
    rotated: bool = True,
    window: int | None = None,
):
    angles = rotation(length, width, 0, 1e4, torch.device(DEVICE)) if rotated else None
    options = {"num_heads": heads, "num_key_value_heads": groups, "causal": True, "window": window}
    assert_definition(
        lambda packed: packed_flash_attention(packed, angles, **options),
        lambda packed: plain_packed(packed, angles, heads, groups, window),
        [inputs(2, length, (heads + 2 * groups) * width, dtype=dtype, seed=0)],
        TOLERANCE[dtype],
    )


def packed_results() -> tuple[Tensor, ...]:
    packed = inputs(2, 70, 4 * 16, dtype=HALF, seed=0)
    angles = rotation(70, 16, 0, 1e4, packed.device)
    mixed = packed_flash_attention(packed, angles, num_heads=2, num_key_value_heads=1, causal=True)
    return mixed, *torch.autograd.grad(mixed.square().sum(), packed)


@every_dtype
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "groups", "width", "causal"),
    [
        (1, 1, 1, 1, 16, True),
        (65, 65, 2, 1, 16, True),
        (133, 133, 2, 2, 32, True),
        (5, 70, 4, 2, 20, True),
        (1, 40, 2, 1, 16, True),
        (64, 133, 2, 1, 16, False),
        (70, 33, 1, 1, 16, False),
        (70, 530, 1, 1, 70, True),
    ],
)
def test_attention_is_that_of_float64(queries, keys, heads, groups, width, causal, dtype) -> None:
    check_attention(queries, keys, heads, groups, width, dtype, causal=causal)


@every_dtype
@pytest.mark.parametrize(
    ("width", "value_width", "queries", "splits"), [(24, 16, 70, 1), (40, 32, 45, 3), (16, 40, 70, 2), (80, 64, 5, 1)]
)
def test_values_of_another_width(width, value_width, queries, splits, dtype, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    check_attention(queries, 70, 2, 1, width, dtype, value_width=value_width, causal=True)


@pytest.mark.parametrize(("window", "dtype"), [(1, torch.float32), (7, HALF), (80, torch.float32), (1000, HALF)])
def test_window(window: int, dtype: torch.dtype) -> None:
    check_attention(90, 133, 2, 1, 16, dtype, causal=True, window=window)
    check_packed(133, 1, 1, 16, dtype, window=window)


@every_dtype
@pytest.mark.parametrize(
    ("length", "heads", "groups", "width", "rotated"),
    [(1, 2, 2, 16, True), (65, 4, 2, 16, True), (65, 2, 1, 16, False), (133, 1, 1, 24, True)],
)
def test_packed_attention_is_that_of_float64(length, heads, groups, width, rotated, dtype) -> None:
    check_packed(length, heads, groups, width, dtype, rotated)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "groups", "width", "options", "splits"),
    [
        (1, 1, 1, 1, 16, {"causal": True}, 7),
        (133, 133, 1, 1, 32, {"causal": True}, 2),
        (45, 140, 4, 2, 20, {"causal": True}, 3),
        (1, 140, 2, 1, 16, {"causal": True}, 7),
        (90, 133, 3, 1, 16, {"causal": True, "window": 7}, 2),
        (90, 133, 1, 1, 16, {"causal": True, "window": 80}, 7),
        (64, 133, 2, 1, 16, {"causal": False}, 7),
        (170, 33, 1, 1, 16, {"causal": False}, 2),
    ],
)
def test_in_parts_it_is_that_of_float64(queries, keys, heads, groups, width, options, splits, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    check_attention(queries, keys, heads, groups, width, torch.float32, **options)


@pytest.mark.parametrize(("rotated_inside", "splits", "dtype"), [(512, 3, HALF), (0, 2, torch.float32)])
def test_packed_attention_in_parts_is_that_of_float64(rotated_inside, splits, dtype, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    monkeypatch.setattr(flash_launch, "ROTATED_INSIDE_UP_TO", rotated_inside)
    check_packed(133, 2, 1, 24, dtype)
    check_packed(65, 1, 1, 16, dtype, rotated=False, window=40)


@pytest.mark.parametrize("alone", ["queries", "keys"])
def test_either_kernel_of_the_gradient_may_be_split_alone(alone, monkeypatch) -> None:
    """By heads that share keys, those of the queries are more programs."""
    in_parts(monkeypatch, 3)
    monkeypatch.setattr(
        flash_launch, "splits_for", lambda programs, *_: 3 if (programs > 10) == (alone == "queries") else 1
    )
    check_attention(70, 70, 4, 1, 16, torch.float32, causal=True)


def test_large_scores_in_parts(monkeypatch) -> None:
    """One part may weigh all, another nothing."""
    in_parts(monkeypatch, 3)
    query, key, value = (normal(1, 133, 2, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    key[:, 40:50] += 9 * query[:, 40:50]
    expected = plain(query.double(), key.double(), value.double(), True, None)
    assert_near(flash_attention(query, key, value, causal=True), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("splits", [1, 3])
def test_equal_inputs_give_equal_bits(splits, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    assert all(torch.equal(*pair) for pair in zip(packed_results(), packed_results(), strict=True))


@pytest.mark.parametrize(
    ("num_programs", "num_blocks", "num_multiprocessors", "num_warps", "dtype", "splits"),
    [
        (16, 32, 132, 4, torch.bfloat16, 16),
        (64, 128, 132, 4, torch.bfloat16, 4),
        (64, 128, 132, 8, torch.bfloat16, 2),
        (64, 128, 132, 4, torch.float32, 8),
        (132, 99, 132, 4, torch.bfloat16, 2),
        (133, 99, 132, 4, torch.bfloat16, 1),
        (132, 99, 132, 8, torch.bfloat16, 1),
        (264, 99, 132, 4, torch.float32, 2),
        (265, 99, 132, 4, torch.float32, 1),
        (8, 5, 132, 4, torch.bfloat16, 5),
        (1, 999, 132, 4, torch.bfloat16, 32),
        (1, 999, 0, 4, torch.float32, 1),
        (0, 5, 132, 4, torch.float32, 1),
    ],
)
def test_splits_fill_the_device_as_far_as_there_are_blocks(
    num_programs, num_blocks, num_multiprocessors, num_warps, dtype, splits
) -> None:
    assert flash_launch.splits_for(num_programs, num_blocks, num_multiprocessors, num_warps, dtype) == splits


@pytest.mark.parametrize(("capability", "roomy"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_wide_heads_fit_into_the_shared_memory_that_a_device_has(capability, roomy, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    is_roomy.cache_clear()
    assert is_roomy(torch.device("cuda", 0)) == roomy
    is_roomy.cache_clear()
    for kernel, own, walked in (("forward", 1, 2), ("query_gradient", 2, 2)):
        for length in (256, 16384):
            tiles = flash_launch.tiles_for(kernel, torch.bfloat16, 128, length, roomy)
            # The block of its own, and what it walks, so many times at once.
            rows = own * tiles.queries + walked * tiles.num_stages * tiles.keys
            assert rows * 128 * 2 <= (227 if roomy else 99) * 1024


def test_rotating_ahead_is_rotating_inside(monkeypatch) -> None:
    """To the bit, which also says that it was rounded alike."""
    inside = packed_results()
    monkeypatch.setattr(flash_launch, "ROTATED_INSIDE_UP_TO", 0)
    assert all(torch.equal(*pair) for pair in zip(packed_results(), inside, strict=True))


def test_views_of_any_strides_are_read_in_place() -> None:
    """Heads before positions, channels cut out of wider ones, a gradient that is one number expanded."""
    query, key, value = (inputs(2, 2, 40, 24, dtype=torch.float32, seed=seed) for seed in range(3))
    views = [x[..., 4:20].transpose(1, 2) for x in (query, key, value)]
    assert not any(x.is_contiguous() for x in views)
    whole = [x.detach().double().requires_grad_() for x in views]
    sums = flash_attention(*views, causal=True).sum(), plain(*whole, True, None).sum()
    for own, other in zip(torch.autograd.grad(sums[0], views), torch.autograd.grad(sums[1], whole), strict=True):
        torch.testing.assert_close(own.double(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "length", "width", "dtype", "forgets", "rotates", "most"),
    [
        ("forward", 256, 64, torch.bfloat16, True, False, 128),
        ("forward", 256, 64, torch.bfloat16, False, True, 168),
        ("forward", 256, 64, torch.bfloat16, False, False, None),
        ("query_gradient", 4096, 64, torch.bfloat16, True, False, 168),
        # Their tiles need more.
        ("forward", 4096, 64, torch.bfloat16, True, False, None),
        ("forward", 256, 128, torch.bfloat16, True, False, None),
        ("forward", 256, 64, torch.float32, True, False, None),
    ],
)
def test_registers_are_limited_where_another_program_has_room(kernel, length, width, dtype, forgets, rotates, most):
    heads = torch.empty(1, length, 2, width, dtype=dtype, device="meta")
    constants = flash_launch._constants(kernel, (heads, heads, heads), forgets, rotates, True, None)
    assert constants.get("maxnreg") == most


@pytest.mark.parametrize("packed", [True, False])
def test_vmap_folds_the_stack_into_the_batch(packed: bool) -> None:
    x = inputs(3, 2, 20, 64, dtype=torch.float32, seed=0)
    angles = rotation(20, 16, 0, 1e4, x.device)

    def mix(x_BTC: Tensor, shared_BTC: Tensor) -> Tensor:
        if packed:
            return packed_flash_attention(x_BTC, angles, num_heads=2, num_key_value_heads=1, causal=True)
        query, key = (y.unflatten(-1, (4, 16)) for y in (x_BTC, shared_BTC))
        return flash_attention(query[:, :, :2], key[:, :, 2:3], query[:, :, 3:], causal=True)

    assert_stacked(mix, (x, x[0].detach()), (0, None))


def test_what_does_not_fit_is_refused() -> None:
    query, key = inputs(1, 9, 2, 16, dtype=torch.float32, seed=0), inputs(1, 4, 2, 16, dtype=torch.float32, seed=1)
    with pytest.raises(ValueError, match="9 queries, 4 keys"):
        flash_attention(query, key, key, causal=True)
    with pytest.raises(ValueError, match="a window of 3, causal=False"):
        flash_attention(key, key, key, causal=False, window=3)
    with pytest.raises(TypeError, match="float64"):
        flash_attention(key.double(), key.double(), key.double(), causal=True)
    with pytest.raises(ValueError, match=r"rotation is .* must be float32 \(2, 9, 8\)"):
        packed_flash_attention(
            query.flatten(2).repeat(1, 1, 3), torch.ones(2, 8, 8), num_heads=2, num_key_value_heads=2, causal=True
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
def test_the_interpreter_refuses_bfloat16() -> None:
    """Its products take the bits for integers."""
    x = inputs(1, 4, 2, 16, dtype=torch.bfloat16, seed=0)
    with pytest.raises(TypeError, match="bfloat16"):
        flash_attention(x, x, x, causal=True)


@gpu
@every_dtype
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (4, 2, 128), (2, 1, 16), (3, 3, 80), (2, 2, 32)])
def test_on_a_gpu_at_awkward_lengths(heads: int, groups: int, width: int, dtype: torch.dtype) -> None:
    for length in (1, 63, 64, 65, 133, 256, 300, 700):
        check_packed(length, heads, groups, width, dtype)


@gpu
@every_dtype
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_on_a_gpu_in_parts(splits: int, dtype: torch.dtype, monkeypatch) -> None:
    in_parts(monkeypatch, splits)
    for length in (1, 63, 65, 133, 300, 700, 1100):
        check_packed(length, 4, 2, 64, dtype)
    for heads, groups, width in ((4, 2, 128), (2, 1, 16), (3, 3, 80), (2, 2, 32)):
        check_packed(300, heads, groups, width, dtype, window=100)
        check_attention(133, 300, heads, groups, width, dtype, causal=True)
        check_attention(133, 70, heads, groups, width, dtype, causal=False)


@gpu
@every_dtype
def test_on_a_gpu_otherwise_than_in_training(dtype: torch.dtype) -> None:
    for length in (1, 63, 64, 65, 133, 256, 300):
        check_packed(length, 4, 2, 64, dtype, rotated=False)
        check_attention(length, 133, 4, 2, 64, dtype, causal=False)
        check_attention(length, length + 70, 4, 2, 64, dtype, causal=True, window=50)


@gpu
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (4, 2, 128), (2, 1, 16), (2, 2, 32)])
def test_on_a_gpu_with_products_in_tf32(heads: int, groups: int, width: int, monkeypatch) -> None:
    monkeypatch.setattr(flash_launch, "float32_product", lambda: "tf32")
    monkeypatch.setitem(TOLERANCE, torch.float32, 0.01)
    for length in (1, 63, 65, 133, 300, 700):
        check_packed(length, heads, groups, width, torch.float32)
        check_packed(length, heads, groups, width, torch.float32, window=50)
        check_attention(length, 133, heads, groups, width, torch.float32, causal=False)
