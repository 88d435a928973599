"""The contract of a mixer, over every yaml of conf/attn. A new mixer is under it as soon as its yaml exists."""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_checks import assert_stacked
from mixer_building import (
    CASE,
    CONF,
    DIM,
    HEAD_WIDTH,
    assert_near,
    backend,
    breach,
    build,
    check_compiles_and_stacks,
    example_input,
    half_lives,
    read,
)
from small import MIXERS, OPERATORS, WITH_PARTS, one_an_operator
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from attnbench.correctness.checks import build_mixer
from attnbench.mixers.causality import seen_of_the_future
from attnbench.mixers.contract import (
    ALL_LENGTHS,
    PROMISES,
    causality,
    definition,
    flops,
    forgetting,
    gradients,
    independence,
    pieces,
    shape_and_dtype,
    state,
)
from attnbench.mixers.shell import Shell
from attnbench.mixers.softmax import Softmax
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import MixerSettings

SHARED = ({"conv_size": 0}, {"conv_size": 4}, {"output_gate": "none"}, {"output_gate": "silu"}, {"qk_norm": False})
SHARED += ({"qk_norm": True},)
AROUND = ({"rotary_theta": None}, {"rotary_theta": 100.0}, {"output_norm": False})
AROUND += ({"output_norm": True, "output_gate": "sigmoid"},)
CHANGES: tuple[dict[str, Any], ...] = (
    *SHARED,
    {"num_heads": 3, "head_width": 16},
    {"num_key_value_heads": 1, "qk_norm": True, "output_gate": "silu", "conv_size": 4},
    *AROUND,
    *({"feature_map": "relu"}, {"feature_map": "softmax"}, {"negative_eigenvalues": True}),
    *({"value_expansion": 2}, {"value_expansion": 0.5}),
    {"num_heads": 3, "head_width": 16, "value_expansion": 1.5},
    *({"window": 1}, {"window": 5}, {"window": 500}, {"latent_width": 7, "rotary_width": 4}),
)
"""Options of mixers beside their yamls'; those that a mixer has not, or has anyway, are left out."""


def changes_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The changes that a mixer can take: it has such options, and does not refuse their widths."""
    _, options = read(name)
    for change in CHANGES:
        if change.items() - options.items() and change.keys() - {"head_width"} <= options.keys():
            with suppress(UserError):
                build(name, **change)
                yield name, change


every_mixer = pytest.mark.parametrize("name", MIXERS)
every_mixer_with_parts = pytest.mark.parametrize("name", WITH_PARTS)
TRACED = ("linear", "softmax")
"""Mixers that are traced, which takes seconds each, in every run of the tests: operators alone are in tests/ops."""
one_mixer_an_operator = pytest.mark.parametrize("name", one_an_operator(WITH_PARTS))
"""For what stands around a mixing and takes long; the other mixers are among the slow tests."""

ONE_LENGTH, EVERY_LENGTH = replace(CASE, lengths=(65,)), replace(CASE, lengths=ALL_LENGTHS.lengths)
"""One more than a chunk of 16, 32 or 64."""
BY_LENGTH = (shape_and_dtype, definition, forgetting, pieces)
"""Promises that are checked at each of a case's lengths."""
OF_NUMBERS = (definition, forgetting, pieces)
"""Promises that another precision may break: those on what depends on what are of the code, which is the same."""
CHECKS = tuple(promise.check for promise in PROMISES)
OF_THE_RECURRENCE = (definition, pieces, gradients)
"""Promises that an option of the recurrence alone may break; where it forgets, each mixer is looked at as it stands."""


def breaches(build_one, case, checked, allowed_to_break=()):
    """Words on each of these promises that is broken, by the promise's."""
    promises = [promise for promise in PROMISES if promise.check in checked and promise.check not in allowed_to_break]
    found = {promise.words: breach(promise, build_one, case) for promise in promises}
    return {words: broken for words, broken in found.items() if broken}


def without_state(name, **change):
    """Checks of a state, where the backend that is chosen only trains."""
    only_trains = backend(name, **change) in read(name)[0].trains_only
    return [promise.check for promise in PROMISES if promise.needs_state] if only_trains else []


