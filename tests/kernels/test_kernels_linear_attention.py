"""Linear attention's kernels against the recurrence in float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from kernel_checks import DEVICE, assert_definition, assert_stacked, normal
from torch import Tensor

from attnbench.ops.layers.rotary import rotate, rotation
from attnbench.ops.linear.triton import linear_op as kernels
from attnbench.ops.linear.triton.linear_op import linear_attention, mix

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-6


def definition(
    mixed_BTC: Tensor,
    memory: Tensor | None,
    normaliser: Tensor | None,
    num_heads: int,
    feature_map: str,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All weights at once, which in float64 is exact enough."""
    query, key, value = mixed_BTC.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    features = {"elu": lambda x: torch.nn.functional.elu(x) + 1, "relu": torch.relu, "identity": lambda x: x}
    query, key = features[feature_map](query), features[feature_map](key)
    turned_query, turned_key = query, key
    if rotation is not None:
        turned_query, turned_key = (rotate(x.transpose(1, 2), rotation).transpose(1, 2) for x in (query, key))
    mixture = (turned_query @ turned_key.mT).tril() @ value
    divisor = (query @ key.mT).tril().sum(-1, keepdim=True)
    last_memory, last_normaliser = turned_key.mT @ value, key.sum(2)
    if memory is not None and normaliser is not None:
        mixture, divisor = mixture + turned_query @ memory, divisor + query @ normaliser[..., None]
        last_memory, last_normaliser = last_memory + memory, last_normaliser + normaliser
    return (mixture / (divisor + EPS)).transpose(1, 2), last_memory, last_normaliser


def angles(length: int, width: int) -> Tensor:
    """Those of positions 3, 4, ..., as after a state; small theta, so that the last pair turns too."""
    return rotation(length, width, 3, 100.0, torch.device(DEVICE))


def packed(batch: int, length: int, heads: int, width: int, feature_map: str, dtype: torch.dtype, seed=0) -> Tensor:
    """Features that torch took are not negative, and here not near zero, where every quotient is noise."""
    mixed = normal(batch, length, 3 * heads * width, dtype=dtype, seed=seed)
    if feature_map == "identity":
        mixed[..., : 2 * heads * width] = mixed[..., : 2 * heads * width].abs()
    return mixed


def check(
    length: int,
    width: int,
    feature_map: str,
    dtype: torch.dtype,
    *,
    state: bool = False,
    rotated: bool = False,
    batch=1,
    heads=2,
) -> None:
    """Parts of the gradient apart: that of the value is the largest, that of the first query zero."""
    rotation = angles(length, width) if rotated else None
    memory = normal(batch, heads, width, width, seed=2) if state else None
    normaliser = normal(batch, heads, width, seed=3).abs() if state else None

    def operator(mixed: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        mixture, *last = linear_attention(mixed, *given, heads, feature_map, EPS, rotation)
        assert mixture.dtype == dtype
        return mixture, *(x.detach() for x in last)

    assert_definition(
        operator,
        lambda *given: definition(*given, heads, feature_map, rotation),
        [packed(batch, length, heads, width, feature_map, dtype).requires_grad_(), memory, normaliser],
        TOLERANCE[dtype],
        gradient_parts=3,
    )


# Around the border of a chunk, and over several with a ragged end.
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 133])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_the_definition(length, dtype):
    check(length, 32, "elu", dtype)


@pytest.mark.parametrize("feature_map", ["relu", "identity"])
def test_other_feature_maps(feature_map):
    check(70, 16, feature_map, torch.float32)


@pytest.mark.parametrize("width", [16, 20, 64, 128])
def test_any_width(width):
    check(40, width, "elu", torch.float32)


@pytest.mark.parametrize("length", [1, 70])
def test_kernels_go_on_from_a_state(length):
    check(length, 20, "elu", torch.float32, state=True)


@pytest.mark.parametrize("length", [1, 16, 64, 65, 133])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_rotary_positions_the_divisor_is_of_features_that_are_not_turned(length, dtype):
    check(length, 32, "elu", dtype, rotated=True)


@pytest.mark.parametrize(("width", "feature_map"), [(16, "relu"), (20, "elu"), (64, "identity"), (128, "elu")])
def test_turned_features_of_any_width(width, feature_map):
    check(40, width, feature_map, torch.float32, rotated=True)


@pytest.mark.parametrize("segment", [64, 256])
@pytest.mark.parametrize("state", [False, True])
def test_turned_features_go_on_from_a_state_and_over_segments(monkeypatch, state, segment):
    monkeypatch.setattr(kernels, "segment_positions", lambda batch, length, num_heads: segment)
    check(133, 20, "elu", torch.float32, state=state, rotated=True, batch=2)


