"""The operator of the delta rule: its chunked form against its definition in float64 and against a library's, with and
without a decay, and with several sub-steps a position."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import DECAYS, EACH_LENGTH, assert_definition, assert_near, assert_stacked, normal
from library_forms import naive_form
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.ops.delta.delta_rule import DELTA_RULE, chunked_gated_delta_rule, gated_delta_rule
from attnbench.settings.errors import UserError

"""Log decays a position; mixed: of 0 to -5, drawn."""

chunked = partial(gated_delta_rule, backend="torch")


def inputs(length: int, decay: str, num_steps: int = 1, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, keys of length 1, value, log decay, strengths of 0 to 2 and memory, each to take a gradient of."""
    batch, num_heads, width, value_width = 2, 3, 16, 24
    of_steps = (batch, num_steps * length, num_heads)
    query = normal(batch, length, num_heads, width, dtype=torch.float64, seed=0)
    key, value = (normal(*of_steps, size, dtype=torch.float64, seed=size) for size in (width, value_width))
    generator = torch.Generator().manual_seed(3)
    drawn = -5 * torch.rand(batch, length, num_heads, generator=generator, dtype=torch.float64)
    log_decay = drawn if decay == "mixed" else torch.full_like(drawn, float(decay))
    beta = 2 * torch.rand(of_steps, generator=generator, dtype=torch.float64)
    memory = normal(batch, num_heads, width, value_width, dtype=torch.float64, seed=4)
    wide = torch.promote_types(dtype, torch.float32)
    narrow = [x.to(dtype) for x in (query / 4, normalize(key, dim=-1), value)]
    return [x.detach().requires_grad_() for x in (*narrow, log_decay.to(wide), beta.to(wide), memory.to(wide))]


def long_form(tensors: list[Tensor], num_steps: int) -> list[Tensor]:
    """The same as one sub-step at each of n T positions, of which the first n - 1 of n are read by a query of 0."""
    query, key, value, log_decay, beta, memory = tensors
    query_BSHK = query.new_zeros(key.shape)
    query_BSHK[:, num_steps - 1 :: num_steps] = query
    log_decay_BSH = log_decay.new_zeros(beta.shape)
    log_decay_BSH[:, ::num_steps] = log_decay
    return [query_BSHK, key, value, log_decay_BSH, beta, memory]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", EACH_LENGTH)
def test_chunks_are_the_definition_in_outputs_and_gradients(length, decay, num_steps):
    assert_definition(chunked, DELTA_RULE.define, inputs(length, decay, num_steps), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("length", "num_steps"), [(1, 2), (17, 1), (64, 2), (133, 1)])
def test_chunks_in_other_precisions(length, num_steps, decay, dtype, tolerance):
    tensors = inputs(length, decay, num_steps, dtype=dtype)
    if dtype == torch.bfloat16:
        # Where b is 2 a memory that does not decay never forgets its rounding.
        tensors[4] = (tensors[4].detach() / 2).requires_grad_()
    assert_definition(chunked, DELTA_RULE.define, tensors, tolerance)


@pytest.mark.parametrize("num_positions", [1, 16, 200])
def test_chunks_of_any_size_are_the_definition(num_positions):
    form = partial(chunked_gated_delta_rule, num_positions=num_positions)
    assert_definition(form, DELTA_RULE.define, inputs(133, "mixed"), 1e-10)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_sub_steps_are_positions_whose_query_is_zero(num_steps):
    tensors = [x.detach() for x in inputs(20, "mixed", num_steps)]
    actual, memory = DELTA_RULE.define(*tensors)
    expected, expected_memory = DELTA_RULE.define(*long_form(tensors, num_steps))
    assert_near(actual, expected[:, num_steps - 1 :: num_steps], 1e-13)
    assert_near(memory, expected_memory, 1e-13)