KINDS = {
    "float32": (torch.float32, ONE_LENGTH, CHECKS),
    "bfloat16": (torch.bfloat16, ONE_LENGTH, (shape_and_dtype, *OF_NUMBERS)),
    "every_length": (torch.float64, EVERY_LENGTH, BY_LENGTH),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.slow] * (kind == "every_length" or is_late))
        for kind in KINDS
        for name in MIXERS
        for is_late in [kind == "bfloat16" and name not in OPERATORS]
    ],
)
def test_keeps_its_promises(kind, name):
    dtype, case, checked = KINDS[kind]
    assert breaches(lambda: build(name, dtype=dtype), case, checked, without_state(name)) == {}


BARE = {"rotary_theta": None, "conv_size": 0, "output_norm": False, "output_gate": "none"}
EVERYTHING = {"rotary_theta": 100.0, "conv_size": 4, "qk_norm": True, "output_norm": True, "output_gate": "sigmoid"}
"""Nothing, and all that can stand around a mixing, at once; a norm of keys that a recurrence needs stays."""


@one_mixer_an_operator
@pytest.mark.parametrize("change", [BARE, EVERYTHING], ids=["bare", "everything"])
def test_keeps_its_promises_with_nothing_and_with_everything_around_it(name, change):
    allowed = without_state(name, **change)
    assert breaches(lambda: build(name, dtype=torch.float64, **change), ONE_LENGTH, CHECKS, allowed) == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(
            name,
            change,
            id=f"{name}-{change}",
            marks=[pytest.mark.slow] * (name not in OPERATORS or change in (*SHARED, *AROUND)),
        )
        for name, change in itertools.chain(*map(changes_of, MIXERS))
        if name in OPERATORS or change not in (*SHARED, *AROUND)
    ],
)
def test_keeps_its_promises_with_options(name, change):
    """Parts around a mixing are the same code in every mixer: one mixer an operator has them one by one, among the slow
    tests, and all at once in the test before this. Options of the recurrence are quick for one mixer an operator."""
    checked = CHECKS if change in SHARED else OF_THE_RECURRENCE
    allowed = without_state(name, **change)
    assert breaches(lambda: build(name, dtype=torch.float64, **change), ONE_LENGTH, checked, allowed) == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, {}) for name in MIXERS),
        *(
            pytest.param(name, change, marks=[pytest.mark.slow] * (name not in OPERATORS))
            for name, change in itertools.chain(*map(changes_of, MIXERS))
        ),
    ],
)
def test_flops_are_those_of_the_definition(name, change):
    """To the operation, where the contract asks for as many within a factor."""
    if not issubclass(read(name)[0], Shell):
        pytest.skip("its definition may have products that torch does not count")
    mixer, x = build(name, **change), example_input(3, 7)
    mixing = mixer.mixing_flops(7)
    assert mixing is not None
    with FlopCounterMode(display=False) as counter:
        mixer.reference(x)
    weights = sum(module.weight.numel() for module in mixer.modules() if isinstance(module, nn.Linear))
    assert counter.get_total_flops() == 3 * (mixing + 2 * 7 * weights)


@every_mixer
def test_sees_all_of_the_past(name):
    x = example_input(2, 133).requires_grad_()
    mixer = build(name)
    y, _ = mixer(x)
    for position in (0, 63, 64, 100):
        (gradient,) = torch.autograd.grad(y[:, position].square().sum(), x, retain_graph=True)
        # Every earlier position counts, the oldest too, of those in the window where there is one.
        window = getattr(mixer, "window", getattr(mixer, "taps", None))
        first = 0 if window is None else max(0, position + 1 - window)
        assert gradient[:, first : position + 1].abs().amax(-1).gt(0).all(), position
        assert not gradient[:, :first].any(), position


