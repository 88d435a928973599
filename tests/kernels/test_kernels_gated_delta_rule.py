"""The gated delta rule's kernels against its definition in float64: through Triton's interpreter on a CPU, in both
forms, and on a GPU at full widths, where a compiler can be wrong."""

import pytest
import torch
from kernel_checks import DEVICE, assert_definition, assert_near, assert_same_bits, assert_stacked, interpreted, normal
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.ops.delta.delta_rule import DELTA_RULE, packed_gated_delta_rule, unit_length
from attnbench.ops.delta.triton import delta_choice as delta_rule_choice
from attnbench.ops.delta.triton.delta_choice import DeltaRule
from attnbench.ops.delta.triton.delta_op import gated_delta_rule, gated_delta_rule_forward
from attnbench.ops.delta.triton.delta_step import gated_delta_rule_step
from attnbench.ops.scalar.scalar_decay import MAX_FORGETTING
from attnbench.settings.errors import UserError

# Triton's interpreter cuts bfloat16 off where a GPU rounds, which is twice as far.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2 if torch.cuda.is_available() else 6e-2}
both_forms = pytest.mark.parametrize("parallel", [False, True])


def rule_inputs(
    length: int,
    key_width: int,
    value_width: int,
    *,
    num_heads: int = 2,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    alike: float = 0.0,
) -> list[Tensor]:
    """Packed query, key and value, log decay, beta and a memory. `alike` is what all keys have in common."""
    # Up to 2 the recurrence need not forget its rounding, and cannot where keys are alike.
    max_beta = 2 if dtype == torch.float32 and not alike else 1
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = normal(batch, length, num_heads * key_width), normal(batch, length, num_heads * key_width)
    mixed = torch.cat([query, key + alike, normal(batch, length, num_heads * value_width)], dim=-1)
    # Heads that keep nearly all and heads that forget within a few positions.
    rates = torch.logspace(-3, 0.5, num_heads, dtype=torch.float64)
    log_decay = -rates * torch.rand(batch, length, num_heads, generator=generator, dtype=torch.float64)
    beta = max_beta * torch.rand(batch, length, num_heads, generator=generator, dtype=torch.float64)
    memory = normal(batch, num_heads, key_width, value_width)
    inputs = [mixed.to(dtype), log_decay.float(), beta.float(), memory.float()]
    return [x.to(device).requires_grad_() for x in inputs]