@pytest.mark.parametrize("state", [False, True])
def test_segments_side_by_side_are_one_walk(monkeypatch, state):
    monkeypatch.setattr(kernels, "segment_positions", lambda batch, length, num_heads: 64)
    check(200, 16, "elu", torch.float32, state=state, batch=2)


def test_a_few_heads_are_cut_into_segments_of_whole_chunks():
    for batch, length, heads in ((2, 16384, 12), (1, 1000, 1), (1, 300, 4), (3, 70, 2)):
        segment = kernels.segment_positions(batch, length, heads)
        assert segment % 64 == 0 or segment >= length
        assert segment >= 256
    assert kernels.segment_positions(128, 256, 4) == 256
    assert kernels.segment_positions(128, 4096, 4) == 4096


def test_nothing_is_left_unwritten(monkeypatch):
    """What a kernel does not write shows as NaN."""
    outputs, empty = kernels._outputs, torch.empty_like
    monkeypatch.setattr(kernels, "_outputs", lambda *args: tuple(x.fill_(torch.nan) for x in outputs(*args)))
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x).fill_(torch.nan))
    for segment in (64, 256):
        monkeypatch.setattr(kernels, "segment_positions", lambda batch, length, num_heads, segment=segment: segment)
        mixed = packed(1, 133, 2, 20, "elu", torch.float32)
        for turned in (None, angles(133, 20)):
            results = mix(mixed, None, None, turned, 2, "elu", EPS)
            assert all(x.isfinite().all() for x in results)
            assert kernels.mix_backward(results[0], mixed, None, None, turned, *results, 2, "elu").isfinite().all()


@pytest.mark.parametrize("state", [False, True])
def test_it_is_a_proper_operator(state):
    mixed = packed(2, 5, 2, 16, "elu", torch.float32).requires_grad_()
    memory = normal(2, 2, 16, 16) if state else None
    normaliser = normal(2, 2, 16).abs() if state else None
    torch.library.opcheck(
        mix,
        (mixed, memory, normaliser, angles(5, 16) if state else None, 2, "elu", EPS),
        # Its gradient is checked above; this one would ask for those of the states.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_stacked_inputs_under_vmap(state, rotated):
    mixed = torch.stack([packed(2, 20, 2, 16, "elu", torch.float32, seed) for seed in range(3)], dim=1).requires_grad_()
    memory = normal(2, 2, 16, 16) if state else None
    normaliser = normal(3, 2, 2, 16).abs() if state else None

    turned = angles(20, 16) if rotated else None
    tensors = [x for x in (mixed, memory, normaliser) if x is not None]
    assert_stacked(
        lambda mixed, *given: linear_attention(mixed, *(given or (None, None)), 2, "elu", EPS, turned)[0],
        tensors,
        (1, None, 0)[: len(tensors)],
    )


def test_a_gradient_through_states_is_refused():
    mixed = packed(1, 5, 2, 16, "elu", torch.float32).requires_grad_()
    with pytest.raises(NotImplementedError, match="states"):
        linear_attention(mixed, None, None, 2, "elu", EPS)[1].sum().backward()


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (160, torch.float32), (16, torch.float64)])
def test_what_has_no_kernel_is_refused(width, dtype):
    with pytest.raises(ValueError, match="no kernel"):
        linear_attention(normal(1, 5, 6 * width, dtype=dtype), None, None, 2, "elu", EPS)


def test_a_query_keeps_its_gradient_where_later_features_are_a_million_times_larger():
    """Exponentials make them so in trained models, and what is summed once cannot be subtracted again."""
    torch.manual_seed(0)
    mixed = torch.randn(1, 200, 3, 1, 16, dtype=torch.float64)
    mixed[:, :130, 1] -= 14
    mixed[:, 130:, 1] += 5
    mixed = mixed.flatten(2).to(DEVICE)
    narrow, wide = mixed.float().requires_grad_(), mixed.requires_grad_()
    weight = torch.randn(1, 200, 1, 16, dtype=torch.float64, device=DEVICE)
    (linear_attention(narrow, None, None, 1, "elu", EPS)[0] * weight.float()).sum().backward()
    (definition(wide, None, None, 1, "elu")[0] * weight).sum().backward()
    assert narrow.grad is not None
    assert wide.grad is not None
    # The queries of the first chunks, before the large keys.
    actual, expected = narrow.grad[0, :130, :16].double(), wide.grad[0, :130, :16]
    assert (actual - expected).norm() <= 1e-3 * expected.norm()