BROKEN = {
    "SeparateProjections": [],
    "SeesOneAhead": [causality, pieces],
    "SeesTheFutureWithoutGradient": [causality, pieces],
    "NormsOverTime": [causality, pieces],
    "RoundsByTheFuture": [],
    "NormsOverTheBatch": [independence, definition],
    "OverflowsWhereItForgets": [forgetting],
    "DecaysOfNoPosition": [forgetting],
    "GrowsByItsDecay": [forgetting],
    "StepsDecayTwice": [pieces],
    "OnePercentOff": [definition],
    "LosesTheQuery": [definition],
    "TrainsLess": [definition, gradients],
    "HandsOnAnother": [state],
    "CheapOnPaper": [flops],
    "PairsOnPaper": [flops],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_mixer_is_caught_by_the_promises_that_it_breaks(kind):
    target = f"outside_mixers.{kind}"
    settings = MixerSettings(name="wrong", target=target, options={"backend": "torch"})
    trust([target])
    case = replace(CASE, lengths=(1, 65))
    build_wrong = partial(build_mixer, settings, torch.device("cpu"), case)
    broken = [promise.check for promise in PROMISES if breach(promise, build_wrong, case)]
    assert broken == BROKEN[kind]


def test_a_step_that_returns_no_state_is_named():
    trust(["outside_mixers.StepsWithoutState"])
    settings = MixerSettings(name="wrong", target="outside_mixers.StepsWithoutState", options={"backend": "torch"})
    case = replace(CASE, lengths=(65,))
    broken = {it.check: breach(it, partial(build_mixer, settings, torch.device("cpu"), case), case) for it in PROMISES}
    words = "step returns one Tensor; return (y, state), with y of the input's shape (2, "
    assert [check for check, said in broken.items() if said.startswith(words)] == [pieces, state]
    assert not any(said for check, said in broken.items() if check not in (pieces, state))


@pytest.mark.parametrize("kind", ["TakesHalfPrecisionAlone", "BeginsAtZero"])
def test_a_mixer_is_built_to_be_checked_without_its_kernels(kind):
    """Some take half precision alone, and the checks have their own."""
    target = f"outside_mixers.{kind}"
    trust([target])
    mixer = build_mixer(MixerSettings(name="mine", target=target, options={}), torch.device("cpu"), CASE)
    assert mixer.reference(example_input(2, 70)).any()


def test_rounding_by_the_future_is_a_leak_in_a_mixer_of_attnbench():
    target = "outside_mixers.RoundsByTheFuture"
    trust([target])
    mixer = build_mixer(
        MixerSettings(name="wrong", target=target, options={"backend": "torch"}), torch.device("cpu"), CASE
    )
    assert seen_of_the_future(mixer, CASE.model.dim, 70) == ""
    assert "where only later inputs do" in seen_of_the_future(mixer, CASE.model.dim, 70, is_exact=True)


@every_mixer
def test_vmap_over_stacked_parameters(name):
    mixer = build(name)
    if backend(name) in mixer.without_vmap:
        pytest.skip(f"{backend(name)} has no batching rule")
    x, (names, values) = example_input(2, 133), zip(*mixer.named_parameters(), strict=True)

    def loss(*given: Tensor) -> Tensor:
        return functional_call(mixer, dict(zip(names, given, strict=True)), (x,))[0].square().sum()

    stacked = [torch.stack([scale * x.detach() for scale in (1.0, 1.3, 0.7)]).requires_grad_() for x in values]
    assert_stacked(loss, stacked, [0] * len(stacked), 1e-4)


@pytest.mark.parametrize(
    "name", [name if name in TRACED else pytest.param(name, marks=pytest.mark.slow) for name in WITH_PARTS]
)
def test_compiles_and_stacks_with_everything_around_it(name):
    mixer = build(name, **EVERYTHING)
    if backend(name) in mixer.without_vmap:
        pytest.skip(f"{backend(name)} has no batching rule")
    check_compiles_and_stacks(mixer)


@every_mixer_with_parts
def test_takes_the_same_five_options_around_it_and_refuses_a_gate_that_is_none_of_them(name):
    mixer_class, options = read(name)
    assert options.keys() >= EVERYTHING.keys()
    for gate in ("tanh", True, None):
        target = f"{mixer_class.__module__}.{mixer_class.__name__}"
        wrong = {**options, "backend": backend(name), "output_gate": gate}
        with pytest.raises(UserError, match=r"^attn\.output_gate=\w+: must be one of none, silu, sigmoid$"):
            build_mixer(MixerSettings(name=name, target=target, options=wrong), torch.device("cpu"), CASE)


@every_mixer
def test_says_whether_its_recurrence_tells_positions_apart(name):
    """Without an order of its own, positions and a convolution, an output does not know how the past was ordered."""
    without = {"rotary_theta": None, "conv_size": 0} if name in WITH_PARTS else {}
    mixer = build(name, dtype=torch.float64, **without)
    x = example_input(2, 40, dtype=torch.float64)
    other = torch.cat([x[:, :39].flip(1), x[:, 39:]], dim=1)
    last, last_of_other = mixer(x)[0][:, -1], mixer(other)[0][:, -1]
    assert torch.allclose(last, last_of_other, rtol=1e-9, atol=0) is not mixer.has_order


@every_mixer_with_parts
def test_positions_are_counted_on_in_a_state_and_only_distances_matter(name):
    mixer, x = build(name, dtype=torch.float64, rotary_theta=100.0), example_input(2, 20, dtype=torch.float64)
    expected, _ = mixer(x)
    state = mixer.init_state(2, 40, torch.float64)
    state.position.fill_(7)
    if not any("_BS" in field for field in state._fields):
        # Of a cache, the positions before would be zeros that are seen. Angles are in float32.
        assert_near(mixer(x, state)[0], expected, 1e-5)
        assert int(state.position) == 27
        assert build(name, rotary_theta=None).init_state(2, 40, torch.float32).position.numel() == 0
    assert not torch.allclose(build(name, dtype=torch.float64, rotary_theta=None)(x)[0], expected, rtol=1e-3)


with_decay_init = [name for name in MIXERS if "decay_init" in read(name)[1]]


@pytest.mark.parametrize("name", with_decay_init)
@pytest.mark.parametrize("num_heads", [1, 4, 12])
def test_spread_decays_reach_from_a_few_positions_to_hundreds(name, num_heads):
    """Initial decays decide whether recall is learned at all."""
    lives = half_lives(build(name, num_heads=num_heads, decay_init="spread"), DIM)
    assert lives is not None
    if lives.numel() >= 4:
        assert lives.min() <= 3
        assert lives.max() >= 500
    assert lives.max() >= 200


@every_mixer
def test_a_decay_that_is_learned_has_initial_values_to_choose_from(name):
    """And begins, unless told otherwise, as the spread has it."""
    decay = build(name).log_decay(example_input(2, 5))
    assert decay is None or decay.max() <= 0
    is_learned = decay is not None and decay.requires_grad
    assert (read(name)[1].get("decay_init") == "spread") == is_learned


@every_mixer_with_parts
def test_a_memory_decays_as_it_is_said_to(name):
    """An input of 0 has no key and no value: what is left of the memory then is the decay alone."""
    mixer, x = build(name, dtype=torch.float64), torch.zeros(2, DIM, dtype=torch.float64)
    if isinstance(mixer, Softmax):
        pytest.skip("a cache, or a window of one, is no memory that decays")
    state, decay_B1H = mixer.init_state(2, 4, torch.float64), mixer.log_decay(x[:, None])
    is_cache = any("_BS" in field for field in state._fields)
    if is_cache or {*state._fields} - {*mixer.state_memory, "history_BWC", "position"}:
        pytest.skip("its memory is not its state as it stands")
    memory_BHKV = getattr(state, mixer.state_memory[0]).fill_(1.0)
    mixer.step(x, state)
    left_BHK = torch.ones(()) if decay_B1H is None else decay_B1H[:, 0].exp()
    expected = (left_BHK if left_BHK.dim() != 2 else left_BHK[..., None])[..., None].expand(memory_BHKV.shape)
    torch.testing.assert_close(memory_BHKV, expected.to(memory_BHKV.dtype))


@every_mixer
def test_reads_bfloat16_under_autocast(name):
    mixer, x = build(name), example_input(2, 133)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer(x)
    assert_near(y, mixer(x)[0], 4e-2)


@every_mixer
def test_names_parameters_without_weight_decay_that_exist(name):
    for module in build(name).modules():
        assert getattr(module, "no_weight_decay", frozenset()) <= dict(module.named_parameters(recurse=False)).keys()


@pytest.mark.parametrize("name", sorted({path.stem for path in CONF.glob("*.yaml")} - {"hybrid"}))
def test_an_unknown_backend_is_refused_with_those_that_there_are(name):
    mixer_class, options = read(name)
    with pytest.raises(UserError, match=r"^attn\.backend=tritn: "):
        mixer_class.choose_backend(options | {"backend": "tritn"}, device_type="cpu", precision="float32")
    sizes = {"dim": DIM, "head_width": HEAD_WIDTH, "layer": 0, "num_layers": 2}
    given = {key: value for key, value in sizes.items() if key in inspect.signature(mixer_class).parameters} | options
    known = ", ".join(("auto", *mixer_class.backends))
    with pytest.raises(UserError, match=rf"^attn\.backend=tritn: {mixer_class.__name__} has {known}$"):
        mixer_class(**given | {"backend": "tritn"})


@pytest.mark.parametrize("name", [name for name in MIXERS if "fla" in read(name)[0].backends])
def test_the_library_s_kernel_needs_cuda(name):
    with pytest.raises(UserError, match=r"attn\.backend=fla.*needs CUDA.*backend=torch"):
        build(name, backend="fla")


REFUSED = {"value_expansion": 1.3, "decay_init": "never", "decay_rank": 0, "feature_map": "cosine", "state_width": 0}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in MIXERS for option in REFUSED if option in read(name)[1]]
)
def test_a_value_that_cannot_be_is_refused(name, option):
    with pytest.raises(UserError, match=rf"attn\.{option}={REFUSED[option]}: "):
        build(name, **{option: REFUSED[option]})