def definition(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    num_heads, key_width = memory.shape[1:3]
    query, key, value = mixed.split([num_heads * key_width] * 2 + [num_heads * memory.shape[3]], dim=-1)
    query, key, value = (x.unflatten(-1, (num_heads, -1)) for x in (query, key, value))
    scale = key_width**-0.5
    query, key = (unit_length(query, scale), unit_length(key)) if unit else (query * scale, key)
    return DELTA_RULE.define(query, key, value, log_decay, beta, memory)


def kernels(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor, unit: bool, parallel: bool, given: bool):
    return gated_delta_rule(
        mixed, log_decay, beta, memory if given else None, num_heads=memory.shape[1], key_width=memory.shape[2],
        unit_length=unit, keep_memory=given, parallel=parallel,
    )  # fmt: skip


def check(inputs: list[Tensor], *, unit: bool, parallel: bool, given: bool) -> None:
    """Outputs and all gradients; without a memory that of the definition is zero."""
    memory = inputs[3] if given else torch.zeros_like(inputs[3])

    def kernel(*tensors: Tensor) -> tuple[Tensor, ...]:
        output, last = kernels(*tensors, *([] if given else [memory]), unit, parallel, given)
        assert (last is None) != given
        return (output, last) if given else (output,)

    def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
        return definition(*tensors, *([] if given else [memory.double()]), unit)[: 1 + given]

    assert_definition(kernel, exact, inputs if given else inputs[:3], TOLERANCE[inputs[0].dtype])


# Around the borders of chunks of 16, of 32, and of the long ones of 64 that wide heads have, and over several with a
# ragged end.
@both_forms
@pytest.mark.parametrize(
    ("length", "key_width", "value_width", "num_heads", "batch", "given"),
    [
        *((length, 16, 16, 2, 1, False) for length in (1, 17, 48, 49, 133)),
        *((length, 64, 64, 1, 1, True) for length in (1, 17, 63, 65)),
        *((40, *widths, 1, 2, True) for widths in ((32, 16), (16, 48), (16, 128), (64, 16), (128, 32))),
    ],
)
def test_kernels_are_the_definition(length, key_width, value_width, num_heads, batch, given, parallel):
    inputs = rule_inputs(length, key_width, value_width, num_heads=num_heads, batch=batch)
    check(inputs, unit=True, parallel=parallel, given=given)


@both_forms
def test_kernels_without_unit_length(parallel):
    inputs = [
        x.detach().mul(0.3 if x.dim() == 3 and x.shape[-1] > 2 else 1).requires_grad_() for x in rule_inputs(70, 16, 16)
    ]
    check(inputs, unit=False, parallel=parallel, given=True)


@both_forms
def test_kernels_keep_their_digits_where_all_keys_are_alike(parallel):
    """Where powers of the matrix to invert would lose all of them."""
    for width in (16, 64):
        check(rule_inputs(133, width, width, alike=8.0), unit=True, parallel=parallel, given=False)


@interpreted
@both_forms
def test_kernels_of_wide_heads_are_the_definition_on_cards_with_little_shared_memory(parallel, monkeypatch):
    monkeypatch.setattr(delta_rule_choice, "is_roomy", lambda device: False)
    inputs = rule_inputs(70, 128, 64, num_heads=1)
    assert DeltaRule(*inputs[:3], 1, 1, 128, True).launch_of("walk_forward")["VALUES"] == 32
    check(inputs, unit=True, parallel=parallel, given=True)


@both_forms
@pytest.mark.parametrize(
    ("length", "key_width", "value_width", "num_heads"),
    [(133, 16, 32, 2), (133, 256, 48, 1), (12, 64, 64, 1), (30, 64, 64, 1), (12, 256, 32, 1)],
)
def test_kernels_in_bfloat16(length, key_width, value_width, num_heads, parallel):
    inputs = rule_inputs(length, key_width, value_width, num_heads=num_heads, dtype=torch.bfloat16)
    check(inputs, unit=True, parallel=parallel, given=True)


@pytest.mark.parametrize(
    ("length", "width", "dtype", "chunk"),
    [
        (1, 32, torch.float32, 16),
        (48, 32, torch.bfloat16, 16),
        (49, 32, torch.bfloat16, 32),
        (16, 64, torch.bfloat16, 16),
        (17, 64, torch.bfloat16, 32),
        (33, 64, torch.bfloat16, 64),
        (33, 64, torch.float32, 32),
        (1000, 128, torch.float32, 64),
    ],
)
def test_a_short_sequence_has_a_short_chunk(length, width, dtype, chunk):
    mixed, rates = torch.empty(1, length, 3 * width, dtype=dtype), torch.empty(1, length, 1)
    assert DeltaRule(mixed, rates, rates, 1, 1, width, True).chunk == chunk


@both_forms
def test_decay_to_nothing_and_beta_of_nothing_stay_finite(parallel):
    mixed, log_decay, beta, memory = rule_inputs(70, 16, 16)
    nothing = [torch.full_like(log_decay, -80.0).requires_grad_(), torch.zeros_like(beta).requires_grad_()]
    check([mixed, *nothing, memory], unit=True, parallel=parallel, given=True)


@both_forms
def test_kernels_keep_the_digits_beside_positions_that_forget_everything(parallel):
    inputs = rule_inputs(133, 16, 16)
    forget = torch.rand(inputs[1].shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.03
    inputs[1] = torch.where(forget, -MAX_FORGETTING, inputs[1].detach()).requires_grad_()
    check(inputs, unit=True, parallel=parallel, given=True)


@both_forms
@pytest.mark.parametrize("decay", [1.0, 4.0, 12.0])
def test_a_head_that_forgets_at_once_has_digits_in_its_decay_s_gradient(decay, parallel):
    inputs = rule_inputs(133, 16, 16)
    spread = 1 + torch.rand(inputs[1].shape, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    inputs[1] = (-decay * spread).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn(1, 133, 2, 16, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(DEVICE)
    definition_y = definition(*wide[:3], torch.zeros_like(wide[3]), True)[0]
    [expected] = torch.autograd.grad((definition_y * weight).sum(), wide[1])
    [actual] = torch.autograd.grad((kernels(*inputs, True, parallel, False)[0] * weight).sum(), inputs[1])
    # What a position does to itself is up to exp(12) times as large as these.
    assert_near(actual, expected, 2e-4)
    assert_near(actual.sum(1), expected.sum(1), 2e-4)


@pytest.mark.parametrize("width", [16, 128])
@both_forms
def test_heads_of_values_share_those_of_query_and_key(width, parallel):
    check_shared(width, 16, torch.float32, parallel)


def check_shared(width: int, value_width: int, dtype: torch.dtype, parallel: bool) -> None:
    mixed, *others = rule_inputs(70, width, value_width, num_heads=6, dtype=dtype)
    query, key, value = mixed.detach().tensor_split((6 * width, 12 * width), -1)
    shared = torch.cat([query[..., : 2 * width], key[..., : 2 * width], value], dim=-1).requires_grad_()

    def kernel(mixed: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        return gated_delta_rule(
            mixed, log_decay, beta, memory, num_heads=6, num_key_heads=2, key_width=width, unit_length=True,
            keep_memory=True, parallel=parallel,
        )  # fmt: skip

    def exact(mixed: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        *pair, value = mixed.tensor_split((2 * width, 4 * width), -1)
        repeated = [x.unflatten(-1, (2, width)).repeat_interleave(3, 2).flatten(2) for x in pair]
        return definition(torch.cat([*repeated, value], dim=-1), *others, True)

    assert_definition(kernel, exact, [shared, *others], 1e-4 if dtype == torch.float32 else 5e-2)


def test_a_call_without_gradients_keeps_no_states():
    mixed, log_decay, beta, memory = rule_inputs(70, 16, 16)
    with torch.no_grad():
        _, _, *kept = gated_delta_rule_forward(mixed, log_decay, beta, None, 2, 2, 16, True, False, False, False)
        alone, last = kernels(mixed, log_decay, beta, memory, True, True, True)
    assert [x.numel() for x in kept] == [0, 0, 0, 0]
    expected, expected_last = kernels(mixed, log_decay, beta, memory, True, True, True)
    torch.testing.assert_close(alone, expected)
    torch.testing.assert_close(last, expected_last)


def test_the_operator_is_a_proper_one():
    mixed, log_decay, beta, memory = rule_inputs(20, 16, 16, num_heads=1)
    for arguments in ((None, 1, 1, 16, True, False, True, None), (memory, 1, 1, 16, True, True, True, True)):
        torch.library.opcheck(gated_delta_rule_forward, (mixed, log_decay, beta, *arguments))


@pytest.mark.parametrize(("unmapped", "parallel"), [(None, True), (1, False), (3, True)])
def test_stacked_calls_are_each_alone(unmapped, parallel):
    inputs = [x.detach() for x in rule_inputs(20, 16, 16, num_heads=1, batch=2)]
    stacked = [x if axis == unmapped else torch.stack([x, 1.5 * x], dim=1) for axis, x in enumerate(inputs)]

    def loss(*tensors: Tensor) -> Tensor:
        output, last = kernels(*tensors, True, parallel, True)
        assert last is not None
        return output.square().sum() + last.square().sum()

    in_dims = [None if axis == unmapped else 1 for axis in range(4)]
    assert_stacked(loss, [x.requires_grad_() for x in stacked], in_dims)


def test_the_operator_reports_the_flops_of_the_recurrence():
    mixed, log_decay, beta, memory = rule_inputs(65, 16, 32)
    with FlopCounterMode(display=False) as counter:
        output, _ = kernels(mixed, log_decay, beta, memory, True, False, False)
        assert counter.get_total_flops() == 65 * 2 * 6 * 16 * 32
        output.sum().backward()
    assert counter.get_total_flops() == 3 * 65 * 2 * 6 * 16 * 32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("key_width", "value_width", "unit"), [(16, 16, False), (64, 48, True), (128, 128, True), (256, 64, False)]
)
def test_a_step_is_the_definition_s_and_leaves_the_memory_after_it(key_width, value_width, unit, dtype):
    mixed, log_decay, beta, memory = (
        x.detach() for x in rule_inputs(3, key_width, value_width, num_heads=2, batch=3, dtype=dtype)
    )
    expected, expected_memory = definition(*(x.double() for x in (mixed, log_decay, beta, memory)), unit)
    own = memory.clone()
    mixed_rows = [gated_delta_rule_step(mixed[:, t], log_decay[:, t], beta[:, t], own, unit) for t in range(3)]
    actual = torch.stack(mixed_rows, dim=1)
    assert actual.dtype == dtype
    assert_near(actual.reshape(expected.shape), expected, TOLERANCE[dtype])
    assert_near(own, expected_memory, TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "key_width"), [(torch.float64, 16), (torch.float32, 256)])
def test_a_dtype_that_there_is_not_is_refused(dtype, key_width):
    inputs = [x.detach().to(dtype) for x in rule_inputs(5, key_width, 16)]
    with pytest.raises(UserError, match=rf"bfloat16 and, up to 128 .* float32, not {dtype} at {key_width}.*=torch"):
        kernels(*inputs, True, False, False)


def test_few_walks_go_parallel_only_on_a_gpu():
    mixed, log_decay, beta, _ = rule_inputs(64 * 9, 16, 16, device="cpu")
    assert not DeltaRule(mixed, log_decay, beta, 2, 2, 16, True).goes_parallel()


@pytest.mark.parametrize(
    ("num_heads", "width", "dtype", "length", "parallel"),
    [
        (26, 64, torch.bfloat16, 64 * 8, True),
        (27, 64, torch.bfloat16, 64 * 8, False),
        (26, 64, torch.bfloat16, 64 * 7, False),
        (131, 32, torch.bfloat16, 32 * 8, True),
        (132, 32, torch.bfloat16, 32 * 8, False),
        (65, 128, torch.float32, 64 * 8, True),
        (66, 128, torch.float32, 64 * 8, False),
    ],
)
def test_heads_are_few_by_what_was_timed(num_heads, width, dtype, length, parallel, monkeypatch):
    monkeypatch.setattr(delta_rule_choice, "num_multiprocessors", lambda device: 132)
    mixed, rates = torch.empty(1, length, 3 * num_heads * width, dtype=dtype), torch.empty(1, length, num_heads)
    assert DeltaRule(mixed, rates, rates, num_heads, num_heads, width, True).goes_parallel() == parallel


def test_long_walks_of_few_heads_are_shared_by_more_programs(monkeypatch):
    """Blocks of 32 channels of values, while the multiprocessors are as many as such walks."""
    monkeypatch.setattr(delta_rule_choice, "num_multiprocessors", lambda device: 2)
    inputs = rule_inputs(64 * 7 + 5, 64, 64, num_heads=1, dtype=torch.bfloat16)

    def num_blocks(length: int) -> list[int]:
        rule = DeltaRule(*(x[:, :length] for x in inputs[:3]), 1, 1, 64, True)
        return [rule.num_blocks(kernel) for kernel in ("walk_forward", "walk_backward", "read")]

    assert num_blocks(64 * 7 + 1) == [2, 2, 1]
    assert num_blocks(64 * 7) == [1, 1, 1]
    check(inputs, unit=True, parallel=False, given=True)
    monkeypatch.setattr(delta_rule_choice, "num_multiprocessors", lambda device: 1)
    assert num_blocks(64 * 7 + 1) == [1, 1, 1]


@pytest.mark.parametrize(("num_steps", "groups"), [(2, 2), (3, 2), (2, 1)])
def test_kernels_take_sub_steps(num_steps, groups):
    """Also where heads share query and key. And a single position walks through its own, one by one."""
    width, of_steps = 16, (2, num_steps * 35, 2)
    shapes = [(2, 35, groups), (2, num_steps * 35, groups), of_steps, (2, 2, width)]
    query, key, value, memory = (normal(*shape, width, seed=seed) for seed, shape in enumerate(shapes))
    generator = torch.Generator().manual_seed(3)
    log_decay = -5 * torch.rand(2, 35, 2, generator=generator).to(DEVICE)
    beta = 2 * torch.rand(of_steps, generator=generator).to(DEVICE)

    def kernels(query: Tensor, key: Tensor, value: Tensor, *others: Tensor):
        parts = (query, key.unflatten(1, (-1, num_steps)), value.unflatten(1, (-1, num_steps)))
        return packed_gated_delta_rule(torch.cat([x.flatten(2) for x in parts], dim=-1), *others, width, True, groups)

    def exact(query: Tensor, key: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (x.repeat_interleave(2 // groups, 2) for x in (query, key))
        return DELTA_RULE.define(unit_length(query, width**-0.5), unit_length(key), *others)

    tensors = [query, key, value, log_decay, beta, memory]
    assert_definition(kernels, exact, [x.requires_grad_() for x in tensors], 1e-4)
    alone = [x.detach()[:, : 1 if x.shape[1] == 35 else num_steps] for x in tensors[:-1]]
    own = memory.detach().clone()
    y, last = kernels(*alone, own)
    expected, expected_memory = exact(*alone, memory.detach())
    assert last is None
    assert_near(y, expected, 1e-5)
    assert_near(own, expected_memory, 1e-5)


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("length", [1, 16, 31, 33, 49, 64, 65, 300])
@pytest.mark.parametrize(
    ("key_width", "value_width", "dtype"),
    [
        (16, 16, torch.float32),
        (32, 32, torch.bfloat16),
        (32, 32, torch.float32),
        (32, 64, torch.bfloat16),
        (64, 16, torch.bfloat16),
        (64, 32, torch.float32),
        (64, 64, torch.bfloat16),
        (64, 64, torch.float32),
        (64, 128, torch.bfloat16),
        (128, 32, torch.bfloat16),
        (128, 32, torch.float32),
        (128, 128, torch.float32),
        (128, 128, torch.bfloat16),
        (16, 48, torch.bfloat16),
        (256, 16, torch.bfloat16),
        (256, 64, torch.bfloat16),
        (256, 512, torch.bfloat16),
    ],
)
def test_compiled_kernels_are_the_definition(key_width, value_width, dtype, length, parallel):
    for given, unit in ((False, True), (True, True)):
        inputs = rule_inputs(length, key_width, value_width, num_heads=3, batch=2, dtype=dtype)
        check(inputs, unit=unit, parallel=parallel, given=given)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("length", [64 * 7 + 1, 64 * 8, 1000])
@pytest.mark.parametrize(("key_width", "value_width"), [(64, 64), (64, 128), (128, 128)])
def test_compiled_narrow_walks_are_the_definition(key_width, value_width, length, given):
    inputs = rule_inputs(length, key_width, value_width, num_heads=3, batch=2, dtype=torch.bfloat16)
    assert DeltaRule(*inputs[:3], 3, 3, key_width, True).launch_of("walk_forward")["VALUES"] == 32
    check(inputs, unit=True, parallel=False, given=given)


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_kernels_keep_their_digits_where_all_keys_are_alike(dtype, parallel):
    for width in (32, 64):
        inputs = rule_inputs(300, width, width, dtype=dtype, alike=8.0)
        check(inputs, unit=True, parallel=parallel, given=True)


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 128), (256, 64)])
def test_compiled_kernels_share_heads_of_query_and_key(width, value_width, parallel):
    check_shared(width, value_width, torch.bfloat16, parallel)


@pytest.mark.gpu
@both_forms
def test_more_sequences_than_a_grid_s_second_axis_has_places(parallel):
    check(rule_inputs(2, 16, 16, batch=33_000), unit=True, parallel=parallel, given=True)


@pytest.mark.gpu
@both_forms
def test_compiled_kernels_give_the_same_bits_again_and_write_everything(parallel):
    inputs = rule_inputs(1000, 64, 64, num_heads=4, batch=8, dtype=torch.bfloat16)
    assert_same_bits(lambda: kernels(*inputs, True, parallel, True), inputs)
