"""Our split decoding against softmax attention in float64: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from kernel_checks import DEVICE, assert_near, normal
from torch import Tensor

from attnbench.bench.base import Conditions
from attnbench.bench.operators.decoding import measure_steps
from attnbench.bench.operators.roofline import Ceilings
from attnbench.bench.operators.steps import CacheShape
from attnbench.evals.lib.step_cost import Timed
from attnbench.ops.attention.triton.flash_decoding import flash_decoding, splits_for

# The interpreter has no products in bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

gpu = pytest.mark.gpu


def cache(
    room: int, heads: int, groups: int, width: int, dtype: torch.dtype, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    query = normal(batch, heads, width, dtype=dtype, seed=0)
    key, value = (normal(batch, room + 1, groups, width, dtype=dtype, seed=seed)[:, :room] for seed in (1, 2))
    return query, key, value


def definition(query: Tensor, key: Tensor, value: Tensor, position: int, window: int | None = None) -> Tensor:
    first = 0 if window is None else max(0, position + 1 - window)
    shared_by = query.shape[1] // key.shape[2]
    key, value = (x[:, first : position + 1].double().repeat_interleave(shared_by, dim=2) for x in (key, value))
    score_BHS = torch.einsum("bhk,bshk->bhs", query.double(), key) / query.shape[2] ** 0.5
    return torch.einsum("bhs,bshk->bhk", score_BHS.softmax(-1), value)


def check(
    query: Tensor, key: Tensor, value: Tensor, position: int, window: int | None = None, loss: float = 1, **how: int
) -> None:
    # What lies ahead is not read, whatever it is.
    for x in (key, value):
        x[:, position + 1 :] = torch.nan
    at = torch.tensor(position, device=query.device)
    assert_near(
        flash_decoding(query, key, value, at, window=window, **how),
        definition(query, key, value, position, window),
        loss * TOLERANCE[query.dtype],
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("room", "position", "heads", "groups", "width"),
    [
        (1, 0, 1, 1, 16),
        (133, 132, 2, 2, 32),
        (333, 270, 2, 2, 64),
        (70, 64, 2, 2, 80),
        (70, 65, 1, 1, 96),
        (77, 76, 1, 1, 192),
        (150, 149, 4, 2, 16),
        (75, 70, 3, 1, 80),
    ],
)
def test_decoding_is_that_of_float64(room, position, heads, groups, width, splits, dtype):
    check(*cache(room, heads, groups, width, dtype), position, splits=splits)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("position", [0, 5, 128, 299])
def test_a_cache_that_is_hardly_filled_leaves_splits_empty(position, heads, groups):
    check(*cache(300, heads, groups, 32, torch.float32), position, splits=7)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("window", "position"), [(1, 200), (40, 39), (40, 200), (130, 250), (999, 250)])
def test_window(window, position, heads, groups):
    check(*cache(260, heads, groups, 16, torch.float32), position, window, splits=2)


def test_scores_of_any_size_are_weighed():
    """Rounding of a score of hundreds is in the exponent."""
    query, key, value = cache(200, 2, 2, 16, torch.float32)
    check(100 * query, key, value, 180, loss=20, splits=3)
    check(query, key - 200 * query[:, None], value, 180, loss=20, splits=3)


def test_more_heads_to_a_group_than_a_matrix_product_has_rows():
    check(*cache(90, 20, 1, 16, torch.float32, batch=1), 80, splits=2)


@pytest.mark.parametrize(
    ("num_keys", "num_sequences", "splits"),
    [
        (10200, 32, 16),
        (10200, 1, 128),
        (10200, 131, 4),
        (10200, 132, 1),
        (10200, 256, 1),
        (2050, 32, 16),
        (640, 32, 10),
        (64, 32, 1),
    ],
)
def test_splits_fill_the_device_as_far_as_there_are_keys(num_keys, num_sequences, splits):
    assert splits_for(num_keys, num_sequences, 132, 64) == splits


@pytest.mark.parametrize("name", ["triton_whole", "triton_split"])
def test_the_bench_holds_it_against_float64_and_times_it(name):
    shape = CacheShape(head_width=16, cache_length=90, batch_size=1, num_heads=4, num_key_value_heads=2)
    subject = Conditions(
        device=torch.device(DEVICE), precision="float32", ceilings=Ceilings(1.0, 10.0), mixers=lambda names: []
    )
    once = Timed(warmup=1, repeats=3, max_seconds=0.1)
    rows = list(measure_steps(shape, [name], once, {}, subject))
    assert [(row.metric, row.status) for row in rows] == [
        ("max_error", "ok"),
        ("decode_milliseconds", "ok"),
        ("roofline_fraction", "ok"),
    ]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v, at: (q.double(), k, v, at), TypeError),
        (lambda q, k, v, at: (q, k.to(torch.float16), v, at), TypeError),
        (lambda q, k, v, at: (q, k[:, :9], v, at), ValueError),
        (lambda q, k, v, at: (q[:, :1].expand(-1, 3, -1), k, v, at), ValueError),
        (lambda q, k, v, at: (q, k, v, at.int()), ValueError),
        (lambda q, k, v, at: (q, k, v, at[None]), ValueError),
        (lambda q, k, v, at: (q.mT.contiguous().mT, k, v, at), ValueError),
    ],
)
def test_what_does_not_fit_is_refused(change, error):
    query, key, value, position = change(*cache(10, 2, 2, 16, torch.float32), torch.tensor(3, device=DEVICE))
    with pytest.raises(error):
        flash_decoding(query, key, value, position)


@pytest.mark.parametrize("how", [{"window": 0}, {"splits": 0}, {"splits": 129}])
def test_settings_out_of_range_are_refused(how):
    query, key, value = cache(10, 2, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="must be"):
        flash_decoding(query, key, value, torch.tensor(3, device=DEVICE), **how)


@pytest.mark.parametrize("groups", [2, 1])
def test_the_operator_keeps_torchs_rules(groups):
    query, key, value = cache(20, 2, groups, 16, torch.float32)
    arguments = (query, key, value, torch.tensor(11, device=DEVICE), 0, 2)
    torch.library.opcheck(torch.ops.attnbench.flash_decoding.default, arguments)


@gpu
@pytest.mark.parametrize(
    ("groups", "width", "dtype"),
    [
        *((groups, width, torch.bfloat16) for groups in (32, 8) for width in (16, 32, 64, 80, 96, 128, 192)),
        *((groups, width, torch.float32) for groups in (32, 8) for width in (64, 192)),
        *((groups, 128, torch.float16) for groups in (32, 8)),
        (1, 64, torch.bfloat16),
    ],
)
def test_long_caches_of_every_width(groups, width, dtype):
    query, key, value = cache(2050, 32, groups, width, dtype, batch=1)
    for position in (2049, 1000, 63):
        check(query, key, value, position)
        check(query, key, value, position, splits=1)


@gpu
def test_a_captured_call_follows_the_position():
    query, key, value = cache(3000, 8, 8, 64, torch.bfloat16, batch=1)
    position = torch.tensor(10, device="cuda")
    flash_decoding(query, key, value, position)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed = flash_decoding(query, key, value, position)
    for at in (10, 0, 700, 2999):
        position.fill_(at)
        graph.replay()
        assert_near(mixed, definition(query, key, value, at), TOLERANCE[torch.bfloat16])