SCALAR, DIAGONAL = ("retnet", "simple_gla", "mamba2", "mlstm", "mamba3"), ("gla", "hgrn2", "kda", "gdn2", "rwkv7")
WIDTHS = {**dict.fromkeys(SCALAR, (32, 40)), **dict.fromkeys(DIAGONAL, (64, 48))}
"""A width that our kernels of a mixer have, and one that they have not."""


@pytest.mark.parametrize("name", WIDTHS)
def test_auto_is_triton_where_our_kernels_run(name):
    has, lacks = WIDTHS[name]
    for device_type, width, chosen in (("cuda", has, "triton"), ("cuda", lacks, "torch"), ("cpu", has, "torch")):
        mixer_class, options = read(name)
        options |= dict.fromkeys({"head_width", "state_width"} & {"head_width", *options}, width)
        assert mixer_class.choose_backend(options, device_type=device_type, precision="bfloat16") == chosen


@pytest.mark.parametrize("name", ["softmax", "flash", "mla", "fox"])
def test_a_cache_takes_no_more_than_it_was_made_for(name):
    mixer, x = build(name), example_input(1, 3)
    _, state = mixer(x, mixer.init_state(1, 4, torch.float32))
    with pytest.raises(ValueError, match="position 6 is past the 4"):
        mixer(x, state)
    assert int(state.position) == 3