def test_two_reflections_turn_the_memory():
    """S_1 = (I - 2 k k^T)(I - 2 j j^T) S_0: written out."""
    query, key, value, log_decay, beta, memory = (x.detach() for x in inputs(1, "mixed", 2))
    _, turned = chunked(query, key, 0 * value, log_decay, 0 * beta + 2, memory)
    first, second = (torch.eye(16) - 2 * k[..., None] * k[..., None, :] for k in key.unbind(1))
    assert_near(turned, log_decay[:, 0].exp()[..., None, None] * (second @ first @ memory), 1e-12)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_pieces_and_single_positions_hand_their_memory_on(num_steps):
    *tensors, memory = (x.detach() for x in inputs(70, "mixed", num_steps))
    expected, expected_memory = DELTA_RULE.define(*tensors, memory)
    outputs, start = [], 0
    for size in (33, 1, 1, 35):
        end = start + size
        query, log_decay = (tensors[index][:, start:end] for index in (0, 3))
        key, value, beta = (tensors[index][:, num_steps * start : num_steps * end] for index in (1, 2, 4))
        y, memory = chunked(query, key, value, log_decay, beta, memory)
        outputs.append(y)
        start = end
    assert_near(torch.cat(outputs, dim=1), expected, 1e-11)
    assert_near(memory, expected_memory, 1e-11)


def test_stacked_and_compiled_sub_steps():
    tensors = [x.detach() for x in inputs(20, "mixed", 2)]
    stacked = [torch.stack([x, 0.7 * x]).requires_grad_() for x in tensors]
    assert_stacked(lambda *xs: chunked(*xs)[0].square().sum(), stacked, [0] * 6, 1e-11)
    torch.compiler.reset()
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    assert_definition(compiled, DELTA_RULE.define, inputs(40, "mixed", 2), 1e-10)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("decay", DECAYS)
def test_both_forms_are_the_library_s_definition(decay, num_steps):
    theirs = naive_form("gated_delta_product")
    query, key, value, log_decay, beta, memory = (x.detach().float() for x in inputs(65, decay, num_steps))
    expected = theirs.naive_recurrent_gated_delta_product(
        query, key, value, log_decay, beta, 1.0, initial_state=memory, num_householder=num_steps
    )
    for form in (DELTA_RULE.define, chunked):
        for own, other in zip(form(query, key, value, log_decay, beta, memory), expected, strict=True):
            assert_near(own, other, 1e-5)


def test_without_a_decay_it_is_the_library_s_delta_rule():
    theirs = naive_form("delta_rule")
    query, key, value, log_decay, beta, memory = (x.detach().float() for x in inputs(65, "0"))
    # Theirs scales the query.
    by_heads = [x.transpose(1, 2) for x in (4 * query, key, value, beta)]
    expected, expected_memory = theirs.delta_rule_recurrence(*by_heads, initial_state=memory)
    actual, last = chunked(query, key, value, log_decay, beta, memory)
    assert_near(actual, expected.transpose(1, 2), 1e-5)
    assert_near(last, expected_memory, 1e-5)


def test_flash_qla_is_called_as_its_signature_asks(monkeypatch):
    called = []

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        called.append(output_final_state)
        return chunked_gated_delta_rule(scale * q, k, v, g, beta, initial_state, 64)

    monkeypatch.setitem(sys.modules, "flash_qla", SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    # A single position of decoding is the library's too.
    for length in (40, 1):
        query, key, value, log_decay, beta, memory = inputs(length, "mixed", 2)
        actual = gated_delta_rule(query, key, value, log_decay, beta, memory, "flash_qla")
        for ours, expected in zip(actual, DELTA_RULE.define(query, key, value, log_decay, beta, memory), strict=True):
            assert_near(ours, expected, 1e-10)
    gated_delta_rule(query, key, value, log_decay, beta, None, "flash_qla")
    assert called == [True, True, False]


@pytest.mark.parametrize(
    ("device", "precision", "widths", "capability", "words"),
    [
        ("cpu", "bfloat16", (128, 128), (9, 0), "attn.backend=flash_qla: .* needs CUDA, not device=cpu"),
        ("cuda", "float32", (128, 128), (9, 0), "bfloat16, not float32; use backend=triton"),
        ("cuda", "bfloat16", (64, 128), (9, 0), "not 64 and 128; use model.head_width=128"),
        ("cuda", "bfloat16", (128, 128), (8, 0), "no kernels for compute capability 8.0"),
        ("cuda", "bfloat16", None, None, "not installed; run: pip install 'flash-qla"),
    ],
)
def test_flash_qla_is_refused_by_name_where_it_cannot_run(device, precision, widths, capability, words, monkeypatch):
    installed = None if capability is None else ModuleSpec("flash_qla", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UserError, match=words):
        DELTA_RULE.backends.choose("flash_qla", widths, device, precision)