GATES = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


@every_mixer_with_parts
@pytest.mark.parametrize("gate", ["none", *GATES])
def test_an_output_is_normed_by_heads_then_gated_then_projected(name, gate):
    plain: Any = build(name, dtype=torch.float64, output_norm=False, output_gate="none")
    mixer: Any = build(name, dtype=torch.float64, output_norm=True, output_gate=gate)
    with torch.no_grad():
        nn.init.uniform_(mixer.norm.weight, 0.5, 2.0)
        for part in ("bonus", "shift"):
            # What comes to the norm's output, and what else than x the gate reads.
            for one in (plain, mixer):
                getattr(one, part, torch.empty(0)).zero_()
        plain.output.projection = nn.Identity()
    x = example_input(2, 20, dtype=torch.float64)
    heads = plain(x)[0].unflatten(-1, (-1, len(mixer.norm.weight)))
    normed = mixer.norm.weight * heads / (heads.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt()
    gated = normed.flatten(2) * (GATES[gate](mixer.output.gate(x)) if gate != "none" else 1)
    assert_near(mixer(x)[0], gated @ mixer.output.projection.weight.mT, 1e-10)
    assert (mixer.output.gate is None) == (gate == "none")


@pytest.mark.parametrize("name", MIXERS)
def test_activation_is_what_the_class_says(name):
    cls, options = read(name)
    for conv_size in {0, 4} if "conv_size" in options else ():
        layer = getattr(build(name, conv_size=conv_size), "query_key_value", None)
        assert cls.activates({**options, "conv_size": conv_size}) == (layer is not None and layer.activation)
